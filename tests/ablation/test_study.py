"""Studies of fake runs in real processes: what they survive, and what is left when they do not."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import fakes
import pytest
from rich.console import Console
from small_disk import small_disk

from composer_speedups import hardware
from composer_speedups.ablation.afterwards import Afterwards
from composer_speedups.ablation.plan import interleave
from composer_speedups.ablation.row import Row, RowRun
from composer_speedups.ablation.store import Store, StoreError
from composer_speedups.ablation.study import Settings, Study, run_study
from composer_speedups.cli import main
from composer_speedups.errors import UserError
from composer_speedups.isolation.isolate import Isolation
from composer_speedups.tasks.inputs import changed

SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[3])
import fakes
from pathlib import Path
from composer_speedups.ablation.study import Settings, Study, run_study
recipes = [fakes.Recipe(**r) for r in json.loads(sys.argv[2])]
study = Study(recipes, json.loads(sys.argv[4]), Path(sys.argv[1]))
result = run_study(study, Settings(entries=fakes.ENTRIES))
sys.exit(130 if result.interrupted else 0)
"""


def study(out: Path, recipes: list[fakes.Recipe], seeds: range | list[int] = (17,), name: str = "study", **options):
    console = Console(file=io.StringIO(), width=100)
    settings = Settings(**{"timeout": 60.0, "entries": fakes.ENTRIES} | options)
    result = run_study(Study(recipes, list(seeds), out, name), settings, console=console)
    return result, console.file.getvalue()


def start(out: Path, recipes: list[fakes.Recipe], seeds: list[int]) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    arguments = [str(out), json.dumps([vars(r) for r in recipes]), json.dumps(paths), json.dumps(seeds)]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def diary(folder: Path) -> list[str]:
    """`recipe-seed` of every run that ended well, in order of their names."""
    return sorted("-".join(path.name.split("-")[:2]) for path in folder.iterdir())


def rows(out: Path) -> dict[str, dict]:
    return {row["recipe"]: row for row in json.loads((out / "results.json").read_text())["rows"]}


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def processes(marker: str) -> list[int]:
    """Processes whose command line contains `marker`."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and marker in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory):
    """One study in which every kind of run happens."""
    out = tmp_path_factory.mktemp("everything")
    kinds = [
        "raise",
        "segfault",
        "killed",
        "memory",
        "exit",
        "vanish",
        "hang",
        "unavailable",
        "unavailable_late",
        "diverge",
        "forget",
    ]
    recipes = [fakes.Recipe("set/base"), fakes.Recipe("set/fast", published={"speedup": 1.4}), fakes.Recipe("set/slow")]
    recipes += [fakes.Recipe(f"set/{kind}", kind) for kind in kinds]
    result, text = study(out, recipes, [17, 18, 19], timeout=1.0)
    return out, result, text


def test_bad_runs_are_rows_with_reasons_and_the_others_go_on(everything):
    out, result, _ = everything
    found = {name.removeprefix("set/"): (row["status"], row["reason"]) for name, row in rows(out).items()}
    assert found.pop("killed")[0] == "failed"
    assert found == {
        "base": ("ok", ""),
        "fast": ("ok", ""),
        "slow": ("ok", ""),
        "raise": ("failed", "RuntimeError: the loss function is missing"),
        "segfault": ("failed", "crashed with SIGSEGV"),
        "memory": ("failed", "out of memory: MemoryError: 3 GiB more"),
        "exit": ("failed", "SystemExit: 3"),
        "vanish": ("failed", "ended without a result (exit code 5)"),
        "hang": ("failed", "over the time limit of 1 s"),
        "unavailable": ("skipped", "needs a thing: install it"),
        "unavailable_late": ("skipped", "needs CUDA: there is none"),
        "diverge": ("ok", ""),
        "forget": ("ok", ""),
    }
    assert not result.interrupted


@pytest.mark.parametrize("question", ["verified", "looked"])
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("raise", "RuntimeError: the loss function is missing"),
        ("memory", "MemoryError: 3 GiB more"),
        ("segfault", "crashed with SIGSEGV"),
        ("take SIGTERM as Composer does", "ended by SIGTERM"),
        ("unavailable_late", "needs CUDA: there is none"),
    ],
)
def test_what_fails_after_a_run_costs_it_nothing(tmp_path: Path, question: str, does: str, reason: str) -> None:
    """Several ranks look inside in processes of their own, as comparing does with any number."""
    options = {"verify": True} if question == "verified" else {"ranks": 2}
    study(tmp_path / "out", [fakes.Recipe("base", **{question: does}), fakes.Recipe("fast")], **options)
    base, fast = rows(tmp_path / "out").values()
    assert (base["status"], fast["status"]) == ("ok", "ok")
    if question == "verified":
        answers, why = (base["numerics"], fast["numerics"]["holds"]), "its numbers cannot be verified: "
    else:
        answers = base["memory"], fast["memory"] and fast["step_profile"]["exchange"] == 0.5
        why = "where time and memory go cannot be told: "
    assert answers == ({}, True)
    assert any(w.startswith(why) and reason in w for w in base["warnings"]), base


@pytest.mark.parametrize("question", ["verified", "looked"])
def test_what_is_stopped_after_a_run_comes_with_the_next_call(tmp_path: Path, monkeypatch, question: str) -> None:
    options = {"verify": True} if question == "verified" else {"ranks": 2}
    answer, said = ("numerics", "comparing its") if question == "verified" else ("memory", "looking where its time")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Afterwards, "_answered", interrupt)
        result, _ = study(tmp_path / "out", [fakes.Recipe("base"), fakes.Recipe("fast")], **options)
    assert result.interrupted
    base, fast = rows(tmp_path / "out").values()
    assert (base["status"], base[answer], fast["status"]) == ("ok", {}, "skipped")
    result, text = study(tmp_path / "out", [fakes.Recipe("base"), fakes.Recipe("fast")], **options)
    assert f"base: {said}" in text and "base seed 17 started" not in text
    assert all(row["status"] == "ok" and row[answer] for row in rows(tmp_path / "out").values())
    with Store(tmp_path / "out" / "runs.sqlite") as store:  # whose digests are checked when it is opened
        assert all(run.result[answer] for run in store.runs())


@pytest.mark.parametrize("question", ["verified", "looked"])
def test_what_is_asked_later_is_asked_on_the_same_machine(tmp_path: Path, monkeypatch, question: str) -> None:
    """Also of a study that is complete, where nothing else looks at the machine."""
    first, later = ({}, {"verify": True}) if question == "verified" else ({"inspect": False}, {})
    recipes, ranks = [fakes.Recipe("base"), fakes.Recipe("fast")], 1 if question == "verified" else 2
    study(tmp_path / "out", recipes, ranks=ranks, **first)
    with monkeypatch.context() as patch:
        patch.setattr(hardware, "same_machine", lambda before, now: "another CPU")
        with pytest.raises(StoreError, match="was measured on another machine or installation"):
            study(tmp_path / "out", recipes, ranks=ranks, **later)
    _, said = study(tmp_path / "out", recipes, ranks=ranks, **later)
    assert "Nothing left to run" in said and "Looking at this machine" in said
    answer = "numerics" if question == "verified" else "memory"
    assert all(row[answer] for row in rows(tmp_path / "out").values())
    _, said = study(tmp_path / "out", recipes, ranks=ranks, **later)
    assert "Looking" not in said and "looking" not in said, "all has been answered"


def test_the_log_of_a_comparison_that_fails_is_the_runs(tmp_path: Path) -> None:
    study(tmp_path / "out", [fakes.Recipe("base", verified="raise")], verify=True)
    with Store(tmp_path / "out" / "runs.sqlite") as store:
        (run,) = store.runs()
        log = store.log(run.id)
    assert log.startswith("base begins") and "RuntimeError: the loss function is missing" in log


def test_every_row_has_the_fields_that_are_explained_and_no_others(everything):
    """Whatever became of its runs: who reads `results.json` need not ask which rows have what."""
    out, result, _ = everything
    for row in [*rows(out).values(), *result.findings.rows]:
        assert row.keys() - {"interaction"} == Row.__required_keys__, row["recipe"]
        assert all(run.keys() == RowRun.__required_keys__ for run in row["runs"])


def test_verdicts(everything):
    found = rows(everything[0])
    assert found["set/fast"]["speedup"] == pytest.approx(1.5)
    verdicts = {name: (row["speed_verdict"], row["stable"]) for name, row in found.items() if row["seeds"]}
    assert verdicts == {
        "set/base": ("baseline", True),
        "set/fast": ("faster", True),
        "set/slow": ("slower", True),
        "set/diverge": ("no difference shown", False),
        "set/forget": ("no difference shown", False),
    }
    assert found["set/fast"]["seeds"] == [17, 18, 19]
    assert found["set/fast"]["mfu"] == pytest.approx(151.5e6 / 1e9)
    assert found["set/fast"]["intervals"]["samples_per_second"] == pytest.approx([150.0, 153.0])


def test_every_output_is_there_and_strict(everything):
    out, _, text = everything
    names = {"runs.sqlite", "results.json", "table.md", "table.csv", "table.tex", "report.html", "plots"}
    assert {path.name for path in out.iterdir()} == names, "one file each, no journal or temporary file left"
    plots = {path.name for path in (out / "plots").iterdir()}
    assert {"speedups.svg", "speedups.png", "speed_memory.svg", "loss_steps.svg", "loss_seconds.png"} <= plots

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((out / "results.json").read_text(), parse_constant=refuse)
    page = (out / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", ""), "the page must not reach for the network"
    for name in rows(out):
        assert name in page and name in (out / "table.md").read_text() and name in (out / "table.csv").read_text()
    assert max(map(len, text.splitlines())) <= 100


def test_the_log_of_a_run_is_kept(everything):
    with Store(everything[0] / "runs.sqlite", create=False) as store:
        logs = {run.recipe: store.log(run.id) for run in store.runs() if run.seed == 17}
    assert "set/base begins" in logs["set/base"]
    assert "RuntimeError: the loss function is missing" in logs["set/raise"]
    assert "Segmentation fault" in logs["set/segfault"]
    assert "time.sleep" in logs["set/hang"] or "in act" in logs["set/hang"], "a stopped run says where it was"


def test_no_process_is_left(everything):
    assert not set(processes("composer_speedups.isolation.worker")) & set(_children(os.getpid()))


def test_the_same_command_repeats_nothing(tmp_path: Path):
    (tmp_path / "diary").mkdir()
    recipes = [fakes.Recipe(n, diary=str(tmp_path / "diary")) for n in ("base", "fast")]
    study(tmp_path / "out", recipes, [1, 2])
    before = (tmp_path / "out" / "table.md").read_text()
    _, text = study(tmp_path / "out", recipes, [1, 2])
    assert diary(tmp_path / "diary") == ["base-1", "base-2", "fast-1", "fast-2"]
    assert (tmp_path / "out" / "table.md").read_text() == before
    assert "Nothing left to run" in text
    study(tmp_path / "out", recipes, [1, 2, 3])  # more seeds go on top
    assert diary(tmp_path / "diary") == ["base-1", "base-2", "base-3", "fast-1", "fast-2", "fast-3"]


def test_fewer_seeds_make_fewer_runs(tmp_path: Path):
    """What an earlier command planned for other seeds waits for a command that asks for it."""
    (tmp_path / "diary").mkdir()
    recipes = [fakes.Recipe(n, diary=str(tmp_path / "diary")) for n in ("base", "fast")]
    recipes.append(fakes.Recipe("bad", "raise"))
    with Store(tmp_path / "out" / "runs.sqlite") as store:  # five seeds, stopped before the first run
        store.begin({"name": "study", "baseline": "base"}, [(r.name, r.to_dict()) for r in recipes])
        store.plan(interleave([r.name for r in recipes], [1, 2, 3, 4, 5]))
    result, text = study(tmp_path / "out", recipes, [1, 2])
    assert diary(tmp_path / "diary") == ["base-1", "base-2", "fast-1", "fast-2"]
    assert "2 seeds" in text and "To run: 6 runs" in text and "9 runs of other seeds" in text and "[6/6]" in text
    assert [row["seeds"] for row in result.findings.rows] == [[1, 2], [1, 2], []]
    _, text = study(tmp_path / "out", recipes, [1, 2])
    assert "Nothing left to run" in text and "9 runs of other seeds" in text
    study(tmp_path / "out", recipes, [1, 2, 3])
    assert diary(tmp_path / "diary") == ["base-1", "base-2", "base-3", "fast-1", "fast-2", "fast-3"]
    result, _ = study(tmp_path / "out", recipes, [1], retry=True)
    ended = {run.seed: run.attempts for run in result.findings.runs if run.recipe == "bad" and run.status == "failed"}
    assert ended == {1: 2, 2: 1, 3: 1}, "only what was asked for is made again, and the others keep their results"


@pytest.mark.parametrize(
    ("kills", "seeds"), [pytest.param(8, 2, marks=pytest.mark.elsewhere), pytest.param(50, 15, marks=pytest.mark.slow)]
)
def test_killed_at_random_moments_nothing_is_lost_or_repeated(tmp_path: Path, kills: int, seeds: int):
    (tmp_path / "diary").mkdir()
    recipes = [fakes.Recipe(n, seconds=0.2, diary=str(tmp_path / "diary")) for n in ("base", "fast", "slow")]
    seeds = list(range(1, seeds + 1))
    rng = random.Random(5)
    kept: dict[tuple[str, int], tuple[int, float | None]] = {}
    for _ in range(kills):
        process = start(tmp_path / "out", recipes, seeds)
        time.sleep(rng.uniform(0.3, 2.5))
        process.kill()
        process.communicate()
        if not (tmp_path / "out" / "runs.sqlite").exists():
            continue
        with Store(tmp_path / "out" / "runs.sqlite") as store:
            now = {(r.recipe, r.seed): (r.attempts, r.started) for r in store.runs() if r.status == "ok"}
        assert kept.items() <= now.items(), "a finished run was lost, or made again"
        kept = now
    wait_for(lambda: not processes(str(tmp_path)), 10)
    result, _ = study(tmp_path / "out", recipes, seeds)
    assert {(r.recipe, r.seed) for r in result.findings.runs if r.status == "ok"} == {
        (recipe.name, seed) for recipe in recipes for seed in seeds
    }
    assert len(result.findings.runs) == 3 * len(seeds)
    made = {(r.recipe, r.seed): (r.attempts, r.started) for r in result.findings.runs}
    assert kept.items() <= made.items(), "a finished run was made again"
    whole, _ = study(tmp_path / "whole", recipes, seeds)
    drop = {"warmup_steps"}
    for one, other in zip(result.findings.rows, whole.findings.rows, strict=True):
        assert {k: v for k, v in one.items() if k not in drop} == {k: v for k, v in other.items() if k not in drop}


def test_a_killed_study_takes_its_run_with_it(tmp_path: Path):
    process = start(tmp_path / "out", [fakes.Recipe("base", "hang")], [1])
    wait_for(lambda: (tmp_path / "out" / "runs.sqlite").exists() and _running(tmp_path / "out"))
    group = _children(process.pid)
    assert len(group) >= 2, "a server and a run"
    process.kill()
    process.communicate()
    wait_for(lambda: not any(_alive(pid) for pid in group), 10)


def test_two_at_once_share_the_work(tmp_path: Path):
    (tmp_path / "diary").mkdir()
    recipes = [fakes.Recipe(n, seconds=0.3, diary=str(tmp_path / "diary")) for n in ("base", "fast", "slow")]
    both = [start(tmp_path / "out", recipes, [1, 2, 3]) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert diary(tmp_path / "diary") == sorted(f"{r.name}-{s}" for r in recipes for s in (1, 2, 3)), "once each"
    assert all(" ok " in output for output in outputs), "both have worked"
    assert any("Another process of this machine makes runs of this study" in output for output in outputs)
    assert all(len(row["seeds"]) == 3 for row in rows(tmp_path / "out").values())


@pytest.mark.elsewhere
def test_a_run_that_was_taken_over_meanwhile_is_not_told_as_a_result(tmp_path: Path):
    """A laptop that slept: when it wakes, another process has made the run, and that result is the one kept."""
    recipes = [fakes.Recipe("base", seconds=2.0)]
    asleep = start(tmp_path / "out", recipes, [1])
    wait_for(lambda: (tmp_path / "out" / "runs.sqlite").exists() and _running(tmp_path / "out"))
    asleep.send_signal(signal.SIGSTOP)
    with closing(sqlite3.connect(tmp_path / "out" / "runs.sqlite")) as db, db:
        db.execute("UPDATE runs SET claimed_until = 1")
    _, text = study(tmp_path / "out", recipes, [1])
    asleep.send_signal(signal.SIGCONT)
    output = asleep.communicate(timeout=60)[0]
    assert " ok " in text and "not counted" not in text
    assert "not counted  another process took it over" in output and " ok " not in output
    assert asleep.returncode == 0
    assert rows(tmp_path / "out")["base"]["seeds"] == [1]


def test_ctrl_c_writes_what_is_done(tmp_path: Path):
    recipes = [fakes.Recipe("base"), fakes.Recipe("hang", "hang")]
    process = start(tmp_path / "out", recipes, [1])
    wait_for(lambda: (tmp_path / "out" / "results.json").exists() and _running(tmp_path / "out", "hang"))
    group = _children(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    found = rows(tmp_path / "out")
    assert found["base"]["status"] == "ok" and found["hang"]["status"] == "skipped"
    assert not any(_alive(pid) for pid in group)


def test_a_run_that_was_stopped_can_be_skipped(tmp_path: Path):
    """It has left a log, which must not stay behind: the store would take itself for damaged."""
    with Store(tmp_path / "runs.sqlite") as store:
        recipe = fakes.Recipe("base")
        store.begin({"name": "x", "baseline": "base", "command": "", "created": 0.0}, [("base", recipe.to_dict())])
        store.plan(interleave(["base"], [1]))
        run = store.claim()
        assert run is not None and store.finish(run, "interrupted", "stopped by a signal", None, "where it was")
        store.skip("base", "needs a thing")
    with Store(tmp_path / "runs.sqlite", create=False) as store:
        assert [(run.status, run.reason) for run in store.runs()] == [("skipped", "needs a thing")]


def test_another_study_is_refused(tmp_path: Path):
    study(tmp_path, [fakes.Recipe("base")])
    content = (tmp_path / "runs.sqlite").read_bytes()
    with pytest.raises(StoreError, match=r"base has batch_size 8, not 16\. Choose another --out"):
        study(tmp_path, [fakes.Recipe("base", batch_size=16)])
    with pytest.raises(StoreError, match="another study: it lacks fast"):
        study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast")])
    assert (tmp_path / "runs.sqlite").read_bytes() == content


def test_a_study_whose_data_changed_is_another_study(tmp_path: Path):
    """The path in the recipe is the same; what is there is not, and medians over both would mean nothing."""
    data, folder, out = tmp_path / "mine.csv", tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    data.write_text("text,label\none,a\n")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1")
    made = {"task": {"path": str(data)}, "model": {"name": str(folder)}}
    recipes = [fakes.Recipe("base", **made), fakes.Recipe("fast", **made)]
    study(out, recipes, [1])
    os.utime(data, (1, 1))  # the same, fetched anew
    result, _ = study(out, recipes, [1, 2])
    assert [run.status for run in result.findings.runs] == ["ok"] * 4
    content = (out / "runs.sqlite").read_bytes()
    for file, other in ((data, b"text,label\ntwo,a\n"), (folder / "model.safetensors", b"2")):
        before = file.read_bytes()
        file.write_bytes(other)
        path = file if file == data else folder
        with pytest.raises(StoreError, match=rf"holds another study: {path} has changed.*Choose another --out"):
            study(out, recipes, [1, 2, 3])
        file.write_bytes(before)
    assert (out / "runs.sqlite").read_bytes() == content
    data.unlink()  # no run can mix anything with it, and a run will say that it is not there
    assert "Nothing left to run" in study(out, recipes, [1, 2])[1]


def test_a_study_from_before_inputs_were_kept_goes_on(tmp_path: Path):
    (tmp_path / "mine.csv").write_text("text,label\none,a\n")
    recipes = [fakes.Recipe("base", task={"path": str(tmp_path / "mine.csv")})]
    with Store(tmp_path / "out" / "runs.sqlite") as store:
        store.begin({"name": "study", "baseline": "base"}, [(r.name, r.to_dict()) for r in recipes])
        assert store.inputs() == {}
    assert study(tmp_path / "out", recipes, [1])[0].findings.rows[0]["seeds"] == [1]
    (tmp_path / "mine.csv").write_text("text,label\ntwo,a\n")
    with pytest.raises(StoreError, match=r"mine\.csv has changed since it began"):
        study(tmp_path / "out", recipes, [1, 2])


def test_each_run_is_told_what_its_data_was(tmp_path: Path):
    asked = []

    class Watched(Isolation):
        def run(self, payload, **options):
            asked.append(payload)
            return super().run(payload, **options)

    for name in ("one", "two"):
        (tmp_path / f"{name}.csv").write_text(name)
    recipes = [fakes.Recipe(name, task={"path": str(tmp_path / f"{name}.csv")}) for name in ("one", "two")]
    with Watched(fakes.ENTRIES.train, fakes.ENTRIES.preload) as isolation:
        run_study(Study(recipes, [1], tmp_path / "out"), Settings(entries=fakes.ENTRIES), isolation=isolation)
    told = {p["recipe"]["name"]: p["inputs"] for p in asked if "seed" in p}
    assert {name: list(inputs) for name, inputs in told.items()} == {r.name: [r.task["path"]] for r in recipes}
    assert changed(told["one"]) is None
    (tmp_path / "one.csv").write_text("two")
    assert changed(told["one"]) == str(tmp_path / "one.csv") and changed(told["two"]) is None


@pytest.mark.parametrize("damage", ["text", "truncated", "overwritten", "edited", "foreign", "directory"])
def test_a_damaged_store_is_refused_and_left_alone(tmp_path: Path, damage: str):
    path = tmp_path / "runs.sqlite"
    if damage == "foreign":
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE mine (x)")
    elif damage == "directory":
        path.mkdir()
    else:
        study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast")])
        data = bytearray(path.read_bytes())
        if damage == "text":
            data = bytearray(b"not a database" * 100)
        elif damage == "truncated":
            data = data[: len(data) // 2]
        elif damage == "overwritten":
            data[8192:20480] = os.urandom(12288)
        elif damage == "edited":
            at = data.index(b'"samples_per_second": 102')
            data[at + 22] = ord("9")
        path.write_bytes(data)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=r"[Cc]hoose another (--out|folder)"):
        study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast")])
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("table", ["study", "recipes", "environments"])
def test_a_flipped_bit_beside_the_runs_is_seen(tmp_path: Path, table: str):
    path = tmp_path / "runs.sqlite"
    study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast")])
    column = {"study": "value", "recipes": "resolved", "environments": "facts"}[table]
    with sqlite3.connect(path) as db:
        text = db.execute(f"SELECT {column} FROM {table} ORDER BY length({column}) DESC").fetchone()[0].encode()
    whole = path.read_bytes()
    start = whole.index(text)
    for at in range(start, start + len(text), max(1, len(text) // 8)):
        data = bytearray(whole)
        data[at] ^= 1 if at % 2 else 0x80  # the second makes it no text
        path.write_bytes(data)
        with pytest.raises(StoreError, match="is damaged"):
            Store(path, create=False)
    path.write_bytes(whole)
    Store(path, create=False).close()


def test_a_study_of_an_earlier_version_is_read(tmp_path: Path):
    """It has no digest of what is beside the runs."""
    study(tmp_path, [fakes.Recipe("base")])
    with sqlite3.connect(tmp_path / "runs.sqlite") as db:
        db.execute("DELETE FROM study WHERE key = 'digest'")
    with Store(tmp_path / "runs.sqlite") as store:
        assert "digest" not in store.study() and len(store.runs()) == 1
        store.note(more=1)
    with sqlite3.connect(tmp_path / "runs.sqlite") as db:
        assert db.execute("SELECT count(*) FROM study WHERE key = 'digest'").fetchone() == (1,)
        # An earlier version, at the same study, writes without the digest, and reads every value as JSON.
        assert [json.loads(value) for (value,) in db.execute("SELECT value FROM study")]
        db.execute("INSERT OR REPLACE INTO study VALUES ('command', '\"of the earlier version\"')")
        db.execute("INSERT OR IGNORE INTO environments (facts) VALUES ('{}')")
    with Store(tmp_path / "runs.sqlite") as store:
        assert store.study()["command"] == "of the earlier version" and len(store.environments()) == 2


@pytest.mark.parametrize(
    "column", ["position INTEGER NOT NULL, resolved", "name TEXT PRIMARY KEY, position", "facts TEXT"]
)
def test_a_damaged_column_of_an_earlier_version_is_seen(tmp_path: Path, column: str):
    """No digest tells of it, and SQLite's own check knows no names: it must not be missed in the middle of a study."""
    path = tmp_path / "runs.sqlite"
    study(tmp_path, [fakes.Recipe("base")])
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DELETE FROM study WHERE key = 'digest'")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    data = path.read_bytes()
    assert data.count(column.encode()) == 1
    path.write_bytes(data.replace(column.encode(), b"x" + column.encode()[1:]))
    with pytest.raises(StoreError, match=r"cannot open|is damaged"):
        Store(path, create=False)


def spoil(path: Path, *changes: str, result: dict | None = None) -> None:
    """Change a study so that no digest tells of it."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("DELETE FROM study WHERE key = 'digest'")
        for change in changes:
            db.execute(change)
        if result is not None:
            number, text = db.execute("SELECT id, result FROM runs WHERE status = 'ok' ORDER BY id DESC").fetchone()
            text = json.dumps(json.loads(text) | result)
            db.execute("UPDATE runs SET result = ?, digest = NULL WHERE id = ?", (text, number))
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.mark.elsewhere  # SQLite is the same with each
@pytest.mark.parametrize(
    ("changes", "result", "says"),
    [
        (["DELETE FROM recipes WHERE name = 'fast'"], None, "its runs refer to recipes that are not there"),
        (["DELETE FROM runs WHERE recipe = 'fast'"], None, "its (steps|logs) refer to runs that are not there"),
        (["DELETE FROM study"], None, "its baseline is none of its recipes"),
        (["UPDATE study SET value = '\"slow\"' WHERE key = 'baseline'"], None, "its baseline is none of its recipes"),
        (["UPDATE study SET value = '[\"base\"]' WHERE key = 'baseline'"], None, "its baseline is none of its recipes"),
        (["INSERT OR REPLACE INTO study VALUES ('peaks', '3')"], None, "its peaks is '3'"),
        (["UPDATE recipes SET resolved = '[]' WHERE name = 'fast'"], None, r"recipe fast is '\[\]'"),
        (["UPDATE runs SET result = '[]', digest = NULL"], None, "the result of base, seed 1, is none"),
        ([], {"samples_per_second": "quick"}, "samples_per_second of fast, seed 1, is 'quick'"),
        ([], {"samples_per_second": {"median": 1.0}}, "samples_per_second of fast, seed 1, is"),
        ([], {"samples_per_second": math.inf}, "samples_per_second of fast, seed 1, is 'inf'"),
        ([], {"peak_memory_bytes": 10**400}, "peak_memory_bytes of fast, seed 1, is '1000"),
        ([], {"step_samples": [8, "8"]}, "step_samples of fast, seed 1, is"),
        ([], {"warnings": 3}, "warnings of fast, seed 1, is '3'"),
    ],
)
def test_what_is_not_of_the_shape_that_is_read_is_refused_in_one_line(
    tmp_path: Path, changes: list[str], result: dict | None, says: str, capsys: pytest.CaptureFixture[str]
):
    """As in a study without a digest, or of a later version."""
    path = tmp_path / "runs.sqlite"
    study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast")], [1])
    spoil(path, *changes, result=result)
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    for command in (["report", str(tmp_path), "--no-write"], ["report", str(tmp_path)]):
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert re.search(rf"runs\.sqlite is damaged, or of another version \({says}.*It was left as it is", error)
        assert error.count("\n") == 1
        assert {p: p.read_bytes() for p in before} == before
        if "--no-write" in command:
            assert {p for p in tmp_path.iterdir() if p.is_file()} == set(before)


def test_what_a_later_version_adds_is_passed_over(tmp_path: Path):
    path = tmp_path / "runs.sqlite"
    study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast")], [1])
    spoil(path, result={"a_new_thing": {"x": ["y"]}, "final_loss": None})
    with Store(path, create=False) as store:
        assert "a_new_thing" in store.runs()[-1].result


def test_a_study_whose_marks_say_more_goes_on(tmp_path: Path):
    (tmp_path / "mine.csv").write_text("text,label\none,a\n")
    out, recipes = tmp_path / "out", [fakes.Recipe("base", task={"path": str(tmp_path / "mine.csv")})]
    study(out, recipes, [1])
    with Store(out / "runs.sqlite", create=False) as store:
        marks = {path: vars(mark) | {"size": 3} for path, mark in store.inputs().items()}
        store.note(inputs=marks)
    assert marks and study(out, recipes, [1, 2])[0].findings.rows[0]["seeds"] == [1, 2]
    (tmp_path / "mine.csv").write_text("text,label\ntwo,a\n")
    with pytest.raises(StoreError, match=r"mine\.csv has changed since it began"):
        study(out, recipes, [1, 2])


@pytest.mark.elsewhere
def test_a_run_that_ended_in_a_later_versions_words_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipes = [fakes.Recipe("base"), fakes.Recipe("fast")]
    study(tmp_path, recipes, [1, 2])
    change = "UPDATE runs SET status = 'evicted', reason = 'too hot', digest = NULL WHERE recipe = 'fast' AND seed = 2"
    spoil(tmp_path / "runs.sqlite", change)
    result, text = study(tmp_path, recipes, [1, 2], until=time.monotonic() + 20)
    assert "Nothing left to run" in text and [run.status for run in result.findings.runs].count("ok") == 3
    result, text = study(tmp_path, recipes, [1, 2, 3], until=time.monotonic() + 60)
    assert "To run: 2 runs" in text and "4 runs are finished already" in text
    assert [run.status for run in result.findings.runs].count("ok") == 5
    assert rows(tmp_path)["fast"]["seeds"] == [1, 3]
    assert main(["report", str(tmp_path)]) == 0 and "too hot" in capsys.readouterr().out


def test_outputs_that_cannot_be_written_cost_no_run(tmp_path: Path):
    """As on a disk that is full, or with a file that another user owns: here a folder is in the table's place."""
    (tmp_path / "table.csv").mkdir(parents=True)
    recipes = [fakes.Recipe("base"), fakes.Recipe("fast")]
    with pytest.raises(UserError, match=r"cannot write into .*All runs are in its runs\.sqlite"):
        study(tmp_path, recipes, [1, 2])
    (tmp_path / "table.csv").rmdir()
    result, text = study(tmp_path, recipes, [1, 2])
    assert "Nothing left to run" in text and len(result.findings.runs) == 4 and (tmp_path / "table.csv").is_file()


def test_a_full_disk_is_told_in_one_line(tmp_path: Path):
    with small_disk(tmp_path / "disk", "256k") as disk, Store(disk / "runs.sqlite") as store:
        store.begin({"name": "x", "baseline": "base", "created": 0}, [("base", {})])
        store.plan(interleave(["base"], [1]))
        run = store.claim()
        assert run is not None
        with pytest.raises(StoreError, match=r"cannot write .*full.*run the same command"):
            store.finish(run, "ok", "", {"samples_per_second": 1.0}, "a long log " * 100_000)
        assert store.finish(run, "ok", "", {"samples_per_second": 1.0}, "a short one")


def test_a_disk_that_was_full_before_is_told_too(tmp_path: Path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "something").write_bytes(b"x" * 2**16)
        with pytest.raises(StoreError, match=r"cannot open .*runs\.sqlite: the disk is full\. Choose another folder"):
            Store(disk / "runs.sqlite")


def test_a_study_is_not_gone_on_with_on_another_machine(tmp_path: Path):
    study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast")], [1])
    with Store(tmp_path / "runs.sqlite") as store:
        facts = next(iter(store.environments().values()))
    with sqlite3.connect(tmp_path / "runs.sqlite") as db:  # as if the study had been begun with sixteen threads
        db.execute("UPDATE environments SET facts = ?", (json.dumps(facts | {"threads": 16}),))
        db.execute("DELETE FROM study WHERE key = 'digest'")
    with pytest.raises(StoreError, match=r"another machine .*\(threads 16 there, 1 here\).*Choose another"):
        study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast")], [1, 2])
    with Store(tmp_path / "runs.sqlite") as store:
        assert [run.status for run in store.runs()].count("ok") == 2, "what was measured is kept"


def test_a_wrong_recipe_is_told_before_anything_runs(tmp_path: Path):
    with pytest.raises(UserError, match=r"fast\.yaml:3: unknown speed-up"):
        study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("fast", "wrong")])
    assert not (tmp_path / "results.json").exists()


def test_it_says_what_it_will_do(tmp_path: Path):
    _, text = study(tmp_path, [fakes.Recipe("base"), fakes.Recipe("none", "unavailable")], [1, 2], name="mine")
    head = text[: text.index("started")]
    assert "mine: 2 recipes, 2 seeds" in head
    assert "skipped none: needs a thing: install it" in head
    assert "To run: 2 runs, about" in head


def _running(out: Path, recipe: str = "") -> bool:
    try:
        with sqlite3.connect(f"file:{out / 'runs.sqlite'}?mode=ro", uri=True) as db:
            query = "SELECT count(*) FROM runs WHERE status = 'running' AND recipe LIKE ?"
            return bool(db.execute(query, (f"%{recipe}",)).fetchone()[0]) and time.sleep(0.5) is None
    except sqlite3.Error:
        return False


def _children(pid: int) -> list[int]:
    direct = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return direct + [grandchild for child in direct for grandchild in _children(child)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
