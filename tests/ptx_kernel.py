"""Kernels in PTX for tests of the emulator."""

from __future__ import annotations

import torch

from benchmarks.null_gpu.ptx.driver import launch
from benchmarks.null_gpu.ptx.parse import parse
from benchmarks.null_gpu.ptx.translate import Program


def kernel(body: str, parameters: int = 2, threads: int = 32, registers: int = 99) -> Program:
    """`body`, after which %rd1, %rd2, ... point to the parameters and %r1 is the thread."""
    declared = ", ".join(f".param .u64 .ptr .global .align 16 k_param_{i}" for i in range(parameters))
    loads = "".join(f"ld.param.b64 %rd{i + 1}, [k_param_{i}];\n" for i in range(parameters))
    return Program(
        parse(
            f".version 8.4\n.target sm_90a\n.extern .shared .align 16 .b8 global_smem[];\n"
            f".visible .entry k(\n{declared}\n)\n.reqntid {threads}\n{{\n.reg .pred %p<9>;\n.reg .b16 %rs<99>;\n"
            f".reg .b32 %r<{registers}>;\n.reg .b64 %rd<99>;\n{loads}mov.u32 %r1, %tid.x;\n{body}\nret;\n}}\n"
        )
    )


def run(program: Program, *tensors: torch.Tensor, threads: int = 32, shared: int = 0, grid=(1, 1, 1)) -> None:
    launch(program, [("*", t) for t in tensors], grid, threads, shared)
