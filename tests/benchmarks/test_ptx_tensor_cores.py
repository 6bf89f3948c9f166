"""The emulator's products of matrices: laid out here by the PTX ISA's figures, against float64."""

from __future__ import annotations

import pytest
import torch
from ptx_kernel import kernel, run

from benchmarks.null_gpu.ptx.machine import Fault
from benchmarks.null_gpu.ptx.parse import Unsupported

KINDS = {"f16": torch.float16, "bf16": torch.bfloat16}
LANE = torch.arange(128)
GROUP, OF_FOUR = LANE % 32 // 4, LANE % 4


def bits(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] of 16 bits -> [..., n] int32."""
    return x.contiguous().view(torch.int16).view(torch.int32)


def left(a: torch.Tensor, threads: int) -> torch.Tensor:
    """[16 rows a warp, 16] -> the four registers of each thread."""
    row, column = LANE[:threads] // 32 * 16 + GROUP[:threads], 2 * OF_FOUR[:threads]
    pairs = [(row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8)]
    return torch.stack([bits(torch.stack([a[r, c], a[r, c + 1]], -1)).squeeze(-1) for r, c in pairs], -1)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found.double() - wanted).abs() <= 1e-6 * wanted.abs().max()).all())


def loads(pointer: str, count: int, first: int) -> str:
    """Registers %r<first> and on, `count` of them, from the thread's own place."""
    return f"mad.wide.u32 %rd50, %r1, {4 * count}, {pointer};\n" + "".join(
        f"ld.global.b32 %r{first + i}, [%rd50+{4 * i}];\n" for i in range(count)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_a_warp(kind: str) -> None:
    a, b = torch.randn(16, 16).to(KINDS[kind]), torch.randn(16, 8).to(KINDS[kind])
    c = torch.randn(16, 8)
    row, column = 2 * OF_FOUR[:32], GROUP[:32]
    of_b = [bits(torch.stack([b[row + 8 * i, column], b[row + 8 * i + 1, column]], -1)).squeeze(-1) for i in (0, 1)]
    places = [(GROUP[:32] + 8 * (i // 2), 2 * OF_FOUR[:32] + i % 2) for i in range(4)]
    of_c, out = torch.stack([c[place] for place in places], -1), torch.zeros(32, 4)
    body = loads("%rd2", 4, 10) + loads("%rd3", 2, 20) + loads("%rd4", 4, 30)
    body += (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r40, %r41, %r42, %r43}}, "
        "{%r10, %r11, %r12, %r13}, {%r20, %r21}, {%r30, %r31, %r32, %r33};\n"
        "mad.wide.u32 %rd51, %r1, 16, %rd1;\nst.global.v4.b32 [%rd51], {%r40, %r41, %r42, %r43};"
    )
    run(kernel(body, 4), out, left(a, 32), torch.stack(of_b, -1), of_c)
    wanted = a.double() @ b.double() + c
    assert close(out, torch.stack([wanted[place] for place in places], -1))


def stored(x: torch.Tensor, line: int) -> torch.Tensor:
    """[rows, line / 2] of 16 bits as it lies in shared memory: lines of `line` bytes, whose 16 bytes change places."""
    rows, columns = x.shape
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    chunk = column // 8 ^ (row * line // 128 % (line // 16))
    out = torch.empty_like(x).flatten()
    out[row * line // 2 + chunk * 8 + column % 8] = x
    return out


def descriptor(at: int, line: int, **changes: int) -> int:
    """Of lines of `line` bytes in blocks of eight; one block of rows is as wide as the matrix."""
    fields = {"start": at // 16, "leading": 1, "stride": 8 * line // 16, "base": 0}
    fields |= {"mode": {128: 1, 64: 2, 32: 3}[line]} | changes
    places = {"start": 0, "leading": 16, "stride": 32, "base": 49, "mode": 62}
    return sum(value << places[name] for name, value in fields.items())


SIZE = 16384  # of shared memory


def product(a: str, b: int, columns: int, sides: str, kind: str = "bf16", adds: str = "1") -> str:
    """Shared memory from the third parameter; then c plus a times b, to the first one."""
    half = columns // 2
    names = ", ".join(f"%r{100 + i}" for i in range(half))
    chunks = "".join(
        f"ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd51+{2048 * i}];\n"
        f"st.shared.v4.b32 [%r5+{2048 * i}], {{%r20, %r21, %r22, %r23}};\n"
        for i in range(SIZE // 2048)
    )
    stores = "".join(f"st.global.b32 [%rd50+{4 * i}], %r{100 + i};\n" for i in range(half))
    return (
        "mad.wide.u32 %rd51, %r1, 16, %rd3;\nmov.b32 %r5, global_smem;\nshl.b32 %r6, %r1, 4;\nadd.s32 %r5, %r5, %r6;\n"
        f"{chunks}bar.sync 0;\n{loads('%rd2', half, 100)}{loads('%rd4', 4, 10)}mov.u64 %rd41, {b};\n"
        f"{f'mov.u64 %rd40, {a};' if a[0] != '{' else ''}\nwgmma.fence.sync.aligned;\n"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{names}}}, "
        f"{a if a[0] == '{' else '%rd40'}, %rd41, {adds}, 1, 1, {sides};\nwgmma.commit_group.sync.aligned;\n"
        f"wgmma.wait_group.sync.aligned 0;\nmad.wide.u32 %rd50, %r1, {4 * half}, %rd1;\n{stores}"
    )


def of_group(body: str, shared: torch.Tensor, a: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """[64, columns], from registers of c's layout."""
    columns = c.shape[1]
    row, column = LANE // 32 * 16 + GROUP, 2 * OF_FOUR
    places = [(row + 8 * (i // 2 % 2), 8 * (i // 4) + column + i % 2) for i in range(columns // 2)]
    memory = torch.zeros(SIZE // 2, dtype=torch.int16)
    memory[: len(shared)] = shared.view(torch.int16)
    out = torch.zeros(128, columns // 2)
    run(group(body), out, torch.stack([c[p] for p in places], -1), memory, left(a, 128), threads=128, shared=SIZE)
    found = torch.empty(64, columns)
    for i, place in enumerate(places):
        found[place] = out[:, i]
    return found


def group(body: str):
    return kernel(body, 4, 128, registers=300)


REGISTERS = "{%r10, %r11, %r12, %r13}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("line", [128, 64, 32])
@pytest.mark.parametrize("columns", [8, 64])
def test_products_of_four_warps(columns: int, line: int, kind: str) -> None:
    """Both in shared memory, each row's numbers beside each other: of the second 16 columns, where there are such."""
    width, second = line // 2, 16 if line > 32 else 0
    a, b = torch.randn(64, width).to(KINDS[kind]), torch.randn(columns, width).to(KINDS[kind])
    c = torch.randn(64, columns)
    shared, start = torch.cat([stored(a, line), stored(b, line)]), 2 * second
    body = product(str(descriptor(start, line)), descriptor(64 * line + start, line), columns, "0, 0", kind)
    found = of_group(body, shared, torch.zeros(64, 16, dtype=KINDS[kind]), c)
    part = slice(second, second + 16)
    assert close(found, a[:, part].double() @ b[:, part].double().T + c)


@pytest.mark.parametrize("adds", ["1", "0"])
def test_products_with_registers_and_what_lies_across(adds: str) -> None:
    """a in registers; of b, [16, 64], each row is what is beside each other."""
    a, b, c = torch.randn(64, 16).bfloat16(), torch.randn(16, 64).bfloat16(), torch.randn(64, 64)
    found = of_group(product(REGISTERS, descriptor(0, 128), 64, "1", adds=adds), stored(b, 128), a, c)
    assert close(found, a.double() @ b.double() + (c if adds == "1" else 0))


def test_a_left_matrix_that_lies_across() -> None:
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    shared = torch.cat([stored(a, 128), stored(b, 128)])
    body = product(str(descriptor(0, 128)), descriptor(2048, 128), 8, "1, 0")
    found = of_group(body, shared, torch.zeros(64, 16).bfloat16(), torch.zeros(64, 8))
    assert close(found, a.double().T @ b[:, :16].double().T)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": SIZE // 16}, f"shared memory has {SIZE} bytes"),
        ({"start": SIZE // 16 - 64}, f"shared memory has {SIZE} bytes"),
        ({"mode": 0}, "whose lines keep their order"),
        ({"base": 3}, "or begin within a block"),
    ],
)
def test_faults_of_matrices(changes: dict[str, int], message: str) -> None:
    body = product(REGISTERS, descriptor(0, 128, **changes), 64, "0")
    with pytest.raises((Fault, Unsupported), match=message):
        of_group(body, torch.zeros(0), torch.zeros(64, 16).bfloat16(), torch.zeros(64, 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("bar.sync 0;\n", ""), "two warps meet in shared memory"),
        (("mov.u64 %rd41, ", "cvt.u64.u32 %rd41, %r1; //"), "a product of four warps with several matrices"),
        (("wgmma.mma", "setp.lt.s32 %p1, %r1, 96;\n@%p1 wgmma.mma"), "some of their threads do not reach"),
    ],
)
def test_faults_of_four_warps(change: tuple[str, str], message: str) -> None:
    body = product(REGISTERS, descriptor(0, 128), 64, "0")
    assert change[0] in body
    with pytest.raises(Fault, match=message):
        of_group(body.replace(*change), torch.zeros(0), torch.zeros(64, 16).bfloat16(), torch.zeros(64, 64))


def test_a_program_of_one_warp_has_no_such_product() -> None:
    text = group(product(REGISTERS, descriptor(0, 128), 8, "0"))
    tensors = [torch.zeros(32, 4), torch.zeros(32, 4), torch.zeros(SIZE // 2).short(), torch.zeros(32, 4).int()]
    with pytest.raises(Fault, match="32 threads are no groups of 128"):
        run(text, *tensors, threads=32, shared=SIZE)


@pytest.mark.parametrize(
    "text",
    [
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1, %r2, %r3, %r4}, {%r5, %r6}, {%r7}, {%r8, %r9}",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r2}, {%r3, %r4, %r5, %r6}, {%r7, %r8}, {%r9, %r10}",
        "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1, %r2, %r3, %r4}, %rd1, %rd2, 1, 1, 1",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %rd1, %rd2, 1, -1, 1, 0, 0",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %rd1, %rd2, 1, 1, 1, 0",
    ],
)
def test_other_products_are_named(text: str) -> None:
    with pytest.raises(Unsupported, match=text.split()[0].replace(".", r"\.")):
        kernel(f"{text};")
