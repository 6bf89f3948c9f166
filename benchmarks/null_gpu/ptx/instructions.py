"""What each instruction of PTX is in Python: lines that compute it with NumPy, for all threads at once.

What the hardware computes to within a bound only (`ex2.approx`, `rsqrt.approx`, ...) comes out at that bound, up or
down by the last bit of its argument: a test that passes by luck of good rounding fails. Bounds: the PTX ISA's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.null_gpu.ptx.operands import BITS, numpy_name, vector
from benchmarks.null_gpu.ptx.parse import Instruction, Unsupported

if TYPE_CHECKING:
    from benchmarks.null_gpu.ptx.translate import Program

__all__ = ["EMIT"]

# Relative error of what is approximate.
_BOUNDS = {"ex2": 2**-22, "rsqrt": 2**-22.9, "sqrt": 2**-23, "rcp": 2**-23, "div": 2**-22, "tanh": 2**-11}

_PAIRS = ("f16x2", "bf16x2")

_Emit = Callable[["Program", Instruction, str], list[str]]  # the third: the name of the mask in those lines
EMIT: dict[str, _Emit] = {}


def _emits(*names: str) -> Callable[[_Emit], _Emit]:
    def keep(function: _Emit) -> _Emit:
        for name in names:
            EMIT[name] = function
        return function

    return keep


def _flushed(i: Instruction, value: str) -> str:
    if "ftz" not in i.modifiers:
        return value
    if "f16" in i.modifiers or "bf16" in i.modifiers:
        raise Unsupported("subnormal numbers of 16 bits")
    return f"flush({value})"


def _only(i: Instruction, *known: str) -> None:
    """Modifiers that are not known change what an instruction means."""
    if unknown := set(i.modifiers[:-1]) - set(known):
        raise Unsupported(f"the modifiers {unknown}")


def _arguments(p: Program, i: Instruction, kind: str, count: int) -> list[str]:
    if len(i.operands) != count + 1:
        raise Unsupported(f"{len(i.operands) - 1} operands")
    return [_flushed(i, p.value(operand, kind)) for operand in i.operands[1:]]


def _put_found(p: Program, operand: str, kind: str, m: str) -> list[str]:
    """Each of what was `found` into its register of the vector `operand`."""
    return [line for i, name in enumerate(vector(operand)) for line in p.put(name, f"found[{i}]", kind, m)]


def _of_pairs(p: Program, i: Instruction, m: str) -> list[str]:
    """On two 16-bit floats each. Sums and products are rounded in float32 without harm to the second rounding."""
    _only(i, "rn")
    kind, value = i.kind.removesuffix("x2"), {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}"}.get(i.op)
    value = "fma_narrow({}, {}, {})" if i.op == "fma" else value
    if value is None:
        raise Unsupported("of pairs")
    arguments = _arguments(p, i, "b32", value.count("{}"))
    halves = [value.format(*(f"half({a}, {place}, {kind!r})" for a in arguments)) for place in (0, 1)]
    narrow = "to_bf16" if kind == "bf16" else "to_f16"
    return p.put(i.operands[0], f"pair({narrow}({halves[0]}), {narrow}({halves[1]}))", "b32", m)


_INFIX = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}


@_emits(*_INFIX, "mul", "div", "rem", "min", "max")
def _binary(p: Program, i: Instruction, m: str) -> list[str]:
    kind = i.kind
    if kind in _PAIRS:
        return _of_pairs(p, i, m)
    _only(i, "rn", "ftz", "full", "approx", "lo", "hi", "wide", "NaN")
    floating = kind[0] == "f" or kind == "bf16"
    if i.op == "mul" and "wide" in i.modifiers:
        return _mad(p, i, m)
    if i.op in ("add", "sub") or (i.op == "mul" and "lo" in i.modifiers):
        kind = kind.replace("s", "u")  # the same bits
    a, b = _arguments(p, i, kind, 2)
    if i.op in _INFIX:
        value = f"{a} {_INFIX[i.op]} {b}"
    elif i.op == "mul":
        value = f"high({a}, {b})" if "hi" in i.modifiers else f"{a} * {b}"
    elif i.op == "div" and floating:
        value = f"{a} / {b}" if "rn" in i.modifiers else f"off({a}.astype(np.float64) / {b}, {a}, {_BOUNDS['div']!r})"
    elif i.op in ("div", "rem"):
        value = f"{'quotient' if i.op == 'div' else 'remainder'}({a}, {b})"
    elif floating:
        value = f"np.{i.op}imum({a}, {b})" if "NaN" in i.modifiers else f"np.f{i.op}({a}, {b})"
    else:
        value = f"np.{i.op}imum({a}, {b})"
    return p.put(i.operands[0], _flushed(i, value) if floating else value, kind, m)


@_emits("mad", "fma")
def _mad(p: Program, i: Instruction, m: str) -> list[str]:
    kind = i.kind
    if kind in _PAIRS:
        return _of_pairs(p, i, m)
    if kind[0] == "f" or kind == "bf16":
        _only(i, "rn", "rm", "ftz")
        a, b, c = _arguments(p, i, kind, 3)
        which = "fma" if kind in ("f32", "f32x2") else "fma_narrow"
        which = "fma_down" if "rm" in i.modifiers else which
        if not {"rn", "rm"} & set(i.modifiers) or kind == "f64" or (which == "fma_down" and kind != "f32"):
            raise Unsupported("rounding")
        return p.put(i.operands[0], _flushed(i, f"{which}({a}, {b}, {c})"), kind, m)
    _only(i, "wide", "lo")
    wide = f"{kind[0]}{2 * BITS[kind]}" if "wide" in i.modifiers else kind.replace("s", "u")
    a, b = (p.value(operand, kind if "wide" in i.modifiers else wide) for operand in i.operands[1:3])
    if "wide" in i.modifiers:
        a = f"np.asarray({a}).astype(np.{numpy_name(wide)})"
    elif "lo" not in i.modifiers:
        raise Unsupported("which half")
    value = f"{a} * {b}" + (f" + {p.value(i.operands[3], wide)}" if i.op == "mad" else "")
    return p.put(i.operands[0], value, wide, m)


@_emits("shl", "shr")
def _shift(p: Program, i: Instruction, m: str) -> list[str]:
    a, by = p.value(i.operands[1], i.kind), p.value(i.operands[2], "u32")
    return p.put(i.operands[0], f"{i.op}({a}, {by}, {BITS[i.kind]})", i.kind, m)


@_emits("bfe")
def _bfe(p: Program, i: Instruction, m: str) -> list[str]:
    if any(operand.startswith("%") for operand in i.operands[2:]):
        raise Unsupported("bits that are not constant")
    a, start, length = p.value(i.operands[1], i.kind), *(p.value(o, "u32") for o in i.operands[2:])
    return p.put(i.operands[0], f"extract({a}, {start}, {length})", i.kind, m)


@_emits("prmt")
def _prmt(p: Program, i: Instruction, m: str) -> list[str]:
    if i.modifiers != ("b32",):
        raise Unsupported("mode")
    return p.put(i.operands[0], f"permute({', '.join(_arguments(p, i, 'b32', 3))})", "b32", m)


@_emits("popc")
def _popc(p: Program, i: Instruction, m: str) -> list[str]:
    if i.modifiers not in (("b32",), ("b64",)):
        raise Unsupported("type")
    (a,) = _arguments(p, i, i.kind, 1)
    return p.put(i.operands[0], f"np.bitwise_count({a}).astype(np.uint32)", "b32", m)


@_emits("neg", "abs", "not")
def _unary(p: Program, i: Instruction, m: str) -> list[str]:
    _only(i, "ftz")
    (a,) = _arguments(p, i, i.kind, 1)
    return p.put(i.operands[0], {"neg": f"-{a}", "abs": f"np.abs({a})", "not": f"~{a}"}[i.op], i.kind, m)


@_emits("ex2", "lg2", "rsqrt", "sqrt", "rcp", "tanh")
def _transcendental(p: Program, i: Instruction, m: str) -> list[str]:
    if i.kind != "f32":
        raise Unsupported("type")
    _only(i, "rn", "approx", "ftz")
    (a,) = _arguments(p, i, "f32", 1)
    wide = f"np.asarray({a}).astype(np.float64)"
    value = {
        "ex2": f"np.exp2({wide})",
        "lg2": f"logarithm({a})",
        "rsqrt": f"1.0 / np.sqrt({wide})",
        "sqrt": f"np.sqrt({wide})",
        "rcp": f"1.0 / {wide}",
        "tanh": f"np.tanh({wide})",
    }[i.op]
    if i.op == "lg2":
        return p.put(i.operands[0], _flushed(i, value), "f32", m)
    exact = f"np.float32({value})" if i.modifiers[0] == "rn" else f"off({value}, {a}, {_BOUNDS[i.op]!r})"
    if i.op == "ex2":
        exact = f"np.where({a} == 0, np.float32(1), {exact})"
    return p.put(i.operands[0], _flushed(i, exact), "f32", m)


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">"}


@_emits("setp")
def _setp(p: Program, i: Instruction, m: str) -> list[str]:
    kind, how = i.kind, i.modifiers[0]
    if len(i.operands) != 3 or "|" in i.operands[0] or set(i.modifiers[1:-1]) - {"ftz"}:
        raise Unsupported("form")
    a, b = _arguments(p, i, kind, 2)
    if how in ("nan", "num"):
        value = f"{'~' if how == 'num' else ''}(np.isnan({a}) | np.isnan({b}))"
    elif how in _COMPARE and how != "ne":
        value = f"{a} {_COMPARE[how]} {b}"
    elif how == "ne":  # of floats: both must be numbers
        value = f"({a} < {b}) | ({a} > {b})" if kind[0] == "f" or kind == "bf16" else f"{a} != {b}"
    elif how.removesuffix("u") in _COMPARE:  # or if one is none
        opposite = {"eq": "({a} < {b}) | ({a} > {b})", "lt": "{a} >= {b}", "le": "{a} > {b}", "gt": "{a} <= {b}"}
        opposite |= {"ge": "{a} < {b}", "ne": "{a} == {b}"}
        value = f"~({opposite[how.removesuffix('u')].format(a=a, b=b)})"
    else:
        raise Unsupported("comparison")
    return p.put(i.operands[0], value, "pred", m)


@_emits("selp")
def _selp(p: Program, i: Instruction, m: str) -> list[str]:
    kind = i.kind.replace("f", "b")  # the bits, whatever they are
    a, b = (p.value(operand, kind) for operand in i.operands[1:3])
    return p.put(i.operands[0], f"np.where({p.register(i.operands[3], 'pred')}, {a}, {b})", kind, m)


@_emits("cvta")
def _cvta(p: Program, i: Instruction, m: str) -> list[str]:
    return p.put(i.operands[0], p.value(i.operands[1], "u64"), "u64", m)


@_emits("mov")
def _mov(p: Program, i: Instruction, m: str) -> list[str]:
    target, source = i.operands
    kind = i.kind.replace("f", "b")
    if target[0] == "{":
        names = vector(target)
        part = BITS[kind] // len(names)
        whole = p.value(source, kind)
        return [
            line
            for place, name in enumerate(names)
            for line in p.put(name, f"({whole} >> {place * part}).astype(np.uint{part})", f"b{part}", m)
        ]
    if source[0] == "{":
        names = vector(source)
        part = BITS[kind] // len(names)
        parts = [
            f"(np.asarray({p.value(name, f'b{part}')}).astype(np.uint{BITS[kind]}) << {place * part})"
            for place, name in enumerate(names)
        ]
        return p.put(target, " | ".join(parts), kind, m)
    return p.put(target, p.value(source, kind), kind, m)


@_emits("cvt")
def _cvt(p: Program, i: Instruction, m: str) -> list[str]:
    *how, to, source = i.modifiers
    if to in _PAIRS:  # the first operand is the upper half
        if how != ["rn"] or source != "f32":
            raise Unsupported("rounding")
        high, low = _arguments(p, i, "f32", 2)
        narrow = "to_bf16" if to == "bf16x2" else "to_f16"
        return p.put(i.operands[0], f"pair({narrow}({low}), {narrow}({high}))", "b32", m)
    (a,) = _arguments(p, i, source, 1)
    a = f"np.asarray({a})"
    floats = {"f16", "bf16", "f32", "f64"}
    rounding = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}
    whole = [rounding[word] for word in how if word in rounding]
    if set(how) - {"rn", "ftz", "sat", *rounding}:
        raise Unsupported("rounding")
    if to in floats:
        if source not in floats and "rn" not in how and BITS[source] > 16:
            raise Unsupported("rounding")
        value = f"{whole[0]}({a})" if whole else a
        if to in ("f32", "f64"):
            value = f"{value}.astype(np.{numpy_name(to)})"
        if to == "f16":
            value = f"to_f16({value}).view(np.float16)"
        if "sat" in how:
            value = f"np.nan_to_num(np.clip({value}, 0, 1), nan=0.0)"
        return p.put(i.operands[0], _flushed(i, value), to, m)
    if source in floats:
        if not whole:
            raise Unsupported("rounding")
        return p.put(i.operands[0], f"to_integer({whole[0]}({a}), np.{numpy_name(to)})", to, m)
    if "sat" in how:
        raise Unsupported("saturation")
    return p.put(i.operands[0], f"{a}.astype(np.{numpy_name(to)})", to, m)


@_emits("ld")
def _ld(p: Program, i: Instruction, m: str) -> list[str]:
    space, kind = i.modifiers[0], i.kind
    base, offset = p.address(i.operands[1])
    targets = vector(i.operands[0])
    if space == "param" and len(targets) == 1:
        found = f"s.parameter({base!r}, {offset}, np.{numpy_name(kind)})"
        if base[0] == "%":
            found = f"s.parameter_at({p.value(base, 'u32')}, {offset}, np.{numpy_name(kind)}, {m})"
        return p.put(targets[0], found, kind, m)
    if space not in ("global", "shared"):
        raise Unsupported("memory")
    where = p.value(base, "u64" if space == "global" else "u32")
    lines = [f"found = s.load_{space}({where}, {offset}, {BITS[kind] // 8}, {len(targets)}, {m})"]
    for place, target in enumerate(targets):
        value = f"found[{place}]" + ("" if kind[0] in "bu" else f".view(np.{numpy_name(kind)})")
        lines += p.put(target, value, kind, m)
    return lines


@_emits("st")
def _st(p: Program, i: Instruction, m: str) -> list[str]:
    space, kind = i.modifiers[0], i.kind.replace("s", "b").replace("f", "b")
    if space == "param":  # of what a failed assertion says
        return []
    if space not in ("global", "shared"):
        raise Unsupported("memory")
    base, offset = p.address(i.operands[0])
    where = p.value(base, "u64" if space == "global" else "u32")
    values = ", ".join(p.value(source, kind) for source in vector(i.operands[1]))
    return [f"s.store_{space}({where}, {offset}, {BITS[kind] // 8}, [{values}], {m})"]


@_emits("cp")
def _cp(p: Program, i: Instruction, m: str) -> list[str]:
    if i.modifiers == ("async", "commit_group"):
        return [f"s.close_copies({m})"]
    if i.modifiers == ("async", "wait_group"):
        return [f"s.wait_for_copies({int(i.operands[0], 0)}, {m})"]
    if i.modifiers not in (("async", how, "shared", "global") for how in ("ca", "cg")):
        raise Unsupported("form")
    (to, to_offset), (source, offset) = p.address(i.operands[0]), p.address(i.operands[1])
    size = int(i.operands[2], 0)
    given = p.value(i.operands[3], "u32") if len(i.operands) > 3 else size
    places = f"{p.value(to, 'u32')}, {to_offset}, {p.value(source, 'u64')}, {offset}"
    return [f"s.start_copy({places}, {size}, {given}, {m})"]


@_emits("atom", "red")
def _atom(p: Program, i: Instruction, m: str) -> list[str]:
    operands = list(i.operands) if i.op == "atom" else ["_", *i.operands]
    if i.modifiers[0] != "global" or "add" not in i.modifiers or i.kind not in ("f32", "u32", "u64", "bf16"):
        raise Unsupported("atomic operation")
    base, offset = p.address(operands[1])
    values = ", ".join(p.value(source, i.kind) for source in vector(operands[2]))
    kind = "np.uint16" if i.kind == "bf16" else f"np.{numpy_name(i.kind)}"
    ways = ", wide_bf16, to_bf16" if i.kind == "bf16" else ""
    lines = [f"found = s.add_global({p.value(base, 'u64')}, {offset}, {kind}, [{values}], {m}{ways})"]
    return lines + _put_found(p, operands[0], i.kind, m)


@_emits("shfl")
def _shfl(p: Program, i: Instruction, m: str) -> list[str]:
    *_, members = i.operands
    if i.modifiers[0] != "sync" or len(i.operands) != 5 or "|" in i.operands[0] or members not in ("-1", "0xffffffff"):
        raise Unsupported("form")
    a, by, clamp = (p.value(operand, "b32") for operand in i.operands[1:4])
    return p.put(i.operands[0], f"s.shuffle({i.modifiers[1]!r}, {a}, {by}, {clamp}, {m})", "b32", m)


@_emits("redux")
def _redux(p: Program, i: Instruction, m: str) -> list[str]:
    how, kind = i.modifiers[1], i.kind
    if i.modifiers[0] != "sync" or how not in ("add", "min", "max", "and", "or", "xor") or "abs" in i.modifiers:
        raise Unsupported("form")
    functions = {"add": "np.add", "and": "np.bitwise_and", "or": "np.bitwise_or", "xor": "np.bitwise_xor"}
    name = "f" + how if kind == "f32" and "NaN" not in i.modifiers else how + "imum"
    a, members = p.value(i.operands[1], kind), p.value(i.operands[2], "b32")
    value = f"s.reduce({functions.get(how, f'np.{name}')}, {a}, {members}, {m})"
    return p.put(i.operands[0], value, kind, m)


@_emits("ldmatrix", "stmatrix")
def _matrix(p: Program, i: Instruction, m: str) -> list[str]:
    if "m8n8" not in i.modifiers or i.kind != "b16":
        raise Unsupported("form")
    loads = i.op == "ldmatrix"
    registers, where = i.operands if loads else i.operands[::-1]
    base, offset = p.address(where)
    address, transposed = p.value(base, "u32"), "trans" in i.modifiers
    names = vector(registers)
    if not loads:
        values = ", ".join(p.value(name, "b32") for name in names)
        return [f"s.store_matrices({address}, {offset}, [{values}], {transposed}, {m})"]
    lines = [f"found = s.load_matrices({address}, {offset}, {len(names)}, {transposed}, {m})"]
    return lines + _put_found(p, registers, "b32", m)


@_emits("mma")
def _mma(p: Program, i: Instruction, m: str) -> list[str]:
    kind = i.modifiers[6] if len(i.modifiers) > 6 else ""
    if (
        i.modifiers != ("sync", "aligned", "m16n8k16", "row", "col", "f32", kind, kind, "f32")
        or f"{kind}x2" not in _PAIRS
    ):
        raise Unsupported("form")
    a, b, c = (
        ", ".join(p.value(name, to) for name in vector(operand))
        for operand, to in zip(i.operands[1:], ("b32", "b32", "f32"), strict=True)
    )
    lines = [f"found = s.multiply([{a}], [{b}], [{c}], {kind!r}, {m})"]
    return lines + _put_found(p, i.operands[0], "f32", m)


@_emits("wgmma")
def _wgmma(p: Program, i: Instruction, m: str) -> list[str]:
    if i.modifiers[0] in ("fence", "commit_group", "wait_group"):
        return []
    kind = i.kind
    shape = re.fullmatch(r"m64n(\d+)k16", i.modifiers[3]) if len(i.modifiers) == 7 else None
    if shape is None or i.modifiers[:3] != ("mma_async", "sync", "aligned") or f"{kind}x2" not in _PAIRS:
        raise Unsupported("form")
    if i.modifiers[4:] != ("f32", kind, kind):
        raise Unsupported("types")
    target, a, b, adds, *signs_and_sides = i.operands
    sides = signs_and_sides[2:]  # whether a, if it is in shared memory, and b are transposed
    if signs_and_sides[:2] != ["1", "1"] or len(sides) != (1 if a[0] == "{" else 2) or set(sides) - {"0", "1"}:
        raise Unsupported("form")
    transposed = [side == "1" for side in sides]
    if a[0] == "{":
        left = f"[{', '.join(p.value(name, 'b32') for name in vector(a))}]"
    else:
        left = f"s.matrix({p.value(a, 'u64')}, 64, {transposed[0]}, {m})"
    right = f"s.matrix({p.value(b, 'u64')}, {int(shape[1])}, {transposed[-1]}, {m}).swapaxes(1, 2)"
    added = f"[{', '.join(p.value(name, 'f32') for name in vector(target))}]"
    lines = [
        f"adds = np.broadcast_to({p.value(adds, 'pred')}, s.count)",
        f"added = [np.where(adds, x, np.float32(0)) for x in {added}]",
        f"found = s.multiply_group({left}, {right}, added, {kind!r}, {m})",
    ]
    return lines + _put_found(p, target, "f32", m)


@_emits("bar", "barrier")
def _bar(p: Program, i: Instruction, m: str) -> list[str]:
    if i.modifiers == ("warp", "sync"):
        return []
    if i.modifiers != ("sync",) or i.operands != ("0",):
        raise Unsupported("form")
    return [f"s.barrier({m})"]


@_emits("call", "trap")
def _trap(p: Program, i: Instruction, m: str) -> list[str]:
    if i.op == "call" and i.operands[0] != "__assertfail":
        raise Unsupported("a function")
    return [f"s.trap({i.text!r}, {m})"]


@_emits("createpolicy", "fence", "membar", "prefetch", "griddepcontrol")
def _nothing(p: Program, i: Instruction, m: str) -> list[str]:
    return []
