"""A kernel of PTX -> Python functions, one a basic block.

A register is a row of an array, with a number for each thread; `m` is where threads are active, True if everywhere.
"""

from __future__ import annotations

import re
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from benchmarks.null_gpu.ptx import numerics
from benchmarks.null_gpu.ptx.instructions import EMIT
from benchmarks.null_gpu.ptx.operands import APART, BITS, immediate, numpy_name
from benchmarks.null_gpu.ptx.parse import Block, Instruction, Kernel, Unsupported

__all__ = ["Program"]

_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.([xyz])$|%(laneid)$")


class Program:
    """A kernel as functions, one a block: given the machine and `m`, they return where the last jump is taken.

    Raises:
        Unsupported: an instruction that is not known here; it is named.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.parameters = kernel.name, kernel.parameters
        self.rows: dict[str, int] = {}  # of each register in the array of its width
        self.counts = {1: 0, 16: 0, 32: 0, 64: 0}
        self.constants: dict[str, Any] = {}
        self._variables = kernel.variables
        self._widths = {prefix: BITS[kind] for prefix, kind in kernel.registers.items()}
        labels = {block.label: i for i, block in enumerate(kernel.blocks) if block.label}
        # A failed assertion is what is wrong, wherever its block stands.
        self.traps = {i for i, block in enumerate(kernel.blocks) if any(each.op == "trap" for each in block.body)}
        self.jumps: list[int | None] = []  # where each block's jump goes: a block, -1 for the end, None without one
        source: list[str] = []
        for i, block in enumerate(kernel.blocks):
            source += [f"def block_{i}(s, m):", *(f" {line}" for line in self._block(block)), " return None"]
            last = block.body[-1] if block.body else None
            self.jumps.append(
                labels[last.operands[0]] if last and last.op == "bra" else -1 if last and last.op == "ret" else None
            )
        space = {**vars(numerics), "np": np, "c": self.constants}
        code: CodeType = compile("\n".join(source), f"<{self.name}>", "exec")
        exec(code, space)
        self.blocks: list[FunctionType] = [space[f"block_{i}"] for i in range(len(kernel.blocks))]

    def order(self, block: int) -> tuple[bool, int]:
        """Of the blocks that threads wait at, the least runs first: so they meet again where the text goes on."""
        return block not in self.traps, block

    def _block(self, block: Block) -> list[str]:
        lines = ["u16, s16, f16, u32, s32, f32, u64, s64, f64, p = s.registers"]
        for instruction in block.body:
            try:
                lines += self._lines(instruction)
            except (Unsupported, KeyError, ValueError, IndexError, TypeError) as error:
                raise Unsupported(f"{self.name}: {instruction.text} ({error!r})") from error
        return lines

    def _lines(self, i: Instruction) -> list[str]:
        guard = None
        if i.guard:
            guard = f"{'~' if i.guard[0] == '!' else ''}{self.register(i.guard.lstrip('!'), 'pred')}"
        if i.op in ("bra", "ret"):
            return [f"return {guard or 'True'}"]
        emit = EMIT.get(i.op)
        if emit is None:
            raise Unsupported("unknown instruction")
        lines = emit(self, i, "m" if guard is None else "n")
        return lines if guard is None else [f"n = {guard} if m is True else m & {guard}", *lines]

    # --- operands -----------------------------------------------------------------------------------------------------

    def row(self, name: str) -> tuple[int, int]:
        """A register's width in bits and its place in the array of those."""
        width = self._widths.get(name) or self._widths[name.rstrip("0123456789")]
        if name not in self.rows:
            self.rows[name] = self.counts[width]
            self.counts[width] += 1
        return width, self.rows[name]

    def register(self, name: str, kind: str) -> str:
        """Its row, seen as `kind`; of wider registers the lower bits."""
        width, row = self.row(name)
        kind = kind.replace("b", "u") if kind != "bf16" else kind
        if width == 1:
            return f"p[{row}]"
        if BITS[kind] == width:
            packed = {"bf16": f"wide_bf16(u16[{row}])", "f32x2": f"u64[{row}].view(np.float32)"}  # two for each thread
            return packed.get(kind, f"{kind}[{row}]")
        if BITS[kind] > width or kind[0] == "f":
            raise Unsupported(f"{name} as {kind}")
        return f"u{width}[{row}].astype(np.{numpy_name(kind)})"

    def value(self, operand: str, kind: str) -> str:
        """What reads `operand`; 16-bit floats come widened to float32."""
        if special := _SPECIAL.match(operand):
            return f"s.{special[1]}_{special[2]}" if special[1] else "s.laneid"
        if operand.startswith("%"):
            found = self.register(operand, kind)
            return f"{found}.astype(np.float32)" if kind == "f16" else found
        if operand in self.parameters:  # an address, for a load that chooses
            operand = str(APART * list(self.parameters).index(operand))
        if operand in self._variables:  # shared memory begins at 0; what is in others is not read
            operand = "0"
        return self.constant(immediate(operand, kind))

    def constant(self, value: Any) -> str:
        name = f"{type(value).__name__}_{np.asarray(value).tobytes().hex()}"
        self.constants[name] = value
        return f"c[{name!r}]"

    def put(self, target: str, value: str, kind: str, m: str) -> list[str]:
        """Store `value` of type `kind`, extended by its sign or by zeros where the register is wider."""
        if target == "_":
            return []
        width, row = self.row(target)
        if width == 1:
            return [f"np.copyto(p[{row}], {value}, where={m})"]
        if kind == "bf16":
            return [f"np.copyto(u16[{row}], to_bf16({value}), where={m})"]
        if kind == "f32x2":
            return [f"np.copyto(u64[{row}], ({value}).view(np.uint64), where={m})"]
        letter = "f" if kind[0] == "f" else "s" if kind[0] == "s" else "u"
        if letter == "f" and BITS[kind] != width:
            raise Unsupported(f"{kind} into {target}")
        return [f"np.copyto({letter}{width}[{row}], {value}, where={m}, casting='unsafe')"]

    def address(self, operand: str) -> tuple[str, str]:
        """What is in the brackets: base and offset in bytes."""
        found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+)\s*)?\]", operand)
        if found is None:
            raise Unsupported(f"the address {operand}")
        return found[1], found[2] or "0"
