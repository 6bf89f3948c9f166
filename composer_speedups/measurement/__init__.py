"""What is measured of a training: speed (`measure.py`), memory, where a step's time goes (`inspection.py` runs the
steps, `profiling.py` reads them). `results.py` has what one run found, as plain data.
"""
