"""Which of a run's figures a row is judged by."""

from __future__ import annotations

import pytest

from composer_speedups.ablation.charts import _speeds, charts
from composer_speedups.ablation.compare import compare
from composer_speedups.ablation.drift import Drift
from composer_speedups.ablation.output import Findings
from composer_speedups.ablation.rows import build_rows
from composer_speedups.ablation.store import Run
from composer_speedups.ablation.tables import cell, csv_table, latex_table, markdown_table
from composer_speedups.ablation.words import drift_lines, notes, sentence


def run(recipe: str, seed: int, samples: float, tokens: float | None) -> Run:
    result = {"samples_per_second": samples, "real_tokens_per_second": tokens, "finite": True, "final_loss": 1.0}
    return Run(0, recipe, seed, 0, "ok", result=result)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no tokens"])
def test_batches_of_like_lengths_are_judged_by_their_tokens(tokens: bool) -> None:
    recipes = {
        "base": {},
        "grouped": {"speedups": {"length_grouped_batches": {}}},
        "other": {"speedups": {"fused_adamw": {}}},
    }
    runs = []
    for seed in (1, 2, 3):
        lucky = 100.0 * seed  # which lengths came up
        runs += [
            run("base", seed, 100.0, 10_000.0 + seed if tokens else None),
            run("grouped", seed, lucky, 20_000.0 + seed),
            run("other", seed, 150.0, 14_000.0),
        ]
    rows = {row["recipe"]: row for row in build_rows(recipes, runs, "base")}
    assert rows["grouped"]["speedup"] == pytest.approx(2.0, rel=1e-3)
    assert rows["grouped"]["speed_verdict"] == ("faster" if tokens else "no difference shown")
    assert rows["other"]["speedup"] == pytest.approx(1.5)  # by samples, as its batches are the baseline's
    if tokens:
        rows = {row["recipe"]: row for row in build_rows(recipes, runs, "grouped")}
        assert rows["base"]["speedup"] == pytest.approx(0.5, rel=1e-3), "also where the baseline is what regroups"
        assert rows["other"]["speedup"] == pytest.approx(0.7, rel=1e-3)


def test_two_studies_are_compared_in_one_unit_in_either_order() -> None:
    def study(speedups: dict[str, dict], samples: float) -> Findings:
        recipes = {"mine": {"speedups": speedups}}
        runs = [run("mine", seed, samples + seed / 10, 10_000.0 + seed) for seed in (1, 2, 3)]
        return Findings({}, {}, recipes, runs, build_rows(recipes, runs, "mine"), [], "")

    plain, grouped = study({}, 100.0), study({"length_grouped_batches": {}}, 80.0)
    for two in ((plain, grouped), (grouped, plain)):
        (row,) = compare(*two)
        assert (row["ratio_of"], row["verdict"]) == ("real_tokens_per_second", "no difference shown")
        assert row["ratio"] == pytest.approx(1.0, abs=1e-3)


def compiled(seed: int, speed: float, seconds: float, hits: int, misses: int) -> Run:
    made = run("compiled", seed, speed, None)
    facts = {"cache_hits": hits, "cache_misses": misses}
    made.result |= {"compile_seconds": seconds, "batch_size": 8, "evidence": {"torch_compile": facts}}
    return made


@pytest.mark.parametrize(("speed", "verdict"), [(200.0, "faster"), (100.5, "no difference shown")])
def test_a_cold_cache_is_what_compiling_costs(speed: float, verdict: str) -> None:
    """The first seed fills the cache: a median over the seeds would be the warm one's."""
    recipes = {"base": {}, "compiled": {"speedups": {"torch_compile": {}}}}
    runs = [run("base", seed, 100.0 + seed, None) for seed in (1, 2, 3)]
    runs += [compiled(1, speed, 20.0, 0, 9), compiled(2, speed + 3, 2.0, 9, 0), compiled(3, speed, 1.0, 9, 0)]
    row = build_rows(recipes, runs, "base")[1]
    assert (row["compile_seconds"], row["compile_seconds_warm"], row["compile_cached"]) == (20.0, 1.5, False)
    assert row["break_even_verdict"] == verdict
    note = next(line for line in notes(build_rows(recipes, runs, "base")) if "compile took" in line)
    assert "20.0 s the first time, and 1.5 s with the cache" in note
    if verdict == "faster":
        assert row["break_even_steps"] > 400  # 20 s at 5 ms a sample and 8 samples a step
    else:
        assert row["break_even_steps"] is None and "not shown to pay" in note


def test_break_even_counts_the_samples_that_steps_held() -> None:
    """A budget of tokens makes batches of any number of samples; the recipe's batch size says nothing of them."""
    recipes = {"base": {}, "compiled": {"speedups": {"torch_compile": {}}}}
    runs = [run("base", 1, 100.0, None), compiled(1, 200.0, 20.0, 0, 9)]
    assert build_rows(recipes, runs, "base")[1]["break_even_samples"] == 4000
    runs[1].result |= {"step_samples": [30, 50], "step_seconds": [0.3, 0.25]}
    row = build_rows(recipes, runs, "base")[1]
    assert (row["break_even_steps"], row["break_even_samples"]) == (100, 4000)  # 40 a step, 5 ms saved on each
    assert _speeds(runs[1].result) == pytest.approx([100.0, 200.0])
    assert _speeds(runs[1].result | {"step_samples": []}) == pytest.approx([8 / 0.3, 32.0])


def test_medians_come_with_their_intervals() -> None:
    runs = [run("base", seed, 100.0 + seed, None) for seed in (1, 2, 3)]
    row = build_rows({"base": {}}, runs, "base")[0]
    assert row["samples_per_second"] == 102.0 and row["intervals"]["samples_per_second"] == [101.0, 103.0]
    line = dict(zip(*(line.split(",") for line in csv_table([row]).splitlines()), strict=True))
    assert (line["samples_per_second_low"], line["samples_per_second_high"]) == ("101.0", "103.0")
    assert (line["final_loss_low"], line["eval_accuracy_low"]) == ("1.0", "")
    assert "102.0 [101.0, 103.0]" in markdown_table([row])
    alone = build_rows({"base": {}}, runs[:1], "base")[0]
    assert alone["intervals"] == {} and "| 101.0 |" in markdown_table([alone])


@pytest.mark.parametrize("flaw", ["", "idle", "failed", "shared"])
def test_the_headline_names_no_row_with_a_flaw(flaw: str) -> None:
    speeds = {"base": 100.0, "good": 150.0, "best": 200.0}
    runs = [run(name, seed, speed + 0.1 * seed, None) for seed in (1, 2, 3) for name, speed in speeds.items()]
    for one in (r for r in runs if r.recipe == "best"):
        if flaw == "idle":
            one.result["evidence"] = {"fused_adamw": {"changed": 0}}
        elif flaw == "failed" and one.seed == 3:
            one.status, one.reason = "out_of_memory", "no room"
        elif flaw == "shared":
            one.result["overlapped"] = True
    rows = build_rows({name: {} for name in speeds}, runs, "base")
    said = sentence(rows)
    assert said.startswith("good is" if flaw in ("idle", "failed") else "best is")
    assert not any("quality not judged" in line for line in notes(rows))
    assert any(line.startswith("Quality holds: final loss worse by at most (margin 0.05)") for line in notes(rows))
    assert ("shared the machine" in said) == (flaw == "shared")
    assert ("best †" in markdown_table(rows)) == ("dagger" in latex_table(rows)) == (flaw == "shared")
    assert ("best *" in markdown_table(rows)) == (flaw == "idle")


def test_one_seed_beside_other_work_is_said_so() -> None:
    runs = [run(name, 1, speed, None) for name, speed in (("base", 100.0), ("best", 900.0))]
    runs[0].result["waited"] = 0.46
    said = sentence(build_rows({"base": {}, "best": {}}, runs, "base"))
    assert said.startswith("Too few seeds to judge, and of the baseline and best, which measured highest, at least one")
    assert said.endswith("(--seeds 3, another --out) with the machine to themselves.")
    assert "times" not in said, "9 times is nobody's speed-up"


@pytest.mark.parametrize("flaw", ["idle", "failed"])
def test_a_flawed_row_alone_is_named_with_its_flaw(flaw: str) -> None:
    runs = [run(name, s, v + 0.1 * s, None) for s in (1, 2, 3, 4) for name, v in (("base", 100.0), ("best", 200.0))]
    for one in (r for r in runs if r.recipe == "best"):
        if flaw == "idle":
            one.result["evidence"] = {"fused_adamw": {"changed": 0}}
        elif one.seed == 4:
            one.status, one.reason = "out_of_memory", "no room"
    rows = build_rows({"base": {}, "best": {}}, runs, "base")
    why = "fused_adamw changed nothing in it" if flaw == "idle" else "1 of 4 seeds failed"
    assert sentence(rows).startswith("No recipe without a flaw") and sentence(rows).endswith(f", but {why}.")
    assert why.removesuffix(" in it") in cell(rows[1], "verdict")


def test_a_baseline_that_failed_is_no_lack_of_seeds() -> None:
    runs = [run(name, seed, 100.0, None) for seed in (1, 2, 3) for name in ("base", "other")]
    for one in (r for r in runs if r.recipe == "base" and r.seed > 1):
        one.status, one.reason = "out_of_memory", "no room"
    rows = build_rows({"base": {}, "other": {}}, runs, "base")
    assert sentence(rows).startswith("No verdict: 2 of 3 seeds failed of the baseline") and "--retry" in sentence(rows)
    assert not any("run 3 or more" in line for line in notes(rows))


def test_rows_without_a_common_seed_are_not_called_unmeasured() -> None:
    runs = [run(name, seed, 100.0, None) for seed in (1, 2) for name in ("base", "other")]
    for one in (r for r in runs if (r.recipe, r.seed) in {("base", 1), ("other", 2)}):
        one.status, one.reason = "failed", "killed"
    said = sentence(build_rows({"base": {}, "other": {}}, runs, "base"))
    assert said.startswith("No verdict: no other recipe has a finished run with a seed of the baseline's")
    alone = sentence(build_rows({"base": {}}, [one for one in runs if one.recipe == "base"], "base"))
    assert alone == "No verdict: only the baseline has been measured."


def test_what_diverged_beats_nobody() -> None:
    """Neither on the line of those that no other beats, nor as a bar in the colour of the faster."""
    runs = [run(name, s, v + 0.1 * s, None) for s in (1, 2, 3) for name, v in (("base", 100.0), ("wild", 300.0))]
    for one in runs:
        one.result["peak_memory_bytes"] = 10**9
        if one.recipe == "wild":
            one.result |= {"finite": False, "final_loss": None}
    pictures = charts(build_rows({"base": {}, "wild": {}}, runs, "base"), runs)
    for name, kind in (("speed_memory", "dot"), ("speedups", "box")):
        shapes = [s for found, s in pictures[name]._shapes if found == kind and s["hint"].startswith("wild: ")]
        assert [s["colour"] for s in shapes] == ["same"] and shapes[0].get("hollow", True)


def test_a_study_in_which_all_diverged_has_its_pictures() -> None:
    runs = [run(name, seed, 100.0, None) for seed in (1, 2, 3) for name in ("base", "wild")]
    for one in runs:
        one.result |= {"finite": False, "final_loss": None, "peak_memory_bytes": 10**9}
    shapes = charts(build_rows({"base": {}, "wild": {}}, runs, "base"), runs)["speed_memory"]._shapes
    assert [s["hollow"] for kind, s in shapes if kind == "dot"] == [True, True], "nobody is beaten, and nobody beats"


def test_a_baseline_measured_once_shows_no_drift() -> None:
    assert drift_lines(None, []) == []
    assert "drifted is not known" in drift_lines(None, [100.0])[0]
    assert "100, 90 samples/s" in drift_lines(None, [100.0, 90.0])[0]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.1, 0.9, "no drift of the machine shown (99 % interval -10.0 to +90.0 %)"),
        (-0.4, 1.1, "too few rounds to tell whether the machine drifted"),
        (-1.0, 0.1, "too few rounds to tell whether the machine drifted"),
        (0.1, 3.0, "the machine became 50.0 % faster"),
    ],
)
def test_an_interval_that_says_nothing_is_not_shown(low: float, high: float, said: str) -> None:
    assert said in drift_lines(Drift(0.5, low, high, 4), [100.0, 90.0])[0]


def test_what_a_look_inside_found_is_the_rows_whichever_seed_it_was() -> None:
    runs = [run("base", seed, 100.0, None) for seed in (1, 2)]
    runs[0].result["evidence"] = {"fused_adamw": {"changed": 2}}
    runs[1].result |= {"evidence": {"fused_adamw": {"changed": 3}}, "as_it_ran": {"attention": "flash"}}
    row = build_rows({"base": {}}, runs, "base")[0]
    assert row["evidence"] == {"fused_adamw": {"changed": 2}} and row["as_it_ran"] == {"attention": "flash"}
    assert row["kernels"] == ["flash"]


HOUR = 3600.0


def made_at(recipe: str, seed: int, speed: float, hours: float) -> Run:
    made = run(recipe, seed, speed, None)
    made.started, made.finished = 1e9 + HOUR * hours, 1e9 + HOUR * hours + 60.0
    return made


@pytest.mark.parametrize(("later", "verdict"), [(0.02, "faster"), (24.0, "not judged")])
def test_a_row_made_again_another_day_is_not_compared_with_that_days_baseline(later: float, verdict: str) -> None:
    """A machine a third faster the day after: `--retry` made every seed of one row then."""
    runs = [made_at(name, s, 100.0 + s, s / 10) for s in (1, 2, 3) for name in ("base", "other")]
    runs += [made_at("again", s, 130.0 + s, later + s / 10) for s in (1, 2, 3)]
    rows = {row["recipe"]: row for row in build_rows({"base": {}, "other": {}, "again": {}}, runs, "base")}
    assert rows["again"]["speed_verdict"] == verdict
    if verdict == "not judged":
        assert rows["again"]["apart"] == [1, 2, 3] and rows["again"]["speedup"] is None
        note = "not made in one round with the baseline's (seed 1, 2, 3): compare them in another --out"
        assert note in rows["again"]["speed_note"] and any(note in line for line in notes([*rows.values()]))
    assert rows["other"]["speed_verdict"] == "no difference shown" and rows["other"]["apart"] == []


@pytest.mark.parametrize("far", [(), (2, 3), (1, 2, 3)], ids=["none", "two", "all"])
def test_what_compiling_brings_is_told_by_runs_of_one_round(far: tuple[int, ...]) -> None:
    recipes = {"base": {}, "compiled": {"speedups": {"torch_compile": {}}}}
    runs = [made_at("base", s, 100.0, s / 10) for s in (1, 2, 3)]
    for s in (1, 2, 3):
        another_day = made_at("compiled", s, 0.0, s / 10 + (24.0 if s in far else 0.02))
        one = compiled(s, 1000.0 if s in far else 200.0, 20.0, 0, 9)
        one.started, one.finished = another_day.started, another_day.finished
        runs.append(one)
    row = build_rows(recipes, runs, "base")[1]
    assert row["break_even_verdict"] == ("not judged" if far else "faster")
    # 20 s at 5 ms a sample and 8 samples a step
    assert row["break_even_steps"] == (None if len(far) == 3 else 500)
    note = next(line for line in notes(build_rows(recipes, runs, "base")) if "compile took" in line)
    assert ("paid for" in note) == (len(far) < 3), "neither after some steps nor never: nothing tells"


@pytest.mark.parametrize(("minutes", "alike"), [(10, []), (40, ["second"])])
def test_rows_made_far_from_each_other_are_not_told_apart(minutes: int, alike: list[str]) -> None:
    """Each is within an hour of the baseline, which was made between them, and they are not of each other."""
    runs = []
    for s, burden in ((1, 0.98), (2, 1.0), (3, 1.02)):
        order = (("second", 140.0), ("base", 100.0 * burden), ("first", 150.0))
        runs += [made_at(name, s, speed, 10.0 * s + n * minutes / 60) for n, (name, speed) in enumerate(order)]
    rows = {row["recipe"]: row for row in build_rows({"base": {}, "second": {}, "first": {}}, runs, "base")}
    assert [rows[name]["speed_verdict"] for name in ("second", "first")] == ["faster", "faster"]
    assert rows["first"]["alike"] == alike and rows["first"]["apart"] == rows["second"]["apart"] == []


def test_hours_in_which_other_runs_were_made_are_no_pause() -> None:
    """Whole trainings: the other row's run of a seed is hours later, and the study was at work all the time."""
    long = [made_at(name, s, speed + s, 10.0 * s + 2.0 * n) for s in (1, 2, 3)
            for n, (name, speed) in enumerate((("base", 100.0), ("slow", 50.0), ("fast", 200.0)))]  # fmt: skip
    for one in long:
        one.finished = one.started + 2.0 * HOUR - 30.0
    rows = build_rows({"base": {}, "slow": {}, "fast": {}}, long, "base")
    assert [row["apart"] for row in rows] == [[], [], []]


@pytest.mark.parametrize(
    ("speed", "waited", "verdict"),
    [(150.0, 0.0, "faster"), (150.0, 0.5, "not judged"), (600.0, 0.5, "faster"), (150.0, 0.05, "faster")],
)
def test_what_others_took_from_the_baseline_is_no_gain(speed: float, waited: float, verdict: str) -> None:
    runs = [run(name, s, v + s, None) for s in (1, 2, 3) for name, v in (("base", 100.0), ("fast", speed))]
    for one in runs:
        if one.recipe == "base":
            one.result["waited"] = waited
    base, fast = build_rows({"base": {}, "fast": {}}, runs, "base")
    assert fast["speed_verdict"] == verdict
    if verdict == "not judged":
        assert "other work on this machine may have made the difference" in sentence([base, fast])


def test_a_row_slowed_by_others_is_not_called_slower() -> None:
    runs = [run(name, s, v + s, None) for s in (1, 2, 3) for name, v in (("base", 100.0), ("slow", 70.0))]
    for one in runs:
        if one.recipe == "slow":
            one.result["overlapped"] = True
    assert build_rows({"base": {}, "slow": {}}, runs, "base")[1]["speed_verdict"] == "not judged"


def test_what_the_seeds_do_not_tell_from_the_fastest_is_named_beside_it() -> None:
    speeds = {"base": (100.0, 101.0, 102.0), "bf16": (143.0, 149.0, 141.0), "norm": (146.0, 143.0, 147.0),
              "all": (300.0, 303.0, 306.0)}  # fmt: skip
    recipes = {name: {} for name in speeds}

    def rows(*names: str):
        runs = [run(name, seed, speeds[name][seed], None) for seed in range(3) for name in names]
        for one in runs:
            one.result |= {"losses": [3.0, 3.0, 3.0, 1.0], "eval_accuracy": 0.8}
        return build_rows({name: recipes[name] for name in names}, runs, "base")

    found = sentence(rows("base", "bf16", "norm"))
    assert found.startswith("norm measured highest of those whose quality holds: 1.44 times the baseline's speed")
    assert found.endswith("not told from it: bf16 (from 1.43 times).")
    assert sentence(rows(*speeds)).startswith("all is the fastest whose quality holds: 3.00 times")


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_faster_still_is_named_unless_it_lost_quality(lost: bool) -> None:
    speeds = {"base": 100.0, "sure": 150.0, "open": 600.0}
    runs = [run(name, seed, speed + seed, None) for seed in (1, 2, 3) for name, speed in speeds.items()]
    for one in runs:
        scatter = {1: 0.0, 2: 0.03, 3: -0.03}[one.seed] if one.recipe == "open" else 0.0
        worse = 0.3 if lost and one.recipe == "open" else 0.0
        one.result |= {"losses": [3.0, 3.0, 3.0, 1.0], "eval_accuracy": 0.8 + scatter - worse}
    said = sentence(build_rows({name: {} for name in speeds}, runs, "base"))
    assert said.startswith("sure is the fastest whose quality holds: 1.49 times")
    told = " open measured 5.90 times, but quality not shown to hold."
    assert said.endswith(told) != lost and ("open" in said) != lost


def test_a_verdict_on_the_loss_alone_says_so() -> None:
    runs = [run(name, s, v + s, None) for s in (1, 2, 3) for name, v in (("base", 100.0), ("fast", 150.0))]
    said = sentence(build_rows({"base": {}, "fast": {}}, runs, "base"))
    assert said.startswith("fast is the fastest whose loss holds (accuracy was not measured): 1.49 times")


def test_more_than_the_measured_peak_is_explained() -> None:
    runs = [run("base", s, 100.0 + s, None) for s in (1, 2, 3)]
    for one in runs:
        one.result["model_flops_per_second"] = 1.5e9
    rows = build_rows({"base": {}}, runs, "base", peaks={"fp32": 1e9})
    assert any("MFU above 100 %" in line for line in notes(rows))


def test_of_several_cold_caches_the_slowest_counts() -> None:
    recipes = {"base": {}, "compiled": {"speedups": {"torch_compile": {}}}}
    runs = [run("base", 1, 100.0, None), compiled(1, 200.0, 20.0, 0, 9), compiled(2, 200.0, 26.0, 0, 9)]
    assert build_rows(recipes, runs, "base")[1]["compile_seconds"] == 26.0
