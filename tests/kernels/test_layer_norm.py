"""The Triton kernel without a GPU: compiled for GPUs (`interpreted_layer_norm.py` runs it)."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_code import at_once, compile_for, copied_ahead, instructions, late_loads, spills, time_for
from layer_norm_check import case, check
from ptx_kernel import kernel
from shared_memory import counted

from benchmarks.null_gpu.ptx.driver import launch
from benchmarks.null_gpu.ptx.load import program_of
from benchmarks.null_gpu.ptx.machine import Fault
from composer_speedups.kernels import layer_norm as module
from composer_speedups.kernels.launch import DTYPES, backward_tile_of, most_programs, tile_of
from composer_speedups.kernels.launch import room as most_room
from composer_speedups.kernels.layer_norm import layer_norm

STRIDES = ("x_stride", "dy_stride")
WIDTHS = [16, 256, 384, 512, 640, 768, 1024, 2048, 4096, 8192, 769, 1000]  # the last two are not aligned


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 769, 8192])
@pytest.mark.parametrize("name", ["_forward_kernel", "_backward_kernel"])
def test_compiles_for_a_gpu(
    name: str, width: int, dtype: torch.dtype, capability: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    aligned = () if width % 16 else STRIDES  # as Triton finds them, when it is called
    assert not spills(compiled(capability, name, width, dtype, aligned), tmp_path)


@pytest.mark.parametrize(("name", "moved"), [("_forward_kernel", 4), ("_backward_kernel", 6)])
@pytest.mark.parametrize("width", [768, 1024])
def test_memory_is_what_it_waits_for(name: str, moved: int, width: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, name, width, torch.bfloat16, STRIDES)
    assert instructions(code, tmp_path, tile_for(name, width, 2)["ROWS"] * width) < 0.75 * time_for(moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [256, 768, 1024, 4096])
def test_a_row_waits_for_memory_once(width: int, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert not late_loads(compiled(90, "_backward_kernel", width, dtype, STRIDES), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_all_programs_run_at_once(width: int, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    """Backward: some that begin when the others are done would take as long again. And no fewer at BERT's widths."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, "_backward_kernel", width, dtype, () if width % 16 else STRIDES)
    tile, of_one = backward_tile_of(width, dtype.itemsize), SimpleNamespace(type="cuda")
    monkeypatch.setattr("composer_speedups.kernels.launch.processors", lambda _: 1)
    monkeypatch.setattr("composer_speedups.kernels.launch.room", lambda _: 32)
    programs = most_programs(tile, module._registers(width, tile), of_one)
    assert programs <= at_once(code, tmp_path)
    if (width, dtype) in ((768, torch.bfloat16), (1024, torch.bfloat16)):
        assert programs == at_once(code, tmp_path) == {768: 10, 1024: 8}[width]


@pytest.mark.parametrize(("capability", "room"), [((8, 0), 32), ((8, 6), 16), ((8, 9), 24), ((9, 0), 32)])
def test_no_more_programs_than_a_processor_has_room_for(capability, room: int, monkeypatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr("composer_speedups.kernels.launch.processors", lambda _: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    tiles = {width: backward_tile_of(width, 2) for width in (256, 768)}
    most_room.cache_clear()
    try:
        found = [most_programs(tile, module._registers(width, tile), device) for width, tile in tiles.items()]
    finally:
        most_room.cache_clear()
    assert found == [room, 10]


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("width", [768, 1024])
def test_rows_may_be_loaded_ahead(width: int, stages: int, tmp_path: Path, monkeypatch) -> None:
    """By copies to shared memory: as benchmarks/launches.py tries it. At a width that has no vectors, none are made."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, "_backward_kernel", width, torch.bfloat16, STRIDES, stages)
    assert copied_ahead(code) == (4, stages - 2), "x, dy, mean and rstd, while the row before is computed"
    assert "cp.async" in code.asm["ptx"] and not spills(code, tmp_path)
    moved = backward_tile_of(width, 2)["ROWS"] * width
    assert instructions(code, tmp_path, moved) < 0.9 * time_for(6)


def test_two_stages_load_nothing_ahead(tmp_path: Path, monkeypatch) -> None:
    """Hence `benchmarks/launches.py` tries 3: with 2 Triton has room for one row, and copies it when it is needed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert copied_ahead(compiled(90, "_backward_kernel", 768, torch.bfloat16, STRIDES, 2)) == (4, 0)


def tile_for(name: str, width: int, itemsize: int) -> dict[str, int]:
    return (tile_of if name == "_forward_kernel" else backward_tile_of)(width, itemsize)


def compiled(
    capability: int, name: str, width: int, dtype: torch.dtype, aligned: tuple[str, ...] = (), stages: int = 1
):
    kernel = getattr(module, name)
    tile = tile_for(name, width, dtype.itemsize)
    warps = tile.pop("num_warps")
    constants = tile | {"WIDTH": width}
    constants |= {n: True for n in ("HAS_W", "HAS_B", "NEED_DX", "NEED_DW") if n in kernel.arg_names}
    constants |= {"STAGES": stages} if "STAGES" in kernel.arg_names else {}
    dtypes = dict.fromkeys(("w", "b", "mean", "rstd", "dw", "db"), torch.float32)
    dtypes |= dict.fromkeys(("x", "y", "dx", "dy"), dtype)
    return compile_for(capability, kernel, dtypes, constants, warps, aligned)


def test_without_its_barriers_it_would_be_a_race(tmp_path: Path, monkeypatch) -> None:
    """Rows of 8192 are shared by warps. As the emulator of `test_interpreted.py` must see if one were missing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, "_forward_kernel", 8192, torch.float32, STRIDES)
    x, y, statistics = torch.randn(2, 8192), torch.zeros(2, 8192), torch.zeros(2, 2)
    given = [("*", t) for t in (x, torch.ones(8192), torch.zeros(8192), y, statistics[0], statistics[1])]
    given += [("i32", 8192), ("i32", 2), ("fp32", 1e-5)]
    without = re.sub(r"bar\.sync\s+0;", "", code.asm["ptx"])
    for text, result in ((code.asm["ptx"], nullcontext()), (without, pytest.raises(Fault, match="without a barrier"))):
        with result:
            launch(program_of(text.encode()), given, (2, 1, 1), 32 * code.metadata.num_warps, code.metadata.shared)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (8192,)), rtol=1e-5, atol=1e-5)


def test_sums_do_not_wait_for_shared_memory(tmp_path: Path, monkeypatch) -> None:
    """Added up over a program's rows there they took 17,000 cycles, where a turn of its loop takes some hundred."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = compiled(90, "_backward_kernel", 1024, torch.bfloat16, STRIDES)
    x, dy, dx = (torch.randn(8, 1024).bfloat16() for _ in range(3))
    statistics, sums = torch.ones(2, 8), torch.zeros(2, backward_tile_of(1024, 2)["ROWS"], 1024)
    given = [("*", t) for t in (dy, x, torch.ones(1024), *statistics, dx, *sums)] + [
        ("i32", n) for n in (1024, 1024, 8)
    ]
    program = program_of(code.asm["ptx"].encode())
    with counted() as shared:
        launch(program, given, (1, 1, 1), 32 * code.metadata.num_warps, code.metadata.shared)
    torch.testing.assert_close(sums[1].sum(0), dy.float().sum(0), rtol=1e-5, atol=1e-5)
    assert 0 < shared["at_best"] <= shared["cycles"] < 1000


def test_a_bank_is_read_one_row_at_a_time() -> None:
    """Neighbours' words; then words 32 apart, all in one bank, which the emulator reads as well."""
    for apart, cycles in ((1, 1), (2, 2), (32, 32)):
        body = f"mul.lo.s32 %r2, %r1, {4 * apart};\nmov.b32 %r3, global_smem;\nadd.s32 %r3, %r3, %r2;\n"
        program = kernel(body + "ld.shared.b32 %r4, [%r3];", 1)
        with counted() as shared:
            launch(program, [("*", torch.zeros(1))], (1, 1, 1), 32, 32 * 32 * 4)
        assert shared == {"cycles": cycles, "at_best": 1}


def test_needs_a_gpu_and_says_so() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device, x is on cpu"):
        layer_norm(torch.ones(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 31, 64, 768, 769, 4096, 8192])
def test_matches_float64_on_the_gpu(width: int, dtype: torch.dtype) -> None:
    check(layer_norm, *case((70, 9, width), dtype, device="cuda"))


@pytest.mark.gpu
def test_compiled_model_on_the_gpu() -> None:
    compiled = torch.compile(layer_norm, fullgraph=True, dynamic=True)
    check(compiled, *case((64, 768), torch.bfloat16, device="cuda"))
    check(compiled, *case((2000, 768), torch.bfloat16, device="cuda"))


@pytest.mark.gpu
def test_repeats_bit_for_bit_on_the_gpu() -> None:
    inputs = case((5000, 768), torch.bfloat16, device="cuda")
    first, second = (torch.autograd.grad(layer_norm(*inputs).float().square().sum(), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 24 << 30:
        pytest.skip("needs a GPU with 24 GiB of memory")
    x = torch.zeros(2**31 // 8192 + 8, 8192, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(8192, device="cuda")
    torch.testing.assert_close(layer_norm(x)[-1], layer_norm(x[-1:])[0], rtol=0, atol=0)
