"""The page, the tables and the pictures of a study, made of fake runs in this process; the page in a real browser."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import fakes
import pytest
from rich.console import Console
from study_row import study_row

from composer_speedups.ablation.charts import _bars, charts, shares
from composer_speedups.ablation.compare import compare, comparison_table, differences
from composer_speedups.ablation.output import Findings, replace, write_all
from composer_speedups.ablation.plan import interleave
from composer_speedups.ablation.store import Store
from composer_speedups.ablation.tables import latex_table
from composer_speedups.ablation.terminal import terminal_table
from composer_speedups.ablation.words import notes, sentence
from composer_speedups.cli import main

HOSTILE = "set/</script><img src=x onerror=alert(1)>&@TABLE@"
SEEN = ("base", "fast", "slow", "compiled", "forget")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def make(folder: Path, seeds: int = 3, speed: float = 1.0, **changes: dict[str, Any]) -> Findings:
    """A study of fake runs; `changes` go into the results of a recipe."""
    recipes = {n: fakes.Recipe(f"set/{n}").to_dict() for n in ("base", "fast", "slow", "compiled", "forget", "none")}
    recipes["forget"]["does"] = "forget"
    recipes["fast"]["published"] = {"samples_per_second": 270.0, "speedup": 1.4, "wallclock_seconds": 107.0}
    recipes["compiled"]["speedups"] = {"torch_compile": {"scope": "block"}, "fused_adamw": {}}
    recipes["fast"]["speedups"] = {"fused_adamw": {}}
    named = {r["name"]: r for r in recipes.values()} | {HOSTILE: fakes.Recipe(HOSTILE).to_dict()}
    with Store(folder / "runs.sqlite") as store:
        study = {
            "name": "<b>mine</b>",
            "baseline": "set/base",
            "command": "composer-speedups ablate 'a<b'",
            "created": 0,
        }
        store.begin(study, list(named.items()))
        environment = store.add_environment(fakes.survey({"recipes": [], "peaks": {}}, print)["environment"])
        store.plan(interleave(list(named), range(seeds)))
        store.skip("set/none", "needs a thing: install it")
        while run := store.claim(environment):
            result = fakes.train({"recipe": named[run.recipe], "seed": run.seed}, lambda _: None)
            result |= changes.get(run.recipe.removeprefix("set/"), {})
            if run.recipe == "set/compiled":
                result |= {"samples_per_second": 160.0 + run.seed, "compile_seconds": 12.0}
            result["samples_per_second"] *= speed
            store.finish(run, "ok", "", result, "")
        return write_all(store, folder)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Findings]:
    folder = tmp_path_factory.mktemp("study")
    idle = {"evidence": {"fused_adamw": {"changed": 0}}, "warnings": ["NoEffectWarning: FusedAdamW() changed nothing"]}
    return folder, make(folder, slow=idle)


def browse(folder: Path, page: str, script: str, width: int) -> dict[str, Any]:
    """What `script` finds in `page`, shown in a frame of `width` pixels of a real browser, and the errors there."""
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    watch = "<script>window.bad = []; addEventListener('error', (e) => bad.push(String(e.message)), true);</script>"
    inner = html.escape(page.replace("<head>", "<head>" + watch, 1))
    frame = f"""<!doctype html><body style="margin:0">
    <iframe srcdoc="{inner}" style="width:{width}px;height:900px;border:0"></iframe><pre id="answer"></pre>
    <script>const frame = document.querySelector("iframe"); frame.addEventListener("load", () => {{
      const d = frame.contentDocument, w = frame.contentWindow;
      const answer = (() => {{ {script} }})();
      document.querySelector("#answer").textContent = JSON.stringify({{...answer, errors: w.bad}});
    }});</script>"""
    (folder / "frame.html").write_text(frame)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command += ["--disable-background-networking", f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"]
    command += ["--virtual-time-budget=3000", "--dump-dom", f"file://{folder / 'frame.html'}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="answer">(.*?)</pre>', dom, re.DOTALL)
    assert found and found[1], "the page did not load"
    return json.loads(html.unescape(found[1]))


def test_two_seeds_are_shown_and_not_judged(tmp_path: Path):
    """Of two values there are the lowest and the highest; an interval and a claim would say nothing."""
    found = make(tmp_path, seeds=2)
    fast = next(row for row in found.rows if row["recipe"] == "set/fast")
    assert (fast["speedup"], fast["speedup_interval"], fast["speed_verdict"]) == (1.5, None, "not judged")
    assert "medians over seeds [lowest, highest]" in " ".join(found.conditions)
    assert found.sentence.startswith("Too few seeds to judge: set/compiled measured highest, ")
    assert "all but the baseline: speed not judged: two seeds tell too little about the spread" in "\n".join(
        notes(found.rows)
    )
    table = (tmp_path / "table.md").read_text()
    assert "150.8 [150.0, 151.5]" in table and "| 1.50x |" in table
    console = Console(file=io.StringIO(), width=200)
    console.print(terminal_table(found.rows, 200))
    page = (tmp_path / "report.html").read_text()
    for text in (console.file.getvalue(), table, (tmp_path / "table.tex").read_text(), page):
        assert not re.search(r"1\.50x \(|\d\.\d\d to \d", text)
    assert "99 %" not in console.file.getvalue() and "Lines are" not in page
    with (tmp_path / "table.csv").open(newline="") as file:
        assert {(line["speedup_low"], line["speedup_high"]) for line in csv.DictReader(file)} == {("", "")}


def test_the_page_in_a_browser(study: tuple[Path, Findings], tmp_path: Path):
    folder, found = study
    script = """
      const names = () => [...d.querySelectorAll("tbody tr")].map((row) => row.dataset.recipe);
      const heads = [...d.querySelectorAll("th button")], by = (text) => heads.find((h) => h.textContent === text);
      const before = names(); by("Speed-up").click(); const falling = names(); by("Speed-up").click();
      return {before, falling, rising: names(), wide: d.documentElement.scrollWidth,
        drawings: [...d.querySelectorAll("figure svg")].filter((s) => s.getBoundingClientRect().height > 100).length,
        verdict: d.querySelector(".verdict").textContent, images: d.images.length,
        loaded: w.performance.getEntriesByType("resource").length};"""
    answer = browse(tmp_path, (folder / "report.html").read_text(), script, 1280)
    assert answer["errors"] == [] and answer["loaded"] == 0 and answer["images"] == 0
    assert answer["before"] == [row["recipe"] for row in found.rows], "every row, in order"
    assert answer["falling"][:2] == ["set/compiled", "set/fast"] and answer["falling"][-1] == "set/none"
    assert answer["rising"][0] == "set/slow" and answer["rising"][-1] == "set/none", "no number goes last both ways"
    assert answer["drawings"] == 8
    assert answer["verdict"] == found.sentence
    assert answer["wide"] <= 1280


def test_no_sideways_scrolling_on_a_phone(study: tuple[Path, Findings], tmp_path: Path):
    script = """
      const box = d.querySelector(".scroll");
      return {wide: d.documentElement.scrollWidth, table: box.scrollWidth, box: box.clientWidth,
        smallest: Math.min(...[...d.querySelectorAll("p, li, td, dd")].map((e) => parseFloat(
          w.getComputedStyle(e).fontSize)))};"""
    answer = browse(tmp_path, (study[0] / "report.html").read_text(), script, 390)
    assert answer["wide"] == 390 and answer["errors"] == []
    assert answer["box"] < answer["table"], "the table scrolls inside its own box"
    assert answer["smallest"] >= 12


def test_the_page_holds_hostile_names_as_text(study: tuple[Path, Findings]):
    page = (study[0] / "report.html").read_text()
    assert "<img" not in page and "<b>mine" not in page
    assert page.count("<script>") == 1 and page.count("<table>") == 1
    assert "http:" not in page and "https:" not in page and "//" not in re.sub(r"//  what has no.*", "", page)[:200]


def test_a_switch_that_did_nothing_is_marked(study: tuple[Path, Findings]):
    folder, found = study
    row = next(row for row in found.rows if row["recipe"] == "set/slow")
    assert row["no_effect"] == ["fused_adamw"]
    assert any("fused_adamw changed nothing" in note for note in notes(found.rows))
    assert "slow *" in (folder / "report.html").read_text() and "changed nothing" in (folder / "table.md").read_text()
    assert all(not row["no_effect"] for row in found.rows if row["recipe"] != "set/slow")


def test_break_even_of_compile(study: tuple[Path, Findings]):
    row = next(row for row in study[1].rows if row["recipe"] == "set/compiled")
    # Against `fast`, the same recipe without compile: 12 s / (1/151.5 - 1/161) = 30,810 samples = 3,852 batches of 8.
    assert row["break_even_against"] == "set/fast"
    assert row["break_even_steps"] == 3852 and row["break_even_samples"] == 3852 * 8
    assert any("paid for after 3,852 steps (30,816 samples) against fast" in note for note in notes(study[1].rows))


def test_pictures_are_files_of_both_kinds(study: tuple[Path, Findings]):
    folder, found = study
    for name in charts(found.rows, found.runs):
        ET.parse(folder / "plots" / f"{name}.svg")
        data = (folder / "plots" / f"{name}.png").read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 2000
    bars = (folder / "plots" / "speedups.svg").read_text()
    assert bars.count("<rect") == 1 + 6 and "published: 1.4x" in bars and "no namespace" not in bars


def bar(name: str, memory: float = 1e9, speed: float = 10.0) -> dict[str, Any]:
    return judged(name, speed / 10, "faster") | {"samples_per_second": speed, "peak_memory_bytes": memory}


@pytest.mark.parametrize("letters", range(1, 26))
def test_a_name_for_which_there_is_room_is_whole(letters: int):
    name = "n" * letters
    assert f">{name}</text>" in charts([bar("m"), bar(name)], [])["speedups"].svg()


def test_the_caption_speaks_of_a_dashed_line_only_where_there_is_one(study: tuple[Path, Findings]):
    one, other = bar("one"), bar("other", memory=2e9, speed=9.0)
    assert not charts([one, other], [])["speed_memory"].dashed, "one is better in both"
    assert charts([one, other | {"samples_per_second": 11.0}], [])["speed_memory"].dashed
    page = (study[0] / "report.html").read_text()
    assert ("dashed line joins" in page) == charts(study[1].rows, study[1].runs)["speed_memory"].dashed


def test_where_time_and_memory_go(study: tuple[Path, Findings]):
    folder, found = study
    row = found.rows[1]
    assert row["recipe"] == "set/fast" and sum(shares(row).values()) == pytest.approx(1)
    picture = (folder / "plots" / "step_time.svg").read_text()
    # A bar is as long as a sample takes: 1 / 151.5 s; what no rule knows is told by its name.
    assert "6.6 ms" in picture and "set/fast: matmul 40.0%" in picture
    assert "other 10.0%: mine::stencil 8 ms a step" in picture
    boxes = [float(width) for width in re.findall(r'width="([\d.]+)"[^>]*><title>set/fast: ', picture)]
    slow = [float(width) for width in re.findall(r'width="([\d.]+)"[^>]*><title>set/slow: ', picture)]
    assert sum(slow) / sum(boxes) == pytest.approx(151.5 / 80.8, rel=0.05)
    memory = (folder / "plots" / "memory.svg").read_text()
    assert "activations 90.0 MB, measured" in memory and "activations 91.0 MB, predicted" in memory
    assert ">170 MB<" in memory
    page = (folder / "report.html").read_text()
    assert "matmul 40.0%, attention 20.0%" in page and "activations 90.0 MB (predicted 91.0)" in page
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert rows[0]["step_profile"]["loop"] == 0.02 and rows[0]["memory_predicted"]["peak"] == 150_000_000


def test_small_parts_go_with_other():
    row = study_row("a", samples_per_second=10.0, step_profile={"matmul": 0.996, "data": 0.004})
    picture = charts([row], [])["step_time"].svg()
    assert "other 0.4%" in picture and "data" not in picture


def test_what_only_several_ranks_have(tmp_path: Path):
    several = fakes.INSIDE["memory"] | {"buckets": 20_000_000}
    profile = fakes.INSIDE["step_profile"] | {"exchange": 0.1}
    make(tmp_path, fast={"memory": several, "step_profile": profile})
    page = (tmp_path / "report.html").read_text()
    assert "buckets 20.0 MB (predicted 0.0)" in page and page.count("buckets 20.0 MB") == 2, "of one row, once each"
    assert "exchange 50.0%" in page and ">exchange</text>" in page
    alone = make(tmp_path / "alone")
    assert "buckets" not in charts(alone.rows, alone.runs)["memory"].svg()


def test_a_row_that_computes_something_else_is_not_recommended(tmp_path: Path):
    wrong = "encoder.weight, step 4 in float32: 8.1 times the error that is allowed"
    found = make(tmp_path, fast={"numerics": fakes.numerics(wrong)}, slow={"numerics": fakes.numerics()})
    lines = notes(found.rows)
    assert any(f"fast DOES NOT COMPUTE what the plain model does: {wrong}" in line for line in lines)
    assert any("same precision): " in line and line.endswith("slow 6.2e-03 (3.9e-03)") for line in lines)
    told = sentence(found.rows)
    assert "fast is the fastest" not in told and "fast measured highest" not in told
    table = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert {row["recipe"]: row["numerics_hold"] for row in table if row["numerics_hold"]} == {
        "set/fast": "False",
        "set/slow": "True",
    }
    page = html.unescape((tmp_path / "report.html").read_text())
    assert f"gradients 6.2e-03 off float64, the plain model's 3.9e-03 in bf16; {wrong}" in page
    assert "computes something else" in (tmp_path / "table.md").read_text()


def test_no_pictures_of_what_nobody_looked_at(tmp_path: Path):
    nothing = {"step_profile": {}, "memory": {}, "memory_predicted": {}}
    found = make(tmp_path, **{name: nothing for name in (*SEEN, HOSTILE.removeprefix("set/"))})
    assert not {"step_time", "memory"} & set(charts(found.rows, found.runs))


def test_runs_that_shared_the_machine_are_told(tmp_path: Path):
    found = make(tmp_path, fast={"overlapped": True})
    note = next(note for note in notes(found.rows) if note.startswith("†"))
    assert note.startswith("† 3 runs shared this machine with other work: set/fast, all seeds.")
    one = [row | {"overlapped": row["overlapped"][:1]} for row in found.rows]
    assert any("fast seed 0." in note for note in notes(one))
    every = [row | {"overlapped": row["seeds"]} for row in found.rows]
    assert any("work: all there are." in note for note in notes(every))
    page = (tmp_path / "report.html").read_text()
    assert "3 runs shared this machine" in page and page.count("fast †<") == 1 and page.count("†") == 2
    assert "3 runs shared this machine" in (tmp_path / "table.md").read_text()


def test_runs_that_waited_for_a_core_are_told(tmp_path: Path):
    found = make(tmp_path, fast={"waited": 0.481}, base={"waited": 0.02})
    assert [row["waited"] for row in found.rows if row["overlapped"]] == [{0: 0.481, 1: 0.481, 2: 0.481}]
    note = next(note for note in notes(found.rows) if note.startswith("†"))
    assert "which had a core for up to 48% of the time that a run wanted it: set/fast, all seeds." in note


def judged(name: str, speedup: float, verdict: str, quality: str = "quality holds") -> dict[str, Any]:
    speed = {"speedup": speedup, "speed_verdict": verdict, "speedup_interval": [speedup - 0.02, speedup + 0.02]}
    good = {"quality_verdict": quality, "worse_by": {"eval_accuracy": {}}, "stable": True}
    return study_row(name, seeds=[1, 2, 3], **speed, **good)


FULL = study_row("cpu/fastest", seeds=[1, 2, 3], speedup=1.0, speed_verdict="baseline", baseline=True)


def test_the_verdict_of_leave_one_out():
    rows = [
        FULL,
        judged("cpu/fastest.without_fused_adamw", 0.95, "slower"),
        judged("cpu/fastest.without_unpadding", 0.5, "slower"),
        judged("cpu/fastest.without_mixed_precision", 0.8, "slower"),
        judged("cpu/fastest.without_low_precision_norm", 1.04, "faster"),
        judged("cpu/fastest.without_fast_dropout", 1.0, "no difference shown"),
    ]
    assert sentence(rows) == (
        "unpadding matters most in fastest: taken away, it leaves 0.50 of the speed (99 % interval 0.48 to 0.52), so "
        "it brings a factor of 2.00 on top of the others. Then come mixed_precision 1.25, fused_adamw 1.05. "
        "It is faster without low_precision_norm (1.04 times the speed). Not shown to matter: fast_dropout."
    )
    assert sentence(rows[:1] + rows[-1:]) == ("No speed-up of fastest was shown to matter when it alone is taken away.")
    unjudged = [dict(row, speed_verdict="not judged") for row in rows[1:]]
    assert sentence([FULL, *unjudged]).startswith(
        "Too few seeds to judge: without unpadding, fastest measured slowest, at 0.50 of its full speed;"
    )
    ordinary = judged("cpu/unpadding", 1.5, "faster")
    assert sentence([*rows, ordinary]).startswith("unpadding is the fastest whose quality holds"), "no such study"


def test_drift_and_the_baseline_again(study: tuple[Path, Findings]):
    line = next(line for line in study[1].conditions if line.startswith("Baseline re-measured"))
    assert "100, 101, 102 samples/s" in line
    assert json.loads((study[0] / "results.json").read_text())["study"]["drift"] is None, "three rounds do not tell"


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_name_is_broken(study: tuple[Path, Findings], width: int):
    rows = [row for row in study[1].rows if row["recipe"] != HOSTILE]
    long = dict(rows[1]) | {"recipe": "set/adamw_8bit_low_precision_norm"}
    console = Console(file=io.StringIO(), width=width)
    console.print(terminal_table([*rows, long], width))
    text = console.file.getvalue()
    assert len(text.splitlines()) == len(rows) + 2, "a line each"
    assert "adamw_8bit_low_precision_norm" in text and max(map(len, text.splitlines())) <= width
    assert "1.50x" in text


def test_latex_is_escaped(study: tuple[Path, Findings]):
    text = latex_table([dict(study[1].rows[1]) | {"recipe": "a_b&c%d#{x}\\y$"}], "50 % of {it}")
    assert r"a\_b\&c\%d\#\{x\}\textbackslash{}y\$" in text and r"\caption{50 \% of \{it\}}" in text
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len({len(re.findall(r"(?<!\\)&", line)) for line in lines}) == 1, "as many cells as heads"


@pytest.mark.parametrize(("interval", "arrows"), [([4.0, 7.0], 0), ([1.1, 60.0], 1), (None, 0)])
def test_an_interval_that_the_picture_cuts_ends_in_an_arrow(study: tuple[Path, Findings], interval, arrows: int):
    base, other = (dict(row) for row in study[1].rows[:2])
    other |= {"speedup": 6.0, "speedup_interval": interval}
    drawing = _bars([base, other], {row["recipe"]: row["recipe"] for row in (base, other)})
    assert drawing is not None
    bent = [shape["points"] for kind, shape in drawing._shapes if kind == "line" and len(shape["points"]) == 3]
    assert len(bent) == arrows
    assert all(tip > back and back == other for (back, _), (tip, _), (other, _) in bent), "to the right, where it goes"


def test_two_studies_row_by_row(study: tuple[Path, Findings], tmp_path: Path):
    other = make(tmp_path / "other", speed=1.25)
    rows = {row["recipe"]: row for row in compare(study[1], other)}
    assert rows["set/base"]["ratio"] == pytest.approx(1.25) and rows["set/base"]["verdict"] == "faster"
    assert rows["set/none"]["verdict"] == "not measured in the first and the second"
    assert not any(row["differs"] for row in rows.values())
    assert differences(study[1], other) == []
    recipes = {name: recipe | {"duration": "9ep", "description": "other"} for name, recipe in other.recipes.items()}
    recipes["set/base"] |= {"speedups": {"unpadding": {}}}
    again = compare(study[1], Findings(**(vars(other) | {"recipes": recipes})))
    assert again[0]["differs"] == ["duration 4ba / 9ep", "speedups.unpadding null / {}"]
    changed = Findings(**(vars(other) | {"environment": other.environment | {"python": "4"}}))
    assert differences(study[1], changed) == ["python: 3 / 4"]


def test_two_studies_of_batches_of_like_lengths_are_compared_by_their_tokens(tmp_path: Path):
    """Which lengths came up says nothing of the machines."""
    recipe = fakes.Recipe("grouped").to_dict() | {"speedups": {"length_grouped_batches": {}}}
    found = []
    for folder, tokens in (("a", 1000.0), ("b", 2000.0)):
        with Store(tmp_path / folder / "runs.sqlite") as store:
            store.begin({"name": folder, "baseline": "grouped", "created": 0}, [("grouped", recipe)])
            store.plan(interleave(["grouped"], [1, 2, 3]))
            while run := store.claim(None):
                result = fakes.train({"recipe": recipe, "seed": run.seed}, lambda _: None)
                speeds = {"samples_per_second": 100.0, "real_tokens_per_second": tokens + run.seed}
                store.finish(run, "ok", "", result | speeds, "")
            found.append(write_all(store, tmp_path / folder))
    row = compare(*found)[0]
    assert row["ratio_of"] == "real_tokens_per_second" and row["ratio"] == pytest.approx(2.0, rel=0.01)
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table([row], ("a", "b"), 100))
    assert " faster" in console.file.getvalue(), "in words, not as a colour"


def test_runs_of_two_versions_are_told(tmp_path: Path):
    make(tmp_path, seeds=2)
    with Store(tmp_path / "runs.sqlite") as store:
        environment = next(iter(store.environments().values()))
        moved = store.add_environment(environment | {"commit": {"id": "f" * 40, "clean": True}, "threads": 99})
        store.plan(interleave(["set/base"], [7]))
        run = store.claim(moved)
        assert run is not None
        store.finish(run, "ok", "", fakes.train({"recipe": store.recipes()["set/base"], "seed": 7}, lambda _: None), "")
        lines = write_all(store, tmp_path).conditions
    assert any("threads" in line and "99 here" in line for line in lines)
    assert any("2 versions of this package" in line and "f" * 12 in line for line in lines)


def test_what_two_speed_ups_do_to_each_other_is_told(tmp_path: Path):
    switches = {
        "base": {},
        "a": {"fused_adamw": {}},
        "b": {"fast_dropout": {}},
        "a_b": {"fused_adamw": {}, "fast_dropout": {}},
    }
    speeds = {"base": 100.0, "a": 120.0, "b": 150.0, "a_b": 90.0}
    recipes = {n: fakes.Recipe(n).to_dict() | {"speedups": s} for n, s in switches.items()}
    with Store(tmp_path / "runs.sqlite") as store:
        store.begin({"name": "pairs", "baseline": "base", "created": 0}, list(recipes.items()))
        store.plan(interleave(list(recipes), [1, 2, 3]))
        while run := store.claim(None):
            result = fakes.train({"recipe": recipes[run.recipe], "seed": run.seed}, lambda _: None)
            store.finish(run, "ok", "", result | {"samples_per_second": speeds[run.recipe] + 0.1 * run.seed}, "")
        rows = write_all(store, tmp_path).rows
    assert rows[3]["interaction"]["verdict"] == "less than their product"
    assert any(note.startswith("a_b: 0.50 times the product of what") for note in notes(rows))
    assert "0.50 times the product" in (tmp_path / "table.md").read_text()


def test_a_report_that_writes_nothing_leaves_the_folder_alone(study, capsys, tmp_path: Path):
    folder = tmp_path / "out"
    shutil.copytree(study[0], folder)
    (folder / "table.md").unlink()
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert main(["report", str(folder), "--no-write"]) == 0
    shown = capsys.readouterr().out
    assert "samples/s" in shown and "report.html" not in shown
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    assert main(["report", str(folder)]) == 0 and (folder / "table.md").is_file()
    (folder / "runs.sqlite").write_bytes(b"not a database, and long enough to be looked at as one" * 4)
    assert main(["report", str(folder), "--no-write"]) == 2
    assert str(folder / "runs.sqlite") in capsys.readouterr().err


def test_what_cannot_be_written_has_its_own_name(study, capsys, tmp_path: Path):
    folder = tmp_path / "out"
    shutil.copytree(study[0], folder)
    (folder / "results.json").unlink()
    (folder / "results.json").mkdir()
    assert main(["report", str(folder)]) == 2
    assert f"error: {folder / 'results.json'}: Is a directory" in capsys.readouterr().err.splitlines()
    assert not [file for file in folder.iterdir() if file.name.startswith(".results")]


def test_a_file_that_cannot_be_written_leaves_nothing_beside_it(tmp_path: Path):
    (tmp_path / "table.md").mkdir()  # as a full disk: its content is written, and can't take its place
    with pytest.raises(OSError):
        replace(tmp_path / "table.md", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"]
