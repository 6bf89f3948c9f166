"""Whether a model computes with speed-ups what it computes without them: `verify.py` asks, of loss, gradients
and updates in float64; `findings.py` has the answer as plain numbers, without torch.
"""
