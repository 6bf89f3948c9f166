"""The emulator of PTX (`benchmarks/null_gpu/ptx`): instructions against Python's integers and NumPy, and its faults."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ptx_kernel import kernel, run

from benchmarks.null_gpu.ptx.machine import Fault
from benchmarks.null_gpu.ptx.numerics import wide_bf16
from benchmarks.null_gpu.ptx.parse import Unsupported, parse

REGISTERS = {"16": "%rs", "32": "%r", "64": "%rd"}
NUMPY = {"b": "u", "u": "u", "s": "i", "f": "f"}


def numbers(kind: str, values) -> np.ndarray:
    bits = "".join(c for c in kind if c.isdigit())
    name = {"f16": "f2", "f32": "f4"}.get(kind, f"{NUMPY[kind[0]]}{int(bits) // 8}")
    return np.array(values, name)


def each(instruction: str, kinds: list[str], out: str, *columns) -> list:
    """What `instruction` computes from `%a`, `%b`, `%c` of these kinds, into `%out`, for each row of `columns`."""
    count = len(columns[0])
    threads = (count + 31) // 32 * 32
    arrays = [np.resize(numbers(kind, column), threads) for kind, column in zip(kinds, columns, strict=True)]
    result = np.zeros(threads, numbers(out, [0]).dtype)
    body, text = "", instruction
    for place, (kind, name) in enumerate(zip([*kinds, out], [*"abc"[: len(kinds)], "out"], strict=True)):
        size = numbers(kind, [0]).itemsize
        register = f"{REGISTERS[str(8 * size)]}{40 + place}"
        text = text.replace(f"%{name}", register)
        body += f"mad.wide.u32 %rd{60 + place}, %r1, {size}, %rd{place + 1};\n"
        if name != "out":
            body += f"ld.global.b{8 * size} {register}, [%rd{60 + place}];\n"
        else:
            body += f"{text};\nst.global.b{8 * size} [%rd{60 + place}], {register};"
    tensors = [torch.from_numpy(a.view(f"i{a.itemsize}")) for a in (*arrays, result)]
    run(kernel(body, len(tensors), threads), *tensors, threads=threads)
    return list(result[:count])


def wrap(value: int, kind: str) -> int:
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


I32 = [0, 1, -1, 2, 7, -7, 100, 65535, 65536, 2**31 - 1, -(2**31), 123456789, -987654321]
I64 = [*I32, 2**63 - 1, -(2**63), 0x123456789ABCDEF, -0x123456789ABCDEF]


def pairs(values: list[int]) -> tuple[list[int], list[int]]:
    return [a for a in values for _ in values], [b for _ in values for b in values]


INTEGERS: dict[str, tuple[str, str, Callable[[int, int], int]]] = {
    "add.s32": ("s32", "s32", lambda a, b: a + b),
    "sub.s64": ("s64", "s64", lambda a, b: a - b),
    "mul.lo.s32": ("s32", "s32", lambda a, b: a * b),
    "mul.hi.u32": ("u32", "u32", lambda a, b: a * b >> 32),
    "mul.hi.s32": ("s32", "s32", lambda a, b: a * b >> 32),
    "mul.hi.u64": ("u64", "u64", lambda a, b: a * b >> 64),
    "mul.hi.s64": ("s64", "s64", lambda a, b: a * b >> 64),
    "mul.hi.u16": ("u16", "u16", lambda a, b: a * b >> 16),
    "mul.hi.s16": ("s16", "s16", lambda a, b: a * b >> 16),
    "mul.wide.s32": ("s32", "s64", lambda a, b: a * b),
    "mul.wide.u32": ("u32", "u64", lambda a, b: a * b),
    "mul.wide.u16": ("u16", "u32", lambda a, b: a * b),
    "div.s32": ("s32", "s32", lambda a, b: int(math.copysign(abs(a) // abs(b), a * b)) if b else -1),
    "rem.s32": ("s32", "s32", lambda a, b: int(math.copysign(abs(a) % abs(b), a)) if b else a),
    "div.u64": ("u64", "u64", lambda a, b: a // b if b else -1),
    "rem.u32": ("u32", "u32", lambda a, b: a % b if b else a),
    "min.s32": ("s32", "s32", min),
    "max.u32": ("u32", "u32", max),
    "and.b32": ("u32", "u32", lambda a, b: a & b),
    "or.b64": ("u64", "u64", lambda a, b: a | b),
    "xor.b32": ("u32", "u32", lambda a, b: a ^ b),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    kind, out, meaning = INTEGERS[name]
    a, b = ([wrap(v, kind) for v in column] for column in pairs(I64 if kind.endswith("64") else I32))
    got = each(f"{name} %out, %a, %b", [kind, kind], out, a, b)
    assert [int(v) for v in got] == [wrap(meaning(x, y), out) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(
    ("name", "kind", "meaning"),
    [
        ("shl.b32", "u32", lambda a, n: a << n),
        ("shr.u32", "u32", lambda a, n: a >> n),
        ("shr.s32", "s32", lambda a, n: a >> min(n, 31)),
        ("shl.b64", "u64", lambda a, n: a << n),
        ("shr.s64", "s64", lambda a, n: a >> min(n, 63)),
    ],
)
def test_shifts(name: str, kind: str, meaning: Callable[[int, int], int]) -> None:
    a = [wrap(v, kind) for v in I64 for _ in range(5)]
    by = [0, 1, 31, 40, 200] * len(I64)
    got = each(f"{name} %out, %a, %b", [kind, "u32"], kind, a, by)
    assert [int(v) for v in got] == [wrap(meaning(x, n), kind) for x, n in zip(a, by, strict=True)]
    for n in (3, 31):
        constant = each(f"{name} %out, %a, {n}", [kind], kind, a)
        assert [int(v) for v in constant] == [wrap(meaning(x, n), kind) for x in a]


def test_bits_and_bytes() -> None:
    values = [wrap(v, "u32") for v in I32]
    assert each("bfe.u32 %out, %a, 5, 3", ["u32"], "u32", values) == [(v >> 5) & 7 for v in values]
    signed = each("bfe.s32 %out, %a, 4, 4", ["s32"], "s32", I32)
    assert signed == [((v >> 4) & 15) - (16 if v >> 7 & 1 else 0) for v in I32]
    source = struct.pack("<II", 0x83828180, 0x07060504)  # bytes 0 to 7
    for selector in (0x3210, 0x7654, 0x0246, 0x7770, 0x5140):
        (got,) = each(f"prmt.b32 %out, %a, %b, {selector:#x}U", ["u32", "u32"], "u32", [0x83828180], [0x07060504])
        assert struct.pack("<I", got) == bytes(source[(selector >> 4 * i) & 7] for i in range(4))
    (sign,) = each("prmt.b32 %out, %a, 0, 0xCB98U", ["u32"], "u32", [0x83828180])
    assert sign == 0x00FFFFFF  # the signs of bytes 0, 1, 3 (of a) and 4 (of 0)
    assert each("popc.b32 %out, %a", ["u32"], "u32", values) == [v.bit_count() for v in values]
    assert each("popc.b64 %out, %a", ["u64"], "u32", [wrap(v, "u64") for v in I64]) == [
        wrap(v, "u64").bit_count() for v in I64
    ]
    assert each("mad.lo.s32 %out, %a, %b, %c", ["s32"] * 3, "s32", [7], [-3], [5]) == [-16]
    assert each("mad.wide.s32 %out, %a, %b, %c", ["s32", "s32", "s64"], "s64", [-7], [3], [2**40]) == [2**40 - 21]
    assert each("cvt.s64.s32 %out, %a", ["s32"], "s64", I32) == I32
    assert each("cvt.u64.u32 %out, %a", ["u32"], "u64", values) == values
    assert each("cvt.u16.u32 %out, %a", ["u32"], "u16", values) == [v & 0xFFFF for v in values]
    assert each("{ .reg .b16 low; mov.b32 {low, %out}, %a; }", ["u32"], "u16", values) == [v >> 16 for v in values]


FLOATS = np.array(
    [0.0, -0.0, 1.0, -1.5, 3.14159, 1e-30, 1e30, 65504, 65520, 1e-7, 6e-8, 2.0**-149, math.inf, -math.inf, math.nan],
    np.float32,
)


def bits(values) -> list[int]:
    return [int(v) for v in np.ascontiguousarray(values).view(f"u{np.asarray(values).itemsize}")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_roundings_are_those_of_pytorch(dtype: torch.dtype) -> None:
    """Numbers of all kinds, among them those halfway between two of the narrow type."""
    x = torch.cat([torch.from_numpy(FLOATS), torch.randn(400), 1 + torch.arange(512) * 2.0**-12])
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    got = torch.from_numpy(np.array(each(f"cvt.rn.{name}.f32 %out, %a", ["f32"], "u16", x.numpy())))
    torch.testing.assert_close(got.view(dtype), x.to(dtype), rtol=0, atol=0, equal_nan=True)
    back = each(f"cvt.f32.{name} %out, %a", ["u16"], "f32", got.numpy())
    torch.testing.assert_close(torch.tensor(back), x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
    pair = each(f"cvt.rn.{name}x2.f32 %out, %a, %b", ["f32", "f32"], "u32", x.numpy(), x.numpy()[::-1].copy())
    assert [int(v) >> 16 for v in pair] == bits(got) and [int(v) & 0xFFFF for v in pair] == bits(got)[::-1]


def test_arithmetic_in_float32() -> None:
    a, b, c = np.random.default_rng(0).standard_normal((3, 500)).astype(np.float32)
    c = -(a * b) + c * np.float32(1e-7)  # cancels: shows whether the product was rounded
    exact = a.astype(np.longdouble) * b + c
    assert bits(np.array(each("fma.rn.f32 %out, %a, %b, %c", ["f32"] * 3, "f32", a, b, c))) == bits(np.float32(exact))
    down = np.array(each("fma.rm.f32 %out, %a, %b, %c", ["f32"] * 3, "f32", a, b, c))
    assert (down <= exact).all() and (np.nextafter(down, np.float32(np.inf)) > exact).all()
    assert bits(np.array(each("mul.f32 %out, %a, %b", ["f32"] * 2, "f32", a, b))) == bits(a * b)
    assert each("max.f32 %out, %a, %b", ["f32"] * 2, "f32", [math.nan, 2], [1, 3]) == [1, 3]
    assert np.isnan(each("max.NaN.f32 %out, %a, %b", ["f32"] * 2, "f32", [math.nan], [1])[0])
    assert each("add.ftz.f32 %out, %a, %b", ["f32"] * 2, "f32", [1e-39, 1], [1e-39, 1]) == [0, 2]
    assert each("cvt.sat.f32.f32 %out, %a", ["f32"], "f32", [-1, 0.25, 7, math.nan]) == [0, 0.25, 1, 0]
    whole = each("cvt.rzi.s32.f32 %out, %a", ["f32"], "s32", [-2.7, 2.7, 3e9, -3e9, math.nan, 2**31])
    assert whole == [-2, 2, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    limits = each("cvt.rzi.s64.f32 %out, %a", ["f32"], "s64", [2.0**63, -(2.0**64), math.nan, -2.7])
    assert limits == [2**63 - 1, -(2**63), -(2**63), -2]
    assert each("cvt.rzi.u64.f32 %out, %a", ["f32"], "u64", [2.0**64, -1, math.nan]) == [2**64 - 1, 0, 2**63]
    assert each("ex2.approx.f32 %out, %a", ["f32"], "f32", [0.0, -0.0]) == [1, 1]
    assert each("cvt.rn.f32.s64 %out, %a", ["s64"], "f32", [2**24 + 1, -5]) == [2**24, -5]
    assert each("add.f32 %out, %a, 0f3F800000", ["f32"], "f32", [1.5]) == [2.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pairs_of_narrow_numbers(dtype: torch.dtype) -> None:
    """By PyTorch's own arithmetic, on all kinds of numbers; what is infinite or none is so there."""
    torch.manual_seed(0)
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype] + "x2"
    kinds = torch.cat([torch.from_numpy(FLOATS), torch.randn(400) * 2.0 ** torch.randint(-20, 12, (400,))])
    kinds = kinds[: len(kinds) // 2 * 2].to(dtype)
    a, b, c = kinds, kinds[torch.randperm(len(kinds))], kinds.flip(0)
    both = [x.contiguous().view(torch.int32).numpy().view("u4") for x in (a, b, c)]

    def of(operation: str, count: int) -> torch.Tensor:
        text = f"{operation}{name} %out, {', '.join(('%a', '%b', '%c')[:count])}"
        return (
            torch.from_numpy(np.array(each(text, ["u32"] * count, "u32", *both[:count]))).view(torch.int32).view(dtype)
        )

    same = dict(rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(of("add.", 2), a + b, **same)
    torch.testing.assert_close(of("sub.rn.", 2), a - b, **same)
    torch.testing.assert_close(of("mul.", 2), a * b, **same)
    torch.testing.assert_close(of("fma.rn.", 3), (a.double() * b.double() + c.double()).to(dtype), **same)


def test_products_and_sums_are_rounded_once() -> None:
    """Halfway between two numbers, but for what is far below float64's last bit."""
    near = 1 + 2.0**-12
    assert each("fma.rn.f32 %out, %a, %b, %c", ["f32"] * 3, "f32", [near], [near], [2.0**-70]) == [1 + 2**-11 + 2**-23]
    assert each("fma.rn.f32 %out, %a, %b, %c", ["f32"] * 3, "f32", [near], [near], [-(2.0**-70)]) == [1 + 2**-11]
    operands = [torch.tensor([x]).bfloat16().view(torch.int16).numpy().view("u2") for x in (1.0625, 1.0625, 2.0**-30)]
    (got,) = each("fma.rn.bf16 %out, %a, %b, %c", ["u16"] * 3, "u16", *operands)
    assert wide_bf16(np.array([got], np.uint16)) == 1.1328125


@pytest.mark.parametrize(
    "how", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
def test_comparisons_with_what_is_no_number(how: str) -> None:
    a, b = [1, 2, 2, math.nan, 1, math.nan], [2, 1, 2, 1, math.nan, math.nan]
    text = f"setp.{how}.f32 %p1, %a, %b;\nselp.b32 %out, 1, 0, %p1"
    compare = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    wanted = []
    for x, y in zip(a, b, strict=True):
        unordered = math.isnan(x) or math.isnan(y)
        if how in ("num", "nan"):
            wanted.append(unordered == (how == "nan"))
        else:
            wanted.append(unordered * how.endswith("u") or (not unordered and eval(f"x {compare[how[:2]]} y")))
    assert each(text, ["f32", "f32"], "u32", a, b) == [int(w) for w in wanted]


@pytest.mark.parametrize(
    ("name", "exact", "bound"),
    [
        ("ex2.approx.f32", np.exp2, 2**-22),
        ("rsqrt.approx.ftz.f32", lambda x: 1 / np.sqrt(x), 2**-22.9),
        ("sqrt.approx.ftz.f32", np.sqrt, 2**-23),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, 2**-23),
    ],
)
def test_what_is_approximate_is_off_by_its_bound(name: str, exact: Callable, bound: float) -> None:
    x = np.random.default_rng(1).uniform(0.1, 20, 300).astype(np.float32)
    error = np.array(each(f"{name} %out, %a", ["f32"], "f32", x)).astype(np.float64) / exact(x.astype(np.float64)) - 1
    assert (abs(error) < bound + 2**-24).all() and (abs(error) > bound - 2**-24 - 1e-12).all()
    assert (error > 0).any() and (error < 0).any()


# --- threads together -------------------------------------------------------------------------------------------------

OUT = "mad.wide.u32 %rd60, %r1, 4, %rd1;\n"


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("bfly.b32 %r3, %r2, 5, 31, -1", [i ^ 5 for i in range(32)]),
        ("idx.b32 %r3, %r2, 9, 31, -1", [9] * 32),
        ("idx.b32 %r3, %r2, 3, 6175, -1", [i // 8 * 8 + 3 for i in range(32)]),  # within eight: (24 << 8) | 31
        ("up.b32 %r3, %r2, 1, 0, -1", [0, *range(31)]),
        ("down.b32 %r3, %r2, 2, 31, -1", [*range(2, 32), 30, 31]),
    ],
)
def test_exchanges_in_a_warp(how: str, wanted: list[int]) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    run(kernel(f"add.s32 %r2, %r1, 100;\nshfl.sync.{how};\n{OUT}st.global.b32 [%rd60], %r3;", 1), out, threads=64)
    assert out.tolist() == [100 + w for w in wanted] + [132 + w for w in wanted]


def test_reductions_in_a_warp() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    body = f"add.s32 %r2, %r1, -9;\nmov.b32 %r4, -1;\nredux.sync.HOW %r3, %r2, %r4;\n{OUT}st.global.b32 [%rd60], %r3;"
    for how, wanted in (("max.s32", (22, 54)), ("min.u32", (0, 23)), ("add.s32", (208, 1232))):
        run(kernel(body.replace("HOW", how), 1, 64), out, threads=64)
        assert out[::32].tolist() == list(wanted) and out.unique().numel() == 2
    floats = torch.zeros(64)
    body = body.replace("%r3, %r2", "%r3, %r5").replace("mov.b32 %r4", "cvt.rn.f32.s32 %r5, %r2;\nmov.b32 %r4")
    run(kernel(body.replace("HOW", "max.f32"), 1, 64), floats, threads=64)
    assert floats[::32].tolist() == [22, 54]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices(count: int, transposed: bool) -> None:
    """Stored as rows of 8 x 16 bits, loaded as PTX has them: thread t gets row t / 4, columns 2 (t % 4) and next."""
    memory = torch.arange(256, dtype=torch.int16)  # four matrices, one after the other, each row by row
    out = torch.zeros(32 * count, dtype=torch.int32)
    names = ", ".join(f"%r{20 + i}" for i in range(count))
    dots = ".trans" if transposed else ""
    body = (
        "mad.wide.u32 %rd50, %r1, 16, %rd2;\nld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd50];\n"
        "mov.b32 %r5, global_smem;\nshl.b32 %r6, %r1, 4;\nadd.s32 %r5, %r5, %r6;\n"
        "st.shared.v4.b32 [%r5], {%r10, %r11, %r12, %r13};\nbar.sync 0;\n"
        f"ldmatrix.sync.aligned.m8n8.x{count}{dots}.shared.b16 {{{names}}}, [%r5];\n"
        f"mad.wide.u32 %rd60, %r1, {4 * count}, %rd1;\n"
    )
    body += "".join(f"st.global.b32 [%rd60+{4 * i}], %r{20 + i};\n" for i in range(count))
    run(kernel(body), out, memory, shared=512)
    rows = memory.reshape(4, 8, 8)[:count]
    rows = rows.mT if transposed else rows
    assert out.view(torch.int16).reshape(32, count, 2).transpose(0, 1).reshape(count, 8, 8).equal(rows)

    back = torch.zeros(256, dtype=torch.int16)
    body = body.split("st.global")[0] + (
        "bar.sync 0;\nmov.b32 %r30, 0;\nst.shared.v4.b32 [%r5], {%r30, %r30, %r30, %r30};\nbar.sync 0;\n"
        f"stmatrix.sync.aligned.m8n8.x{count}{dots}.shared.b16 [%r5], {{{names}}};\nbar.sync 0;\n"
        "ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r5];\nst.global.v4.b32 [%rd50], {%r10, %r11, %r12, %r13};\n"
    )
    back.copy_(memory)
    run(kernel(body), out, back, shared=512)
    assert back[: 64 * count].equal(memory[: 64 * count]) and not back[64 * count :].any()


def test_threads_part_and_meet_again() -> None:
    """Each adds up 0 ... thread; then all take part in an exchange."""
    out = torch.zeros(64, dtype=torch.int32)
    body = (
        "mov.b32 %r2, 0;\nmov.b32 %r3, 0;\n$L__again:\nadd.s32 %r3, %r3, %r2;\nadd.s32 %r2, %r2, 1;\n"
        "setp.le.s32 %p1, %r2, %r1;\n@%p1 bra $L__again;\n"
        f"shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;\n{OUT}st.global.b32 [%rd60], %r4;"
    )
    run(kernel(body, 1, 64), out, threads=64)
    assert out.tolist() == [(i ^ 1) * ((i ^ 1) + 1) // 2 for i in range(64)]


def test_a_load_may_choose_its_parameter() -> None:
    """By the parity of the thread, whether it takes part or not."""
    first, second, out = (torch.tensor([x], dtype=torch.int32) for x in (5, 7, 0))
    out = out.expand(64).contiguous()
    body = (
        "mov.b32 %r2, k_param_0;\nmov.b32 %r3, k_param_1;\nand.b32 %r4, %r1, 1;\nsetp.eq.s32 %p1, %r4, 1;\n"
        "setp.lt.u32 %p2, %r1, 40;\nselp.b32 %r5, %r3, %r2, %p1;\n@!%p2 bra $L__end;\n"
        f"ld.param.b64 %rd50, [%r5];\nld.global.b32 %r6, [%rd50];\n{OUT.replace('%rd1', '%rd3')}"
        "st.global.b32 [%rd60], %r6;\n$L__end:"
    )
    run(kernel(body, 3, 64), first, second, out, threads=64)
    assert out.tolist() == [5, 7] * 20 + [0] * 24


def test_programs_of_a_grid_and_atomic_sums() -> None:
    out, total = torch.zeros(3 * 2 * 5, dtype=torch.int32), torch.zeros(4)
    body = (
        "mov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %ctaid.y;\nmov.u32 %r4, %ctaid.z;\nmov.u32 %r5, %nctaid.x;\n"
        "mov.u32 %r6, %nctaid.y;\nmad.lo.s32 %r7, %r4, %r6, %r3;\nmad.lo.s32 %r7, %r7, %r5, %r2;\n"
        "mad.wide.u32 %rd60, %r7, 4, %rd1;\nst.global.b32 [%rd60], %r7;\n"
        "mov.b32 %r8, 0f3F800000;\natom.global.gpu.relaxed.add.f32 %r9, [%rd2+8], %r8;"
    )
    run(kernel(body, threads=256), out, total, grid=(3, 2, 5), threads=256)
    assert out.tolist() == list(range(30)) and total.tolist() == [0, 0, 30 * 256, 0]


def test_atomic_sums_of_bf16_are_rounded_one_by_one() -> None:
    total = torch.tensor([0.0, 256.0, 0.0, 1.0], dtype=torch.bfloat16)
    # 1 is half a unit of 256: each time the sum is rounded back to it, where 64 at once would not be.
    body = "mov.b16 %rs1, 0x3F80;\nmov.b16 %rs2, 0x3FC0;"
    for place in (0, 4):
        body += f"\nred.global.gpu.relaxed.add.noftz.v2.bf16 [%rd1+{place}], {{%rs2, %rs1}};"
    expected = total.clone()
    for _ in range(64):
        expected += torch.tensor([1.5, 1.0, 1.5, 1.0], dtype=torch.bfloat16)
    run(kernel(body, 1, 64), total, threads=64)
    assert total.tolist() == expected.tolist() and expected[1] == 256


# --- faults -----------------------------------------------------------------------------------------------------------

SHARED = "mov.b32 %r5, global_smem;\nshl.b32 %r6, %r1, 2;\nadd.s32 %r5, %r5, %r6;\n"
OTHER = "xor.b32 %r7, %r5, 128;\n"  # the other warp's place
FAULTS = {
    "outside of any tensor": OUT + "st.global.b32 [%rd60+4], %r1;",  # the last thread's
    "is not a multiple": "ld.global.b32 %r2, [%rd1+2];",
    "not a multiple of that": "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1+8];",
    "shared memory has 256 bytes": SHARED + "ld.shared.b32 %r2, [%r5+4];",
    "without a barrier between": SHARED + "st.shared.b32 [%r5], %r1;\n" + OTHER + "ld.shared.b32 %r2, [%r7];",
    "two warps meet": SHARED + "ld.shared.b32 %r2, [%r5];\n" + OTHER + "st.shared.b32 [%r7], %r1;",
    "two warps write to one place": "mov.b32 %r5, global_smem;\nst.shared::cta.b32 [%r5], %r1;",
    "two warps write": "mov.b32 %r5, global_smem;\nst.shared.b32 [%r5], %r1;",
    "some threads of a program": "setp.lt.s32 %p1, %r1, 40;\n@%p1 bra $L__some;\nret;\n$L__some:\nbar.sync 0;",
    "some of its threads": "setp.lt.s32 %p1, %r1, 7;\n@!%p1 bra $L__end;\nshfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;\n"
    "$L__end:",
    "an assertion in the kernel": "setp.gt.s32 %p1, %r1, 62;\n@!%p1 bra $L__end;\ntrap;\n$L__end:",
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message: str) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(Fault, match=message):
        run(kernel(FAULTS[message], 1, 64), out, threads=64, shared=256)


def test_copies_of_one_number_are_no_race() -> None:
    body = "mov.b32 %r5, global_smem;\nmov.b32 %r6, 7;\nst.shared.b32 [%r5], %r6;\nbar.sync 0;\n"
    body += f"ld.shared.b32 %r2, [%r5];\n{OUT}st.global.b32 [%rd60], %r2;"
    out = torch.zeros(64, dtype=torch.int32)
    run(kernel(body, 1, 64), out, threads=64, shared=4)
    assert out.tolist() == [7] * 64
    with pytest.raises(Fault, match="shared memory has 4 bytes"):
        run(kernel(body.replace("[%r5]", "[%r5+4]"), 1, 64), out, threads=64, shared=4)


def test_an_assertion_comes_before_what_follows_from_it() -> None:
    """The block in which it fails stands behind a barrier that the others wait at."""
    body = "setp.gt.s32 %p1, %r1, 62;\n@%p1 bra $L__failed;\nbar.sync 0;\nret;\n$L__failed:\ntrap;"
    with pytest.raises(Fault, match="an assertion"):
        run(kernel(body, 1, 64), torch.zeros(1), threads=64)


def test_a_barrier_parts_what_warps_do_in_shared_memory() -> None:
    out = torch.zeros(64, dtype=torch.int32)
    body = SHARED + (
        "st.shared.b32 [%r5], %r1;\nbar.sync 0;\n" + OTHER + "ld.shared.b32 %r2, [%r7];\n"
        f"bar.sync 0;\nst.shared.b32 [%r5], %r2;\n{OUT}st.global.b32 [%rd60], %r2;"
    )
    run(kernel(body, 1, 64), out, threads=64, shared=256)
    assert out.tolist() == [i ^ 32 for i in range(64)]


# Thread t copies its number in the input to shared memory, in a group of its own, and then another one.
COPIES = SHARED + (
    "mad.wide.u32 %rd50, %r1, 4, %rd2;\nsetp.lt.s32 %p1, %r1, 40;\nselp.b32 %r8, 4, 0, %p1;\n"
    "cp.async.ca.shared.global [ %r5 + 0 ], [ %rd50 + 0 ], 0x4, %r8;\ncp.async.commit_group ;\n"
    "@%p1 cp.async.ca.shared.global [ %r5 + 256 ], [ %rd50 + 0 ], 0x4;\ncp.async.commit_group ;\n"
)


@pytest.mark.parametrize(("latest", "there"), [(2, "neither"), (1, "first"), (0, "both")])
def test_copies_are_there_when_they_were_waited_for(latest: int, there: str) -> None:
    """Those of thread 40 and on are zeros first, and none then: shared memory begins as all ones."""
    numbers = torch.arange(100, 164, dtype=torch.int32)
    out, other = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = COPIES + f"cp.async.wait_group 0x{latest};\nbar.sync 0;\n" + OTHER + "mad.wide.u32 %rd60, %r1, 4, %rd1;\n"
    body += "ld.shared.b32 %r9, [%r7];\nst.global.b32 [%rd60], %r9;\nmad.wide.u32 %rd61, %r1, 4, %rd3;\n"
    body += "ld.shared.b32 %r9, [%r7+256];\nst.global.b32 [%rd61], %r9;"
    run(kernel(body, 3, 64), out, numbers, other, threads=64, shared=512)
    swapped = torch.arange(64) ^ 32
    first = torch.where(swapped < 40, numbers[swapped], 0) if there != "neither" else torch.full_like(out, -1)
    second = torch.where(swapped < 40, numbers[swapped], -1) if there == "both" else torch.full_like(out, -1)
    assert out.equal(first) and other.equal(second)


def test_copies_of_sixteen_bytes() -> None:
    numbers, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    body = (
        "mad.wide.u32 %rd50, %r1, 16, %rd2;\nmad.wide.u32 %rd60, %r1, 16, %rd1;\nmov.b32 %r5, global_smem;\n"
        "shl.b32 %r6, %r1, 4;\nadd.s32 %r5, %r5, %r6;\n"
        "cp.async.cg.shared.global [ %r5 + 0 ], [ %rd50 + 0 ], 0x10, 0x10;\ncp.async.commit_group ;\n"
        "cp.async.wait_group 0x0;\nld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r5];\n"
        "st.global.v4.b32 [%rd60], {%r10, %r11, %r12, %r13};"
    )
    run(kernel(body), out, numbers, shared=512)
    assert out.equal(numbers)
    with pytest.raises(Fault, match="outside of any tensor"):
        run(kernel(body), out, numbers[:127].clone(), shared=512)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # The other warp's copy, waited for by that one alone.
        (COPIES + "cp.async.wait_group 0x0;\n" + OTHER + "ld.shared.b32 %r9, [%r7];", "without a barrier between"),
        (SHARED + OTHER + "ld.shared.b32 %r9, [%r7];\n" + COPIES, "two warps meet"),
        (COPIES.replace("4, 0, %p1", "2, 0, %p1"), "a copy of 2 of 4 bytes"),
        (COPIES.replace("[ %r5 + 0 ]", "[ %r5 + 1024 ]"), "shared memory has 512 bytes"),
    ],
)
def test_faults_of_copies(body: str, message: str) -> None:
    numbers = torch.arange(64, dtype=torch.int32)
    with pytest.raises(Fault, match=message):
        run(kernel(body, 2, 64), torch.zeros(64, dtype=torch.int32), numbers, threads=64, shared=512)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.bulk.shared.global [%r1], [%rd1], 16, [%r2]",
        "wgmma.mma_async %r1, %r2",
        "cvt.rz.bf16.f32 %rs1, %r2",
        "setp.lt.and.f32 %p1, %r1, %r2, %p2",
        "mov.b32 %q1, 0",
        "mov.b32 %r1, WARP_SZ",
        "fma.rn.relu.bf16 %rs1, %rs2, %rs3, %rs4",
        "fma.rn.f64 %rd1, %rd2, %rd3, %rd4",
        "add.ftz.f16 %rs1, %rs2, %rs3",
        "bar.arrive 1, 128",
        "bar.red.popc.u32 %r1, 0, %p1",
        "bfe.u32 %r1, %r2, %r3, 4",
        "call.uni helper, (param0)",
        "ld.param.v2.b32 {%r1, %r2}, [k_param_0]",
    ],
)
def test_what_is_not_known_is_named(text: str) -> None:
    with pytest.raises(Unsupported, match=text.split()[0].replace(".", r"\.")):
        kernel(f"{text};")


def test_parameters_that_are_not_numbers_are_named() -> None:
    text = ".visible .entry k(\n.param .align 64 .b8 k_param_0[128],\n.param .u32 k_param_1\n)\n{\nret;\n}\n"
    with pytest.raises(Unsupported, match="the parameters of k"):
        parse(text)
