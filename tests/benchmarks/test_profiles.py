"""Where a step's time goes: kernels by what they are for, and windows of steps in a real training."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from benchmarked import ROOT

from benchmarks import harness, profiles, run
from composer_speedups.hardware import hardware
from composer_speedups.kernels import packed_attention_triton

TRACES = ROOT / "benchmarks" / "results" / "2026-11-26_h200_profiles"
TINY = (
    "task={name: dummy, mean_length: 10, length_std: 4, max_length: 16, train_samples: 64}",
    "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64, "
    "vocab_size: 128}",
    "model.pretrained=false",
    "batch_size=4",
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64>", "products"),
        ("void pytorch_flash::flash_fwd_kernel<..., cutlass::bfloat16_t>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_dropout_sm80(...)", "attention"),
        (packed_attention_triton.attention_keys_kernel.fn.__name__, "attention"),
        ("backward_kernel", "norms, dropout, GELU"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norms, dropout, GELU"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<...>>", "copies, casts"),
        ("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor>", "optimizer"),
        ("void vectorized_elementwise_kernel<4, copy_kernel(TensorIterator&)::{lambda(float)#1}>", "copies, casts"),
        (
            "void vectorized_elementwise_kernel<8, CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>>",
            "elementwise",
        ),
        ("void at::native::reduce_kernel<128, 4, ReduceOp<float, sum_functor>>", "sums"),
        ("triton_red_fused_sum_7", "compiled"),
        ("void compute_grad_weight<float, long>(long const*, float const*)", "embeddings"),
        ("Memcpy HtoD (Pinned -> Device)", "copies, casts"),
        ("what nobody has seen", "other"),
    ],
)
def test_kernels_are_told_apart(name: str, kind: str) -> None:
    assert profiles.kind_of(name) == kind


def test_sums_of_a_real_trace() -> None:
    """Milliseconds of one of five steps, as they were drawn by hand from this trace."""
    activities = profiles.activities_of(TRACES / "second_ours_finetune_fastest.json.gz")
    found = {kind: 1e3 * taken / 5 for kind, taken in profiles.by_kind(activities).items()}
    stated = {"products": 9.1, "attention": 3.6, "norms, dropout, GELU": 2.3, "optimizer": 0.8, "sums": 0.7}
    assert {kind: found[kind] for kind in stated} == pytest.approx(stated, abs=0.06)
    busy = profiles.busy_seconds(activities)
    assert busy == pytest.approx(sum(a.seconds for a in activities), rel=1e-3), "one stream: little ran side by side"


def test_what_benchmarks_readme_says_of_a_step_on_the_h200() -> None:
    """The one of 13,312 tokens, of the five in the trace: between the optimizer's first kernels of two steps."""
    trace = TRACES.with_name("2026-11-27_h200_profiles") / "ours_finetune_fastest.json.gz"
    activities = sorted(profiles.activities_of(trace), key=lambda a: a.start)
    updates = [n for n, a in enumerate(activities) if profiles.kind_of(a.name) == "optimizer"]
    firsts = [b for a, b in zip([-1000, *updates], updates, strict=False) if b - a > 100]
    step = min((activities[a:b] for a, b in pairwise(firsts)), key=profiles.busy_seconds)
    found = {kind: 1e3 * taken for kind, taken in profiles.by_kind(step).items()}
    stated = {"products": 9.2, "attention": 3.0, "norms, dropout, GELU": 2.4, "optimizer": 0.8, "copies, casts": 0.7}
    stated |= {"sums": 0.4, "embeddings": 0.1}
    assert {kind: found[kind] for kind in stated} == pytest.approx(stated, abs=0.051)
    assert profiles.busy_seconds(step) == pytest.approx(16.9e-3, abs=0.05e-3)


def test_a_trace_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert profiles.main([str(TRACES / "second_ours_finetune_fastest.json.gz"), "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["9.105", "ms", "products"]
    assert any("12.0x" in line and "[attention]" in line and "flash_bwd" in line for line in lines)
    for wrong in ([], [str(tmp_path / "nothing.json")], [str(TRACES / "method.txt"), "five"]):
        assert profiles.main(wrong) == 2
        assert "usage: python -m benchmarks.profiles TRACE" in capsys.readouterr().err


@pytest.mark.parametrize("section", profiles.ENTRIES)
def test_ours_and_who_is_to_be_beaten_are_looked_at_by_default(section: str) -> None:
    """And nobody else: a GPU is lent for minutes."""
    entries = profiles.ENTRIES[section]
    chosen = profiles.named(profiles.usual(entries), entries)
    assert len(chosen) == (3 if section == "cuda" else 2)
    assert {name.partition(",")[0].removesuffix("_fp32") for name in chosen} <= {
        *("ours: finetune/fastest", "ours: mlm/fastest", "ours: cpu/fastest", "Hugging Face Trainer"),
    }


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def test_steps_of_a_training_are_looked_at(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if device != hardware():
        pytest.skip(f"no {device} here" if device == "cuda" else "entries run on the GPU, where there is one")
    entries = {
        "ours: a": harness.Entry("ours", "cpu/fastest_fp32" if device == "cpu" else "finetune/bf16", TINY),
        "a peer": harness.Entry("huggingface_best", "cpu/fp32", TINY, {"bf16": False}),
        "broken": harness.Entry("ours", "cpu/fp32", TINY, {"no_such_argument": True}),
    }
    monkeypatch.setattr(profiles, "ENTRIES", dict.fromkeys(profiles.ENTRIES, entries))
    assert run.main(["profiles", "--only", "a", "broken", "--batches", "3", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["entry"], row["status"]) for row in rows] == [
        ("ours: a", "ok"),
        ("a peer", "ok"),
        ("broken", "failed"),
    ], (tmp_path / "failed.txt").read_text()
    for row, file in zip(rows, ("ours_a", "a_peer"), strict=False):
        assert 0 < row["host_seconds"] <= row["step_seconds"]
        # The mean of steps that the contender's own clock has timed, too: from the hook of one to that of another.
        before, plain, _ = profiles._STEPS[device]
        own = sum(row["every_step"][before : before + plain]) / plain
        assert own / 3 < row["step_seconds"] < own * 3
        assert 0 < row["tokens"] <= 64
        trace = json.loads(gzip.decompress((tmp_path / f"{file}.json.gz").read_bytes()))
        # On a GPU each of these ranges is there a second time, as what the device did meanwhile.
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") != "gpu_user_annotation"]
        assert sum(name.startswith("Optimizer.step#") for name in names) in (3, 4), "of three steps"
        text = (tmp_path / f"{file}.txt").read_text()
        assert "cumulative time" in text and "(backward)" in text
        if device == "cuda":
            assert row["kinds"]["products"] > 0 and row["busy_seconds"] > 0
    table = (tmp_path / "table.md").read_text()
    assert ("the GPU is busy" in table) == torch.cuda.is_available() == (tmp_path / "plot.png").exists()
    assert "| a step | " in table and "broken: " in table


def test_the_picture_has_all_of_a_step_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bars end where the kernels' milliseconds end; and one that is there stays."""
    from matplotlib.axes import Axes

    source = harness.RESULTS / "2026-11-27_h200_profiles"
    for name in ("rows.jsonl", "environment.json", "conditions.json"):
        shutil.copy(source / name, tmp_path)
    drawn: list[tuple[str, list[float]]] = []
    real = Axes.barh

    def barh(self, names, taken, left, label):
        drawn.append((label, [a + b for a, b in zip(left, taken, strict=True)]))
        return real(self, names, taken, left=left, label=label)

    monkeypatch.setattr(Axes, "barh", barh)
    table = profiles.table(tmp_path)
    rows = harness.read(tmp_path).rows
    assert drawn[-1][1] == pytest.approx([1e3 * sum(row["kinds"].values()) for row in rows])
    assert [f"- {kind}" for kind, _ in drawn] == re.findall(r"^\| (- [^|]*?) \|", table, re.MULTILINE)
    before = (tmp_path / "plot.png").read_bytes()
    profiles.table(tmp_path)
    assert (tmp_path / "plot.png").read_bytes() == before and len(before) > 10_000


def test_windows_do_not_overlap() -> None:
    windows, said = profiles.Windows(2, 3, 2, 4), []

    class Noted:
        def __getattr__(self, name: str):
            return lambda *_: said.append((windows._done, name))

    windows.profiler = windows._host = Noted()
    for _ in range(windows.steps):
        windows.after_a_step()
    assert said == [(6, "__enter__"), (10, "__exit__"), (11, "enable"), (13, "disable")]
    assert windows.steps == 14
    assert 0 < windows.seconds["host_seconds"] <= windows.seconds["step_seconds"]
