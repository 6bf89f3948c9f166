"""The benchmarks' own code: every entry can run, all do comparable work, and the bare loop applies what it should."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    compiling,
    contenders,
    gpu,
    growth,
    harness,
    kernels,
    limits,
    peers,
    quality,
    run,
    table,
    verdicts,
)
from composer_speedups import registry  # noqa: E402
from composer_speedups.errors import UserError  # noqa: E402
from composer_speedups.hardware import suite_section  # noqa: E402
from composer_speedups.recipes import load_recipe  # noqa: E402
from composer_speedups.tasks import build_model, build_task  # noqa: E402

TINY = (
    "task={name: dummy, mean_length: 10, length_std: 4, max_length: 16, train_samples: 64}",
    "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64, "
    "vocab_size: 128, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
    "model.pretrained=false",
    "batch_size=4",
)


def _all_entries() -> dict[str, harness.Entry]:
    found = {f"{hardware}: {name}": e for hardware, some in peers.ENTRIES.items() for name, e in some.items()}
    for point in growth.points():
        for hardware, recipes in growth._RECIPES.items():
            for recipe in recipes:
                found[f"{hardware}: growth {point} {recipe}"] = harness.Entry("ours", recipe, growth.overrides(point))
    return found | {f"compiling: {name}": entry for name, entry in compiling._entries("/nowhere").items()}


ENTRIES = _all_entries()


def job(recipe: str, *overrides: str, steps: int = 3, counted: int = 2) -> contenders.Job:
    return contenders.Job(load_recipe(recipe, (*TINY, *overrides)), steps, counted, seed=5)


# --- Entries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_can_be_built(name: str) -> None:
    entry = ENTRIES[name]
    recipe = load_recipe(entry.recipe, entry.overrides)  # with the arguments of all speed-ups checked
    assert harness._large_enough(entry, 12).task.train_samples >= 12 * recipe.batch_size
    assert all(algorithm.slot != "batches" for algorithm in recipe.algorithms()), "every contender has the same batches"
    inspect.signature(contenders.CONTENDERS[entry.contender]).bind(job("cpu/fp32"), **entry.arguments)


@pytest.mark.parametrize("hardware", peers.ENTRIES)
def test_who_is_compared_has_the_same_work(hardware: str) -> None:
    kinds: dict[str, list[Any]] = {}
    for name, entry in peers.ENTRIES[hardware].items():
        recipe = load_recipe(entry.recipe, entry.overrides)
        work = (recipe.task, recipe.batch_size, recipe.learning_rate, recipe.optimizer.weight_decay, recipe.model.name)
        memory = peers._kind(name) == "memory/"  # one process each, and no loader to speak of
        kinds.setdefault(peers._kind(name), []).append((*work, None if memory else recipe.workers))
        if entry.contender.startswith(("huggingface", "composer")):
            assert recipe.model.attn_implementation != "eager", "peers have the attention that a user gets"
    for kind, works in kinds.items():
        assert all(work == works[0] for work in works), kind
    assert set(kinds) == ({"", "mlm/", "memory/"} if hardware == "cuda" else {""})


# --- The bare loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["cpu/fastest", "finetune/fastest", "finetune/fastest_eager", "mlm/fastest"])
def test_the_bare_loop_calls_every_function_as_it_wants_to_be_called(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(name, TINY)
    task = build_task(recipe.task, recipe.model, seed=1)
    model = build_model(recipe.model, task, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = contenders._loader(task, contenders.Job(recipe, 3, 2, 1))
    called: dict[str, Any] = {}
    real = registry.function

    def stub(key: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> int:
            bound = inspect.signature(real(key)).bind(*args, **kwargs)
            called[key] = next(iter(bound.arguments.values()), None)
            return 1

        return call

    monkeypatch.setattr(registry, "function", stub)
    kept = contenders.apply_functions(recipe, model, optimizer, loader, torch.device(device))
    left_out = {"sync_free_loop"} | ({"prefetch_batches"} if device == "cpu" else set())
    assert set(called) == set(recipe.speedups) - left_out
    assert len(kept) == len(called)
    for key, first in called.items():
        if key == "prefetch_batches":
            assert first is loader
        elif key not in ("matmul_precision", "reuse_host_memory"):
            assert first is (optimizer if "adamw" in key else model), key


def test_the_bare_loop_refuses_other_batches() -> None:
    with pytest.raises(ValueError, match="length_grouped_batches"):
        contenders.apply_functions(load_recipe("cpu/length_grouped_batches"), None, None, None, torch.device("cpu"))


# --- Real runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contender", "recipe"),
    [
        *(("ours", "cpu/fp32"), ("ours", "cpu/fastest"), ("composer", "cpu/fp32"), ("huggingface", "cpu/fp32")),
        *(("huggingface_best", "cpu/fp32"), ("bare_loop", "cpu/fp32"), ("bare_loop", "cpu/fastest")),
    ],
)
@pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast:FutureWarning")  # by transformers 4.53, in bf16 on a CPU
def test_contenders_run_and_do_the_same_samples(
    contender: str, recipe: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if contender.startswith("huggingface"):
        pytest.importorskip("accelerate")
    this = job(recipe, steps=10)  # a tenth of it is a step of warm-up: Composer warns at none
    payload = {"contender": contender, "recipe": this.recipe.to_dict(), "arguments": {}}
    found = contenders.measure(payload | {"steps": 10, "counted": 6, "seed": 5}, print)
    assert len(found["seconds"]) == len(found["losses"]) == len(found["tokens"]) == len(found["flops"]) == 10
    assert min(found["seconds"]) > 0 and found["peak_memory_bytes"] > 0
    # Weights, samples and no dropout: the first loss is everybody's, to the rounding of bf16.
    if contender != "huggingface_best":
        expected = _first_loss(this)
        assert found["losses"][0] == pytest.approx(expected, rel=1e-2 if "fastest" in recipe else 1e-5)


def _first_loss(this: contenders.Job) -> float:
    task, model = contenders._make(this)
    order = list(contenders._sampler(task, this))[: this.recipe.batch_size]
    with torch.no_grad():
        return float(model(**task.collate_train([task.train[i] for i in order])).loss)


def test_real_tokens_are_those_of_the_samples() -> None:
    this = job("cpu/fp32")
    task = build_task(this.recipe.task, this.recipe.model, seed=this.seed)
    work = contenders._work(this, None)
    batches = list(contenders._loader(task, this))[:3]
    assert work["tokens"] == [float(batch["attention_mask"].sum()) for batch in batches]
    chosen = list(range(20, 32))
    assert work["mean_length"] == pytest.approx(task.train.lengths.mean())
    assert sum(contenders._work(this, chosen)["tokens"]) == task.train.lengths[20:32].sum()


# --- Length grouping ---------------------------------------------------------------------------------------------


def test_grouped_batches_are_a_whole_epochs_in_miniature() -> None:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = np.random.default_rng(3).integers(10, 257, 8000)
    this = contenders.Job(load_recipe("cpu/fp32"), 12, 8, seed=5)
    order = contenders._grouped(lengths, this)
    assert len(order) == 12 * 32
    counted = lengths[order].reshape(12, 32)[4:]
    epoch = lengths[list(LengthGroupedSampler(32, lengths=lengths.tolist()))].reshape(250, 32)

    def padding(batches: np.ndarray) -> float:
        return 1 - batches.sum() / (32 * batches.max(1).sum())

    assert padding(epoch) < 0.05 < padding(lengths.reshape(250, 32)), "the sampler does group"
    assert padding(counted) == pytest.approx(padding(epoch), abs=0.02)
    assert counted.mean() == pytest.approx(epoch.mean(), rel=0.03)
    assert counted[0].mean() > counted[-1].mean(), "the longest come first"


# --- The harness -------------------------------------------------------------------------------------------------


def row(entry: str, repetition: int, tokens: float, **more: Any) -> dict[str, Any]:
    values = {"seconds": [9.0, 1.0, 1.0], "tokens": [9, tokens, tokens], "flops": [9, 5.0, 5.0], "losses": [1.0, 0.5]}
    found = {"entry": entry, "repetition": repetition, "reason": "", "overlapped": False, **values} | more
    return found | harness._speeds(found, 4, 2)


def test_speeds_are_of_the_batches_that_count() -> None:
    found = row("ours: a", 0, 10)
    assert (found["samples_per_second"], found["real_tokens_per_second"], found["flops_per_second"]) == (4.0, 10.0, 5.0)
    failed = {"status": "failed", "reason": "x"}
    assert set(harness._speeds(failed, 4, 2).values()) == {None}


def test_the_table_compares_real_tokens_within_a_kind() -> None:
    names = ["ours: x/fp32", "ours: x/fastest", "ours: mlm/amp", "ours: mlm/fastest"]
    speeds = (10, 40, 5, 15)
    rows = [row(name, n, speed * (n + 1)) for n in range(3) for name, speed in zip(names, speeds, strict=True)]
    lines = {name: peers._line(rows, name, names, 100.0) for name in names}
    assert lines["ours: x/fastest"][4].startswith("4.00x")
    assert lines["ours: x/fp32"][5].startswith("4.00x")
    assert lines["ours: mlm/amp"][4:6] == ("1.00x [1.00, 1.00]", "3.00x [3.00, 3.00]")
    assert lines["ours: x/fp32"][3] == "5.0 % [5.0, 5.0]"
    rows[0]["overlapped"] = True
    assert "beside other work" in peers._line(rows, names[0], names, 100.0)[0]
    failed = [row(names[0], 0, 0, seconds=[], reason="out of memory")]
    assert peers._line(failed, names[0], names[:1], 1.0)[1] == "out of memory"


def test_a_plot_is_drawn_and_leaves_out_what_has_no_value(tmp_path: Path) -> None:
    harness.plot(tmp_path, {"ours: a": [1.0, 2.0], "b": [3.0], "failed": []}, "samples/s")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    harness.plot(tmp_path / "nothing", {"failed": []}, "samples/s")


def test_nothing_runs_after_the_deadline(tmp_path: Path) -> None:
    entries = {"a": harness.Entry("ours", "cpu/fp32", TINY)}
    assert harness.interleaved(entries, tmp_path, repetitions=1, batches=1, deadline=0.0) == []


# --- Tables ---

# Folders from before the conditions were noted, and what those were.
MEASURED: dict[str, dict[str, Any]] = {
    "2026-11-21_cpu_growth_2": {
        "part": "growth",
        "batches": 3,
        "recipes": ["cpu/bf16", "cpu/fastest"],
        "axes": growth.AXES,
        "middle": growth.MIDDLE,
    },
    "2026-11-21_cpu_limits": {
        "part": "limits",
        "peaks": {"fp32": 0.207e12, "bf16": 0.441e12},
        "tokens": 6144,
        "width": 256,
        "missing": [],
    },
    "2026-11-22_cpu_compiling_3": {"part": "compiling", "recipe": "cpu/bf16", "layers": 12, "batch": 8},
    "2026-11-22_cpu_peers_4": {"part": "peers", "batches": 8, "precision": "bf16", "peak": 0.915e12},
}


NOTED = [file.parent.name for file in sorted((ROOT / "benchmarks" / "results").glob("*/conditions.json"))]


@pytest.mark.parametrize("name", [*MEASURED, *NOTED])
def test_a_table_is_what_its_rows_say(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed = ROOT / "benchmarks" / "results" / name
    for file in ("environment.json", "conditions.json", "entries.json", "rows.jsonl"):
        if (committed / file).exists():
            shutil.copy(committed / file, tmp_path)
    if name in MEASURED:
        harness.begin(tmp_path, **MEASURED[name])
    assert table.main([str(tmp_path)]) == 0
    assert (tmp_path / "plot.png").exists() == (committed / "plot.png").exists()
    made, there = (
        re.sub(r"[\d.]+ % \[[^]]*\]", "MFU", (folder / "table.md").read_text())  # of a peak that was noted rounded
        for folder in (tmp_path, committed)
    )
    assert made == there
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out


def test_what_was_measured_before_it_was_stopped_has_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ROOT / "benchmarks" / "results" / "2026-11-22_cpu_compiling_3"

    def measure(folder: Path, repetitions: int, batches: int) -> None:
        harness.begin(folder, **MEASURED[source.name])
        lines = (source / "rows.jsonl").read_text().splitlines(keepends=True)
        (folder / "rows.jsonl").write_text("".join(lines[: repetitions * 7 + 2]) + lines[-1][:50])  # killed in a line
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "measure", measure)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run.main(["compiling", "--repetitions", "2", "--out", str(out)])
    text = (out / "table.md").read_text()
    assert text in capsys.readouterr().out
    assert "2 to 3 repetitions, each run in" in text and text.count("\n|") == 9
    (out / "table.md").write_text("never edited\n")
    table.main([str(out)])
    assert (out / "table.md").read_text() == "never edited\n"


def test_folders_that_hold_no_benchmark_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path} has no conditions.json"):
        table.main([str(tmp_path)])


def test_verdicts_are_counted_by_what_was_planted(tmp_path: Path) -> None:
    fair, lost = ("no difference shown", "quality holds"), ("no difference shown", "unstable")
    rows = [
        ("the_same_1", 1.0, [0.9, 1.1], *fair),
        ("the_same_2", 1.2, [1.1, 1.3], "faster", "quality holds"),
        ("the_same_3", 1.1, [0.8, 1.2], "no difference shown", "quality not shown to hold"),
        ("slept_a_tenth", 0.9, [0.8, 1.0], *fair),
        ("slept_half", 0.7, [0.6, 0.8], "slower", "quality holds"),
        ("wild", None, None, *lost),
    ]
    keys = ("recipe", "speedup", "speedup_interval", "speed_verdict", "quality_verdict")
    lines = [json.dumps({"study": "study_01", **dict(zip(keys, row, strict=True))}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "environment.json").write_text(json.dumps(harness.environment(), default=str))
    harness.begin(tmp_path, "verdicts", steps=48, seeds=3)
    text = verdicts.table(tmp_path)
    assert "claimed 2 times in 3 comparisons of a recipe with itself" in text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    same, tenth, half, wild = cells[2:]
    assert same[1:4] == ["3", "1.10x [1.00, 1.20]", "0.90 to 1.20"]
    assert same[4:] == ["no difference shown (2), faster (1)", "quality holds (2), quality not shown to hold (1)"]
    assert tenth[0] == "sleeps for 10% of a step" and tenth[4] == "no difference shown (1)"
    assert half[0] == "sleeps for 50% of a step" and half[4] == "slower (1)"
    assert wild[1:] == ["1", "", "", "no difference shown (1)", "unstable (1)"]


# --- Quality against another study's baseline ---------------------------------------------------------------------


def test_quality_is_judged_as_a_study_judges_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {
        "ten": "2026-11-23_cpu_quality_256_ten_seeds",
        "twelve": "2026-11-22_cpu_quality_64_twelve_seeds",
        "later": "2026-11-24_cpu_amx_quality_256",
    }
    ten, twelve, later = (tmp_path / name for name in folders)
    for name, folder in folders.items():
        shutil.copytree(ROOT / "benchmarks" / "results" / folder, tmp_path / name)  # opening a store may write

    def fastest(*arguments: object) -> str:
        quality.main([*map(str, arguments)])
        return capsys.readouterr().out.splitlines()[-1]

    row = fastest(ten, ten, "--confidence", 0.975)
    assert row == "| cpu/fastest | 10 | 0.8662 | 0.2002 | 0.0025 (0.010) | 0.0094 (0.020) | quality holds |"
    row = fastest(ten, later, "--confidence", 0.975)
    assert row == "| cpu/fastest | 10 | 0.8647 | 0.1960 | 0.0032 (0.010) | 0.0071 (0.020) | quality holds |"
    assert "0.0016 (0.010) | 0.0153 (0.020) | quality holds |" in fastest(twelve, twelve)
    with pytest.raises(UserError, match="cpu/fp32 has no run with a seed of the baseline: 300, 301"):
        quality.compare(twelve, ten)
    with pytest.raises(UserError, match=r"between 0\.5 and 1"):
        quality.main([str(ten), str(ten), "--confidence", "95"])
    with pytest.raises(UserError, match=r"runs\.sqlite is not there"):
        quality.main([str(tmp_path), str(ten)])


# --- Limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in kernels.OPTIMIZERS if k != "apex_fused_adamw"])
def test_every_optimizer_is_converted_without_a_model(key: str) -> None:
    """Those of bitsandbytes are not measured on a CPU, so only this sees them before a GPU does."""
    parameter = torch.nn.Parameter(torch.randn(64, 128))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, foreach=False)
    before = parameter.detach().clone()
    kernels.convert(optimizer, key)
    optimizer.step()
    assert not torch.equal(parameter, before)
    if key == "adamw_8bit":
        assert optimizer.state[parameter]["state1"].dtype == torch.uint8


def test_what_fails_in_the_kernels_costs_the_training_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("a kernel is wrong")

    monkeypatch.setattr(gpu, "_test", lambda *_: True)
    monkeypatch.setattr(gpu.limits, "measure", fails)
    monkeypatch.setattr(gpu.peers, "measure", lambda *_, **__: print("the peers are measured"))
    assert gpu.main(["--out", str(tmp_path / "out")]) == 1
    text = capsys.readouterr()
    assert "the peers are measured" in text.out and "kernels FAILED" in text.out
    assert "ValueError: a kernel is wrong" in text.err


def test_a_kernel_that_fails_leaves_the_others_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of others have never run on a GPU here: in making, or when they are called."""

    def refuse() -> None:
        raise ValueError("no such\nlaunch")

    def fails(*_: Any) -> Iterator[kernels.Kernel]:
        yield kernels.Kernel("copy", "copy", lambda: None, bytes=8)
        yield kernels.Kernel("one", "one that refuses", refuse, bytes=8)
        yield kernels.Kernel("one", "another", lambda: None, bytes=8)
        raise TypeError("a new signature")

    monkeypatch.setattr(limits, "suite_section", lambda: "cpu")
    monkeypatch.setattr(limits, "_SECONDS", 0.0)
    for group in ("optimizers", "norms", "activations", "projections", "losses"):
        monkeypatch.setattr(kernels, group, lambda *_: iter(()))
    monkeypatch.setattr(kernels, "copies", fails)
    monkeypatch.setattr(kernels, "attention", lambda *_: iter([kernels.Kernel("last", "last", lambda: None, bytes=8)]))
    monkeypatch.setattr(limits, "matmul_peak", lambda *_: 1e9)
    with pytest.raises(RuntimeError) as failure:
        harness.run(limits, harness.new_folder("limits", tmp_path / "out"), 2, 1)
    assert str(failure.value).splitlines() == [
        "failed:",
        "copies, those that were to come: TypeError: a new signature",
        "one that refuses: ValueError: no such",
    ]
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert Counter(row["entry"] for row in rows) == {"copy": 2, "another": 2, "last": 2}
    text = capsys.readouterr()
    assert "| another |" in text.out and text.err.count("Traceback") == 2


def test_what_decides_on_a_gpu_comes_first() -> None:
    first = list(peers.ENTRIES["cuda"])[:6]
    assert first[:2] == ["ours: finetune/fp32 (TF32 off)", "ours: finetune/fastest"]
    assert sum("best" in name for name in first) == 3, "all peers at their best"


def test_changes_are_in_every_entrys_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, harness.Entry] = {}
    monkeypatch.setattr(peers, "interleaved", lambda entries, folder, **_: given.update(entries))
    monkeypatch.setattr(peers, "matmul_peak", lambda *_: 1e12)
    arguments = ["peers", "--only", "ours", "--set", "batch_size=4", "model.config.hidden_size=64"]
    run.main([*arguments, "--out", str(tmp_path)])
    for name, entry in given.items():
        recipe = load_recipe(entry.recipe, entry.overrides, check_arguments=False)
        assert (recipe.batch_size, recipe.model.config["hidden_size"]) == (4, 64), name
    assert len(given) > 3 and all("ours" in name for name in given)
    (tmp_path / "rows.jsonl").write_text('{"entry": "ours: cpu/fp32", "repetition": 0, "reason": "not run"}\n')
    assert "Every recipe with batch_size=4, model.config.hidden_size=64." in peers.table(tmp_path)
    with pytest.raises(SystemExit):
        run.main(["limits", "--set", "batch_size=4", "--out", str(tmp_path / "other")])


def test_a_part_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(gpu, "_test", lambda *_: False)
    monkeypatch.setattr(gpu.limits, "measure", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(gpu.peers, "measure", lambda *_, deadline, only: asked.append(only))
    assert gpu.main(["--parts", "training", "--first", "3", "--out", str(tmp_path)]) == 0
    assert asked == [tuple(peers.ENTRIES[suite_section()])[:3]]
    assert "no test was asked for" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "trainings", "--out", str(tmp_path)])
    assert "invalid choice: 'trainings'" in capsys.readouterr().err


def test_tests_that_failed_before_the_time_was_over_are_named() -> None:
    lines = [
        "tests/a.py::test_x[cuda-1] ",
        "[gw0] [ 10%] FAILED tests/a.py::test_x[cuda-1] ",
        "[gw1] [ 12%] PASSED tests/a.py::test_FAILED",
        "ERROR tests/b.py::test_y - RuntimeError: no",
        "ERROR tests/c.py - ImportError: no",
    ]
    found = [match.group(0) for line in lines if (match := gpu._FAILED.search(line))]
    assert found == ["FAILED tests/a.py::test_x[cuda-1]", "ERROR tests/b.py::test_y", "ERROR tests/c.py"]


def test_kernels_run_and_leave_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that stays is added to in the next call, which moves bytes that nobody counts."""
    device, left = torch.device("cpu"), []
    made = [*kernels.norms(device, 8, 64), *kernels.activations(device, 8, 64), *kernels.projections(device, 8, 64)]
    made += kernels.attention(device, 64)
    accumulate = torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda *a, **k: left.append(1) or accumulate(*a, **k))
    monkeypatch.setattr(torch.autograd, "backward", lambda *a, **k: left.append(1))
    for kernel in made:
        kernel.call()
        assert kernel.bytes or kernel.flops
    assert not left
    assert len(made) >= 10
