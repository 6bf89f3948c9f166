"""From a recipe to a trained model and what was measured: `run.py` trains, `parts.py` makes what a Trainer takes,
`checkpoints.py` keeps it.
"""
