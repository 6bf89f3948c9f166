"""What `CUDAGraphs` needs: when a call is replayed (`replay.py`), how one is recorded (`recording.py`), whole models
(`model.py`), and what keeps a call from being the same as the recorded one.
"""
