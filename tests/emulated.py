"""For pytest, `-p emulated`: Triton's kernels run on the CPU as compiled for `sm_$EMULATED`, not in its interpreter.

The package is told that they are interpreted, as then they take tensors of the CPU; Triton is not.
"""

from __future__ import annotations

import os

import triton

from benchmarks.null_gpu.ptx.driver import Emulator

_jit = triton.jit


def jit(function):
    del os.environ["TRITON_INTERPRET"]
    try:
        return _jit(function)
    finally:
        os.environ["TRITON_INTERPRET"] = "1"


os.environ["TRITON_INTERPRET"] = "1"
triton.jit = jit
triton.runtime.driver.set_active(Emulator(int(os.environ["EMULATED"])))

from composer_speedups.kernels import launch  # noqa: E402

launch._probe = None
launch.STAGES = int(os.environ.get("STAGES", launch.STAGES))
