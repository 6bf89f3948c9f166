"""Which speed-ups help this model on this machine: a short look at each, then a study of the best together.

Imports neither torch nor Composer: everything that is measured runs in fresh processes.
"""
