"""bfloat16 products on a CPU that has no instruction for them: in float32, with one rounding at the end.

What a GPU's tensor cores do with bfloat16, as numerics: products of bfloat16 are exact in float32, sums are float32's,
and the result is rounded once. PyTorch's own loop on such a CPU does nearly the same at a fiftieth of the speed.
Python imports this file by itself in each process whose PYTHONPATH begins with its folder.
"""

import warnings
from contextlib import suppress

import torch

_out = {name: getattr(torch.ops.aten, name).out for name in ("mm", "bmm", "addmm", "baddbmm")}


def _product(name):
    def call(*matrices, **scales):
        if matrices[-1].dtype is torch.bfloat16:
            wide = [matrix.float() for matrix in matrices]
            return _out[name](*wide, **scales, out=torch.empty(0)).bfloat16()
        return _out[name](*matrices, **scales, out=matrices[-1].new_empty(0))

    return call


_library = torch.library.Library("aten", "IMPL")
for _name in _out:
    with warnings.catch_warnings():  # that a kernel is replaced is the purpose
        warnings.simplefilter("ignore")
        _library.impl(_name, _product(_name), "CPU")

with suppress(ImportError):  # not where Python runs something else than this package
    import composer_speedups.hardware

    # Or the recipe would be skipped: without this file a training would take fifty times as long.
    composer_speedups.hardware.multiplies_bf16 = lambda: True
