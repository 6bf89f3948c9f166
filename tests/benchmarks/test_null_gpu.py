"""CUDA paths on the GPU that is not there: see `benchmarks/null_gpu`. On the pinned stack PyTorch is for CUDA 12."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.null_gpu.__main__ import main

ROOT = Path(__file__).parents[2]

needs_cuda_13 = pytest.mark.skipif(
    torch.cuda.is_available() or not (torch.version.cuda or "").startswith("13."),
    reason="the null GPU stands in for libcudart of CUDA 13, where there is no GPU",
)

# Of the tests for a GPU, those that need more than its kernels' results: why.
LEFT_OUT = {
    "tests/algorithms/test_matmul_precision.py::test_really_changes_products_on_a_gpu": "no CPU rounds as TF32 does",
    "tests/algorithms/test_optimizers.py::test_computes_adamw_on_cuda[bnb_adamw]": "bitsandbytes' kernels are its own",
    "tests/kernels/test_bias_gelu.py::test_more_than_two_to_the_31_elements": "takes minutes",
    "tests/kernels/test_layer_norm.py::test_more_than_two_to_the_31_elements": "takes minutes",
    "tests/benchmarks/test_profiles.py::test_steps_of_a_training_are_looked_at[cuda]": "it asks CUPTI: there is none",
}
GRAPHS = "tests/kernels/test_dropout_add_norm.py::test_cuda_graphs_draw_new_masks"
RECORDED = "tests/algorithms/test_cuda_graphs.py"
# Kernels by themselves: test_interpreted.py has the same checks, of fewer numbers.
LARGE = {f"tests/kernels/test_{name}.py" for name in ("bias_gelu", "cross_entropy", "dropout_add_norm", "layer_norm")}


PATIENCE = 900  # seconds: beside other work on two slow cores what are two of these parts now took over 400


def on_null_gpu(
    *command: str, compute: bool = False, options: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    options = (*options, "--compute") if compute else options
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.null_gpu", *options, "--", sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def groups() -> dict[str, list[str]]:
    """Tests for a GPU, in parts that the suite's workers can share, and of which each ends in its time."""
    files = gpu.marked()
    models = [file for file in files if file not in {*LARGE, RECORDED}]
    return {
        "unpadding": [file for file in models if "unpadding" in file],
        "models": [file for file in models if "unpadding" not in file],
        "graphs": [RECORDED, GRAPHS],
        "kernels": [file for file in files if file in LARGE],
    }


@needs_cuda_13
@pytest.mark.timeout(PATIENCE + 100)
@pytest.mark.parametrize("which", ["unpadding", "models", "graphs", pytest.param("kernels", marks=pytest.mark.slow)])
def test_gpu_tests_pass(which: str) -> None:
    """With PyTorch's operators computed on the CPU, and Triton's kernels, Inductor's among them, by the emulator."""
    assert set(gpu.marked()) > {*LARGE, RECORDED}
    left_out = [*LEFT_OUT, *[GRAPHS] * (which == "kernels")]
    options = [option for test in left_out for option in ("--deselect", test)]
    # Each tensor by itself, so that what is outside of one is outside of all; graphs need memory that stays.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if which == "kernels" else {}
    tests = groups()[which]
    done = on_null_gpu("-m", "pytest", "-m", "gpu", "--durations=5", *options, *tests, compute=True, **alone)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    summary = done.stdout.splitlines()[-1]
    assert " passed" in summary and "skipped" not in summary, summary


@needs_cuda_13
def test_a_planted_fault_on_cuda_is_found(tmp_path: Path) -> None:
    """Lengths in another order than the sequences they are of must not pass."""
    (tmp_path / "fault.py").write_text(
        "from composer_speedups.kernels import varlen_attention as module\n"
        "right = module.Lengths.of.__func__\n"
        "module.Lengths.of = classmethod(lambda cls, lengths, device='cpu': "
        "right(cls, [*lengths[1:], lengths[0]], device))\n"
    )
    done = on_null_gpu(
        *("-m", "pytest", "-m", "gpu", "-p", "fault", "-p", "no:cacheprovider"),
        *("tests/algorithms/test_unpadding.py", "-x"),
        compute=True,
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 1 and " failed" in done.stdout.splitlines()[-1], done.stdout[-2000:] + done.stderr[-1000:]


@needs_cuda_13
def test_inductor_launches_our_kernels_itself(tmp_path: Path) -> None:
    """One graph for all numbers of rows, no operator called by way of Python, no copy, and nothing in float64."""
    code = """
import torch
from torch._dynamo.utils import counters
from torch._inductor import async_compile
from torch._inductor.utils import run_fw_bw_and_get_code
from composer_speedups.compilation import prepare_inductor
from composer_speedups.kernels.bias_gelu import bias_gelu
from composer_speedups.kernels.dropout_add_norm import dropout_add_norm

prepare_inductor()
print(len(async_compile._pool_set), "pool of workers")
norm, gelu = (torch.compile(kernel, fullgraph=True, dynamic=True) for kernel in (dropout_add_norm, bias_gelu))

def ones(*shape):
    return torch.ones(shape, device="cuda", requires_grad=True)

calls = (
    lambda rows: norm(ones(rows, 96), ones(rows, 96), ones(96), ones(96), 0.1, 1e-12, ones(96)),
    lambda rows: norm(ones(rows, 96), ones(rows, 96), ones(96), ones(96), 0.0, 1e-12),
    lambda rows: gelu(ones(rows, 640), ones(640)),
)
for call in calls:
    _, codes = run_fw_bw_and_get_code(lambda: call(1000))
    for rows in (7, 20_000):
        call(rows).sum().backward()
    for direction, code in zip(("forward", "backward"), codes, strict=True):
        assert f"{direction}_kernel_0.run(" in code, code
        assert not any(word in code for word in ("torch.ops.composer_speedups", "clone_default", "fp64")), code
print(counters["stats"]["unique_graphs"])
"""
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = on_null_gpu("-c", code, TORCH_WARM_POOL="0", **folders)  # as the command line sets it
    assert (done.returncode, done.stdout) == (0, "1 pool of workers\n3\n"), done.stdout[-3000:] + done.stderr[-3000:]


@needs_cuda_13
def test_runs_are_forks_where_there_is_a_gpu(tmp_path: Path) -> None:
    """bitsandbytes initialises CUDA when it is imported, PEFT imports it, and Composer PEFT; runs still can."""
    pytest.importorskip("peft")
    (tmp_path / "probe.py").write_text("""
def bitsandbytes_in_a_run(payload, report):
    import torch
    from bitsandbytes.cextension import lib
    from peft.import_utils import is_bnb_4bit_available

    return lib.compiled_with_cuda, torch.cuda.is_initialized(), is_bnb_4bit_available()
""")
    code = """
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.ablation.jobs import PRELOAD

with Isolation("probe:bitsandbytes_in_a_run", PRELOAD) as isolation:
    outcome = isolation.run(None)
    print(isolation.shared, isolation.note, outcome.value, outcome.reason)
"""
    done = on_null_gpu("-c", code, PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == "True  [True, True, True]", done.stdout[-2000:] + done.stderr[-2000:]


@needs_cuda_13
def test_triton_refuses_a_tensor_of_the_host() -> None:
    code = (
        "import torch, triton\n"
        "from composer_speedups.kernels import layer_norm\n"
        "x = torch.ones(4, 64)\n"
        "tile = dict(ROWS=4, CHUNKS=1, BLOCK=64, VECTOR=8)\n"
        "layer_norm._forward_kernel[(1,)](x, *[x] * 5, 64, 4, 1e-5, 64, True, True, **tile)\n"
    )
    done = on_null_gpu("-c", code)
    assert done.returncode == 1 and "cpu tensor" in done.stderr, done.stderr[-2000:]


@needs_cuda_13
def test_a_lost_context_is_seen(tmp_path: Path) -> None:
    """As after an illegal access of memory, error 700: every call reports it. Nothing is started by looking."""
    source, library = tmp_path / "lost.c", tmp_path / "liblost.so"
    source.write_text('#include <stdlib.h>\nint cudaDeviceSynchronize() { return getenv("LOST") ? 700 : 0; }\n')
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = (
        "import os, sys, torch\n"
        "from benchmarks.apart import context_lost\n"
        f"if {str(library)!r} not in os.environ['LD_PRELOAD']:\n"
        f"    os.environ['LD_PRELOAD'] = '{library} ' + os.environ['LD_PRELOAD']\n"
        "    os.execv(sys.executable, sys.orig_argv)\n"
        "print(context_lost(), torch.cuda.is_initialized())\n"
        "torch.ones(1, device='cuda')\n"
        "print(context_lost())\n"
        "import ctypes; ctypes.CDLL(None).setenv(b'LOST', b'1', 1)\n"
        "print(context_lost())\n"
    )
    done = on_null_gpu("-c", code)
    assert (done.returncode, done.stdout) == (0, "False False\nFalse\nTrue\n"), done.stderr[-2000:]


@needs_cuda_13
@pytest.mark.slow
def test_the_gpu_programme_gets_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "brought").mkdir()
    done = on_null_gpu(
        *("-m", "benchmarks.gpu", "--parts", "limits", "training", "--first", "5", "--minutes", "6"),
        *("--batches", "4", "--out", str(tmp_path / "results")),
        OUT=str(tmp_path / "brought"),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "results/peers/rows.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows} == {"ok"}, [row["reason"] for row in rows]
    with tarfile.open(tmp_path / "brought" / "results.tgz") as archive:
        assert {"results/limits/table.md", "results/peers/table.md"} <= set(archive.getnames())


REPLAYED = """
import torch, triton, triton.language as tl

@triton.jit
def gather(x, i, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + tl.load(i + at)) + 1)

x, i, y = torch.arange(64.0, device="cuda"), torch.arange(32, device="cuda"), torch.zeros(32, device="cuda")
graph = torch.cuda.CUDAGraph()
gather[(1,)](x, i, y, 32)
y.zero_()
with torch.cuda.graph(graph):
    gather[(1,)](x, i, y, 32)
assert not y.any()  # not computed yet
i += 7
graph.replay()
assert y.tolist() == [n + 8 for n in range(32)]
i.fill_(1 << 40)
graph.replay()
"""


@needs_cuda_13
def test_a_graph_computes_when_it_is_replayed_and_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "replayed.py").write_text(REPLAYED)
    done = on_null_gpu(str(tmp_path / "replayed.py"), compute=True)
    assert done.returncode == 1 and "outside of any tensor" in done.stderr, done.stderr[-2000:]
    assert "graph.replay()" in done.stderr and "AssertionError" not in done.stderr, done.stderr[-2000:]


@needs_cuda_13
def test_it_is_the_gpu_that_was_asked_for() -> None:
    code = (
        "import torch\n"
        "print(torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[1] >> 30)\n"
        "try: torch.empty(13 << 30, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError: print('out of memory')\n"
    )
    done = on_null_gpu("-c", code, options=("--capability", "8.6", "--memory", "12"))
    assert (done.returncode, done.stdout) == (0, "(8, 6) 12\nout of memory\n"), done.stderr[-2000:]


@pytest.mark.parametrize(("option", "value"), [("--capability", "86"), ("--memory", "0")])
def test_wrong_values_are_named(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([option, value, "--", "true"])
    assert option in (said := capsys.readouterr().err) and value in said.splitlines()[-1]


def test_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "the following arguments are required: command" in capsys.readouterr().err


@needs_cuda_13
def test_a_command_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--", "no-such-command"])
    assert "cannot run 'no-such-command': No such file" in capsys.readouterr().err
