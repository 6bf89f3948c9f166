"""Optimizers: one AdamW turned into another in place (`optimizers.py`), the base of the speed-ups that do so
(`speedup.py`), and what becomes of their state (`states.py`, `loading.py`, `convert.py`).
"""
