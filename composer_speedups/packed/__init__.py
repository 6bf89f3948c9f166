"""What `Unpadding` needs: where a batch's real tokens are (`packing.py`), which encoders can work on them alone
(`unpaddable.py`), and what is mixed into each family's modules (`encoder.py` for all, one file for each family).
"""
