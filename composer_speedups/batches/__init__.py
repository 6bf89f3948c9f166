"""For the speed-ups that choose batches: which samples make one (`plans.py`), the loader that makes it (`loaders.py`),
and how a step's loss weighs them (`weighting.py`).
"""
