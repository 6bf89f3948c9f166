"""Find the batch and the learning rate that a recipe should have here, and write them down with the evidence.

Imports neither torch nor Composer: everything that is measured runs in fresh processes.
"""
