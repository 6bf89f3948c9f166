"""Triton kernels compiled for a GPU that need not be there, and what their machine code says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = [
    "at_once",
    "compile_for",
    "copied_ahead",
    "instructions",
    "late_loads",
    "registers",
    "spills",
    "time_for",
]

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# Of one thread, in the time in which an H200 moves a byte: 132 processors of 128 lanes at 1.755 GHz, and 4.8 TB/s.
_A_BYTE = 132 * 128 * 1.755e9 / 4.8e12


def compile_for(
    capability: int,
    kernel: Any,
    dtypes: Mapping[str, torch.dtype],
    constants: Mapping[str, Any],
    warps: int,
    aligned: Collection[str] = (),
    stages: int | None = None,
    most: int = 0,
) -> Any:
    """`kernel` for `sm_<capability>`.

    Args:
        dtypes: of pointers, by their names without `_ptr`. What is neither here nor constant is an int32, but for `eps`
            and `scale`.
        constants: the kernel's `tl.constexpr`.
        aligned: numbers that are multiples of 16; pointers are, if this is given.
        stages: turns of a loop that are under way; None leaves it to Triton.
        most: registers of a thread; 0 leaves it to ptxas.
    """

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return _POINTERS[dtypes[name.removesuffix("_ptr")]]
        return "fp32" if name in ("eps", "scale") else "i32"

    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if aligned and (name.endswith("_ptr") or name in aligned)
    }
    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=dict(constants), attrs=attributes)
    options = {"num_warps": warps} | ({} if stages is None else {"num_stages": stages})
    options |= {"maxnreg": most} if most else {}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    return compiled


def spills(compiled: Any, folder: Path) -> int:
    """Bytes of a thread's values that live in memory, for want of registers or as arrays."""
    found = re.search(r"STACK:(\d+).*LOCAL:(\d+)", _tool("cuobjdump", "-res-usage", compiled, folder))
    assert found is not None, "cuobjdump says nothing about memory"
    return sum(map(int, found.groups()))


def instructions(compiled: Any, folder: Path, elements: int) -> float:
    """Of one thread, for each of the `elements` that a program takes in its longest loop, or, without one, at all."""
    return len(_loop(compiled, folder)) * 32 * compiled.metadata.num_warps / elements


def registers(compiled: Any, folder: Path) -> int:
    found = re.search(r"REG:(\d+)", _tool("cuobjdump", "-res-usage", compiled, folder))
    assert found is not None, "cuobjdump says nothing about registers"
    return int(found[1])


def at_once(compiled: Any, folder: Path) -> int:
    """Programs for which an H100's processor has registers (65,536, in 256s for a warp) and shared memory (227 KiB)."""
    of_a_warp = -(-registers(compiled, folder) * 32 // 256) * 256
    by_registers = 65536 // of_a_warp // compiled.metadata.num_warps
    return min(by_registers, 227 * 1024 // (compiled.metadata.shared + 1024))


def late_loads(compiled: Any, folder: Path) -> int:
    """Loads from memory in the longest loop that stand after an instruction which waits for another one of them.

    What a turn loads for the next one may be waited for at the beginning of that, before it is loaded again.
    """
    loaded: set[int] = set()
    read: set[int] = set()
    loads = waiting = late = 0
    for code, operands in _loop(compiled, folder):
        first, _, others = operands.partition(",")
        sources = others if re.fullmatch(r"\s*R\d+", first) and not code.startswith("ST") else operands
        waiting |= bool(loaded.intersection(_registers_in(sources)))
        read |= set(_registers_in(sources)) - loaded
        if re.match(r"LDG\b", code):
            loads += 1
            late += waiting
            words = int((re.search(r"\.(64|128)\b", code) or ["", 32])[1]) // 32
            (start,) = _registers_in(first)
            loaded |= set(range(start, start + words))
    assert loads > 1 and (waiting or loaded & read), f"{loads} loads in the loop, and nothing that waits for one"
    return late


def _registers_in(operands: str) -> list[int]:
    return [int(number) for number in re.findall(r"\bR(\d+)", operands)]


def _loop(compiled: Any, folder: Path) -> list[tuple[str, str]]:
    """Instructions of the longest loop with their operands; all, if there is none."""
    found: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    longest: list[tuple[str, str]] = []
    for line in _tool("nvdisasm", "-c", compiled, folder).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif (code := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line)) and code[1] != "NOP":
            found.append((code[1], code[2].partition(";")[0]))
            jump = re.match(r"BRA\b", code[1]) and re.search(r"\.L_x_\d+", code[2])
            if jump and jump[0] in labels:
                longest = max(longest, found[labels[jump[0]] :], key=len)
    return longest if len(longest) > 2 else found  # a kernel ends with a jump to itself


def copied_ahead(compiled: Any) -> tuple[int, int]:
    """Of a loop that copies to shared memory: how many tensors, and for how many turns while it waits for its own."""
    turn = compiled.asm["ptx"].partition("Inner Loop Header")[2].partition("bra")[0]
    tensors = turn.count("cp.async.commit_group")
    left = re.search(r"cp\.async\.wait_group\s+(\d+)", turn)
    assert tensors and left is not None, "nothing is copied in the loop"
    return tensors, int(left[1]) // tensors


def time_for(moved: int) -> float:
    """Instructions of a thread in the time in which `moved` bytes are; a kernel that has fewer waits for memory."""
    return _A_BYTE * moved


def _tool(name: str, option: str, compiled: Any, folder: Path) -> str:
    """What one of the tools says that come with Triton."""
    tool, binary = Path(triton.__file__).parent / "backends/nvidia/bin" / name, folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    return subprocess.run([tool, option, binary], check=True, capture_output=True, text=True).stdout
