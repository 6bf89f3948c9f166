"""The commands of `composer-speedups` that are more than a function of `cli.py`, which registers them."""
