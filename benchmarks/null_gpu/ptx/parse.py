"""PTX as text -> kernels of basic blocks. Only what Triton writes: one entry, no functions, no local memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["Block", "Instruction", "Kernel", "Unsupported", "parse"]

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_SKIPPED = re.compile(r"\s*\.(loc|file|pragma|maxntid|reqntid|minnctapersm)\b")  # directives, of a line each


class Unsupported(Exception):
    """PTX that is not understood here."""


@dataclass(frozen=True)
class Instruction:
    """`@guard op.modifiers operands`; a guard that begins with `!` is negated."""

    text: str
    op: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]  # vectors stay one operand: "{%r1, %r2}"
    guard: str | None = None

    @property
    def kind(self) -> str:
        """The type of what it computes, which PTX writes last."""
        return self.modifiers[-1] if self.modifiers else ""


@dataclass
class Block:
    """Instructions of which all run or none; only the last one may jump."""

    label: str
    body: list[Instruction] = field(default_factory=list)


@dataclass
class Kernel:
    name: str
    parameters: dict[str, int]  # their names and bytes, in order
    registers: dict[str, str]  # by name, or by what their names begin with, as "%rd": their type, as "b64"
    blocks: list[Block]
    variables: set[str]  # of shared and of global memory


def parse(text: str) -> Kernel:
    """The kernel of a PTX file."""
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.visible \.entry (\S+?)\s*\((.*?)\)(.*)", text, re.DOTALL)
    if entry is None:
        raise Unsupported("PTX without an entry")
    name, parameters, rest = entry.groups()
    declared = list(re.finditer(r"\.param \.[busf](\d+)[^,]*?([\w$]+)\s*(?:,|$)", parameters))
    if len(declared) != parameters.count(".param"):
        raise Unsupported(f"the parameters of {name}")
    body = _between_braces(rest)
    registers = {prefix: kind for kind, prefix in re.findall(r"\.reg\s+\.(\w+)\s+(%\w+)<\d+>", body)}
    return Kernel(
        name,
        {parameter[2]: _SIZES[parameter[1]] for parameter in declared},
        registers,
        _blocks(body, registers),
        set(re.findall(r"\.(?:shared|global)\b[^;=]*?([\w$]+)\s*\[", text)),
    )


def _between_braces(text: str) -> str:
    depth, start = 0, text.index("{")
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[start + 1 : i]
    raise Unsupported("PTX that ends within a kernel")


def _blocks(body: str, registers: dict[str, str]) -> list[Block]:
    """Adds the registers of inner scopes, which have names that stand for others elsewhere, to `registers`."""
    blocks = [Block("")]
    scoped: dict[str, str] = {}  # what such names mean
    lines = "\n".join(line for line in body.splitlines() if not _SKIPPED.match(line))
    for statement in lines.split(";"):
        while begin := re.match(r"\s*(?:([\w$]+):|[{}])", statement):  # a label, or where a scope begins or ends
            if begin[1]:
                blocks.append(Block(begin[1]))
            statement = statement[begin.end() :]
        if declared := re.match(r"\s*\.reg\s+\.(\w+)\s+([\w$]+(?:\s*,\s*[\w$]+)*)\s*$", statement):
            for name in re.findall(r"[\w$]+", declared[2]):
                scoped[name] = f"%{name}_{declared[1]}"
                registers[scoped[name]] = declared[1]
            continue
        if not statement.strip() or re.match(r"\s*\.(reg|param)\b", statement):
            continue
        for name, meant in scoped.items():
            statement = re.sub(rf"(?<![\w%$.]){re.escape(name)}(?![\w$])", meant, statement)
        instruction = _instruction(" ".join(statement.split()))
        blocks[-1].body.append(instruction)
        if instruction.op in ("bra", "ret"):
            blocks.append(Block(""))
    return blocks


def _instruction(text: str) -> Instruction:
    found = re.match(r"(?:@(!?%\w+)\s+)?([a-z]\w*)((?:\.[\w:]+)*)\s*(.*)$", text)
    if found is None:
        raise Unsupported(f"not an instruction: {text}")
    guard, op, modifiers, operands = found.groups()
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s][^,]*", operands)
    # ISA 7.8: `shared` and `shared::cta` are one. Which is written depends on the version of Triton.
    modifiers = modifiers.replace(".shared::cta", ".shared")
    return Instruction(text, op, tuple(modifiers.split(".")[1:]), tuple(part.strip() for part in parts), guard)
