"""Fresh processes for whatever is measured: `isolate.py` starts them, `worker.py` is what they are forked from,
`ranks.py` makes several ranks of one, and `watch.py` tells how each of them ended.
"""
