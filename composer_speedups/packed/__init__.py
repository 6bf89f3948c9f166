"""What `Unpadding` and `LastLayerSubset` need: where a batch's real tokens are (`packing.py`), which encoders can work
on them alone (`unpaddable.py`), and what is mixed into modules (`encoder.py` and `first.py` for all families, one file
for each, and which of it is whose in `by_family.py`).
"""
