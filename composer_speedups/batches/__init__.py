"""Which samples make a batch, for the speed-ups that choose it, and how a step's loss weighs them."""
