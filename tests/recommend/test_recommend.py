"""Recommendations: what is screened, what is studied, what is said; fake runs in real processes, and one real study."""

from __future__ import annotations

import io
import os
import shlex
import time
from pathlib import Path

import pytest
import recommend_fakes as fakes
from rich.console import Console
from study_row import study_row

from composer_speedups.ablation.store import Store
from composer_speedups.cli import main
from composer_speedups.commands.recommend import _dotted, _plain, python_line
from composer_speedups.errors import UserError
from composer_speedups.recipes import load_recipe, make_recipe
from composer_speedups.recommend.choice import answer, final_rows, screening_rows
from composer_speedups.recommend.run import recommend

PLAIN = {"matmul_precision": {"precision": "highest"}}


def plain(**values):
    return make_recipe({"name": "plain", "task": {"name": "dummy"}, "speedups": PLAIN} | values)


def made(out: Path, minutes: float = 1.0, **options):
    console = Console(file=io.StringIO(), width=140)
    base = options.pop("base", None) or plain()
    entries = {"entries": fakes.ENTRIES, "candidates": fakes.CANDIDATES}
    found = recommend(base, minutes=minutes, out=out, console=console, command="the command", **entries, **options)
    return found, console.file.getvalue()


def test_the_best_together_are_recommended(tmp_path: Path):
    start = time.monotonic()
    found, text = made(tmp_path / "out")
    assert time.monotonic() - start < 60
    speedups = found.recipe.speedups
    assert {"mixed_precision", "unpadding", "fused_adamw", "torch_compile"} <= speedups.keys()
    assert not {"foreach_adamw", "adamw_8bit", "fast_dropout", "masked_token_head"} & speedups.keys()
    assert "Expected gain: 2.77 times the plain recipe's speed (99 % interval 2.7" in found.answer.sentence
    why = found.answer.rejected
    assert why["adafactor"] == "not tried: it is there to save memory"
    assert why["adamw_8bit"] == "not kept: 0.80x in one run (not judged)"
    assert why["fast_dropout"] == "not kept: 1.00x in one run (not judged)"
    assert why["masked_token_head"].startswith("does not apply: it changed nothing")
    assert why["sdp_attention"] == "does not apply: this model has an attention of its own"
    assert why["fused_layer_norm"] == "unavailable: it needs a CUDA device"
    assert why["foreach_adamw"].startswith("excluded by fused_adamw: 1.10x against 1.20x")
    loaded = load_recipe(tmp_path / "out" / "recommended.yaml", check_arguments=False)
    assert loaded.speedups == speedups and loaded.duration == "1ep" and loaded.evaluate is True
    assert "matmul_precision" in speedups  # the plain recipe's own
    assert loaded.description == f"recommended: {', '.join(key for key in speedups if key not in PLAIN)}"
    for name in ("runs.sqlite", "report.html", "results.json", "screening/runs.sqlite"):
        assert (tmp_path / "out" / name).is_file()
    assert "Screening" in text and "Study" in text


@pytest.mark.elsewhere
def test_for_several_ranks(tmp_path: Path):
    """All runs are of as many, and so are the commands that it ends with."""
    out = tmp_path / "out"
    found, _ = made(out, 0.7, ranks=2)
    assert found.findings is not None and found.findings.environment["ranks"] == 2 and found.ranks == 2
    plain = next(row for row in found.findings.rows if row["recipe"] == "plain")
    assert 45 < plain["samples_per_second"] < 55, "it ran as one process"
    with Store(out / "screening" / "runs.sqlite", create=False) as store:
        assert {facts["ranks"] for facts in store.environments().values()} == {2}
    assert "--ranks 2" in found.answer.sentence
    with pytest.raises(UserError, match=r"measured on another machine or stack \(.*ranks.*Choose another --out$"):
        made(out, ranks=1)


@pytest.mark.elsewhere
def test_ranks_share_the_batch(tmp_path: Path):
    found, _ = made(tmp_path / "three", 0.5, ranks=2, base=plain(batch_size=20), own_batch=True)
    assert found.recipe.batch_size == 20
    with pytest.raises(UserError, match=r"^batch_size 5 cannot be shared by 2 ranks: choose a multiple of 2$"):
        made(tmp_path / "five", ranks=2, base=plain(batch_size=5), own_batch=True)
    with pytest.raises(UserError, match=r"^3 ranks need a core each, this machine has 2: use --ranks 2$"):
        made(tmp_path / "four", ranks=3)


@pytest.mark.elsewhere
def test_what_loses_quality_is_not_recommended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RECOMMEND_SPOILT", "1")
    found, _ = made(tmp_path / "out")
    assert "unpadding" not in found.recipe.speedups
    assert any(reason.startswith("unstable") for reason in found.answer.rejected.values())


@pytest.mark.elsewhere
def test_killed_before_it_had_planned_its_study_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planned = Store.plan

    def killed(store: Store, runs: list) -> None:
        if store.path.parent == tmp_path / "out":  # and not its screening
            raise KeyboardInterrupt
        planned(store, runs)

    monkeypatch.setattr(Store, "plan", killed)
    found, _ = made(tmp_path / "out")
    assert found.interrupted
    monkeypatch.setattr(Store, "plan", planned)
    found, _ = made(tmp_path / "out")
    assert not found.interrupted and "unpadding" in found.recipe.speedups


@pytest.mark.elsewhere
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # Ctrl-C may come while one is being read
@pytest.mark.parametrize("stop", [4, 14], ids=["in the screening", "in the study"])
def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int):
    diary = tmp_path / "diary"
    monkeypatch.setenv("RECOMMEND_DIARY", str(diary))
    monkeypatch.setenv("RECOMMEND_PARENT", str(os.getpid()))
    monkeypatch.setenv("RECOMMEND_STOP", str(stop))
    found, _ = made(tmp_path / "out")
    assert found.interrupted and not (tmp_path / "out" / "recommended.yaml").exists()
    before = diary.read_text().splitlines()
    monkeypatch.setenv("RECOMMEND_STOP", "")
    found, _ = made(tmp_path / "out")
    assert not found.interrupted and "unpadding" in found.recipe.speedups
    after = diary.read_text().splitlines()[len(before) :]
    assert before[-1] in after, "the run that was stopped is made again"
    # The first line is the calibration; these two run once in the screening and again in the study.
    done = {line for line in before[1:-1] if not line.startswith(("plain ", "bf16+unpadding "))}
    assert done and not done & set(after)
    for other in ({"seed": 5}, {"workers": 2}, {"schedule": {"name": "linear"}}):
        with pytest.raises(UserError, match="holds another study"):
            made(tmp_path / "out", base=plain(**other))
    monkeypatch.setattr(fakes, "CANDIDATES", f"{fakes.__name__}:elsewhere")
    with pytest.raises(UserError, match=r"another machine or stack \(python 3 there, 4 here\)"):
        made(tmp_path / "out")


@pytest.mark.elsewhere
def test_too_little_time_for_all_measures_the_doctors_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RECOMMEND_STEP", "0.4")
    start = time.monotonic()
    found, text = made(tmp_path / "out", minutes=0.35)
    # It was given 21 seconds. All the candidates would take minutes; a slow machine takes some more to start.
    assert time.monotonic() - start < 60
    assert "too few to look at" in text and "Give more --minutes" in text
    assert found.answer.rejected["fast_dropout"].startswith("not tried")
    assert found.path is not None and load_recipe(found.path, check_arguments=False).batch_size == 8
    assert found.folder is not None and (found.folder / "report.html").is_file()
    # More time is not lost on it: the screening is made.
    monkeypatch.setenv("RECOMMEND_STEP", "0.001")
    found, text = made(tmp_path / "out")
    assert "too few to look at" not in text and "Screening" in text
    assert found.answer.rejected["fast_dropout"].startswith("not kept: 1.00x")


@pytest.mark.elsewhere
def test_what_compiles_must_pay_within_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RECOMMEND_SAMPLES", "600")
    found, _ = made(tmp_path / "out")
    assert "torch_compile" not in found.recipe.speedups and "unpadding" in found.recipe.speedups
    why = found.answer.rejected["together+torch_compile"]
    assert why.startswith("compiling takes 2 s and is paid for after ") and why.endswith("this training has 600")


@pytest.mark.elsewhere
def test_a_microbatch_of_the_users_own_is_no_error(tmp_path: Path):
    found, _ = made(tmp_path / "out", base=plain(microbatch_size=16))
    assert found.recipe.microbatch_size == 16 and found.recipe.batch_size in (16, 32)


@pytest.mark.elsewhere
def test_a_busy_machine_is_told_and_the_same_command_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RECOMMEND_SLOW", "60")
    with pytest.raises(UserError, match=r"over the time limit .*is something else using this machine"):
        made(tmp_path / "out", minutes=0.8)
    monkeypatch.setenv("RECOMMEND_SLOW", "")
    found, _ = made(tmp_path / "out")
    assert "unpadding" in found.recipe.speedups


def test_precisions_are_alternatives_and_the_others_go_on_top():
    one = [
        {"name": "bf16", "key": "mixed_precision", "arguments": {"dtype": "bf16"}, "slot": "p", "stage": "PRECISION"}
    ]
    one += [{"name": "tf32", "key": "matmul_precision", "arguments": {"precision": "high"}, "slot": "m"}]
    one[-1]["stage"] = "PRECISION"
    one += [{"name": "fused_adamw", "key": "fused_adamw", "arguments": {}, "slot": "o", "stage": "OPTIMIZER"}]
    rows = screening_rows(plain(), one, {"mixed_precision": {"dtype": "bf16"}})
    names = [row.name for row in rows]
    assert names == ["plain", "bf16", "plain+tf32", "bf16_again", "bf16+fused_adamw", "bf16_again_2"]
    assert rows[2].speedups == {"matmul_precision": {"precision": "high"}}
    assert rows[4].speedups == PLAIN | {"mixed_precision": {"dtype": "bf16"}, "fused_adamw": {}}
    assert rows[1].speedups == rows[3].speedups == rows[5].speedups == PLAIN | {"mixed_precision": {"dtype": "bf16"}}
    one.append({"name": "torch_compile", "key": "torch_compile", "arguments": {}, "slot": "c", "stage": "COMPILE"})
    rows = screening_rows(plain(), one[1:], {})
    assert [row.name for row in rows][2:] == [
        "plain_again",
        "plain+fused_adamw",
        "plain_again_2",
        "plain+torch_compile",
    ]


def test_rows_have_short_names_and_no_speedup_that_another_leaves_nothing():
    from composer_speedups import registry
    from composer_speedups.recommend.choice import Screened

    def one(name: str, stage: str, **arguments) -> dict:
        key = name.partition(".")[0]
        of_class = {"redundant_with": registry.speedup_class(key).redundant_with}
        return {"name": name, "key": key, "arguments": arguments, "slot": key, "stage": stage} | of_class

    kept = [
        (one("mixed_precision", "PRECISION", dtype="bf16"), 1.5),
        (one("matmul_precision.medium", "PRECISION", precision="medium"), 1.2),
        (one("unpadding", "MODEL"), 2.0),
        (one("length_grouped_batches", "LOOP"), 1.8),
        (one("fast_dropout", "MODEL"), 1.1),
        (one("torch_compile", "COMPILE"), 1.3),
    ]
    rows, rejected = final_rows(plain(), Screened(kept=kept))
    assert [row.name for row in rows] == [
        "plain", "together", "together+torch_compile", "unpadding+bf16"
    ]  # fmt: skip
    assert [row.description for row in rows[1:]] == [
        "unpadding, bf16, fast_dropout", "unpadding, bf16, fast_dropout, torch_compile", "unpadding, bf16"
    ]  # fmt: skip
    assert rows[1].speedups == PLAIN | {
        "unpadding": {}, "mixed_precision": {"dtype": "bf16"}, "fast_dropout": {}
    }  # fmt: skip
    assert set(rejected) == {"matmul_precision.medium", "length_grouped_batches"}
    assert final_rows(plain(), Screened(kept=kept[3:4]))[0][1].name == "length_grouped_batches"
    # Its slot goes to the next best that there is something left for.
    slots = [(c | {"slot": "batches"} if "batches" in c["name"] else c, gain) for c, gain in kept]
    budget = one("token_budget_batches", "LOOP") | {"slot": "batches"}
    rows, rejected = final_rows(plain(), Screened(kept=[*slots, (budget, 1.07)]))
    assert "token_budget_batches" in rows[1].speedups and "token_budget_batches" not in rejected
    assert rejected["length_grouped_batches"] == "unpadding computes on no padding, so grouping has none to save"
    # The faster of the two stays, whichever it is.
    faster = [(kept[0][0], 1.1), (kept[1][0], 1.6)]
    rows, rejected = final_rows(plain(), Screened(kept=faster))
    assert rows[1].speedups == {"matmul_precision": {"precision": "medium"}}
    assert rejected == {"mixed_precision": "excluded by matmul_precision.medium: 1.10x against 1.60x in the screening"}


def test_rivals_within_the_noise_are_chosen_by_what_they_promise():
    """Candidates come in that order: on a CPU the fused optimizer before the one that saves memory."""
    from composer_speedups.recommend.choice import Screened

    fused, foreach, bnb = (
        {"name": f"{n}_adamw", "key": f"{n}_adamw", "arguments": {}, "slot": "optimizer", "stage": "OPTIMIZER"}
        | {"redundant_with": {}}
        for n in ("fused", "foreach", "bnb")
    )
    rows, rejected = final_rows(plain(), Screened(kept=[(fused, 1.09), (foreach, 1.03), (bnb, 1.10)]))
    assert rows[1].speedups == PLAIN | {"fused_adamw": {}}
    noise = "in the screening, no more than the noise of one run"
    assert rejected["bnb_adamw"] == f"excluded by fused_adamw: 1.10x against 1.09x {noise}"
    rows, rejected = final_rows(plain(), Screened(kept=[(fused, 1.05), (bnb, 1.20)]))
    assert rows[1].speedups == PLAIN | {"bnb_adamw": {}}
    assert rejected["fused_adamw"] == "excluded by bnb_adamw: 1.05x against 1.20x in the screening"


def screened(*rows: tuple[str, float, bool]):
    """What is made of a screening on top of bf16: each row's name, its samples/s, and whether it changed anything."""
    from composer_speedups.recommend.choice import screen

    names = dict.fromkeys(name.partition("+")[2] for name, _, _ in rows if "+" in name)
    candidates = [{"name": n, "key": n, "arguments": {}, "slot": "optimizer", "stage": "OPTIMIZER"} for n in names]
    bf16 = {
        "name": "mixed_precision.bf16",
        "key": "mixed_precision",
        "arguments": {"dtype": "bf16"},
        "slot": "precision",
    }
    made = [
        study_row(name, runs=[{"status": "ok" if speed else "pending"}], samples_per_second=speed or None)
        | {"no_effect": [] if changed else [name.partition("+")[2]], "stable": True, "reason": ""}
        for name, speed, changed in rows
    ]
    return screen(made, [bf16 | {"stage": "PRECISION"}, *candidates], "bf16")


def test_the_noise_of_one_run_of_the_reference_burdens_no_gain():
    """Speeds of a screening in which the first runs were slow, by other work on the machine."""
    rows = [("plain", 13.0, True), ("bf16", 18.6, True), ("bf16+sdp", 22.8, False), ("bf16+bnb", 22.0, True)]
    rows += [
        ("bf16_again", 21.0, True),
        ("bf16+fused", 23.2, True),
        ("bf16_again_2", 22.0, True),
        ("bf16+late", 0, True),
    ]
    found = screened(*rows)
    gains = {one["name"]: gain for one, gain in found.kept}
    assert gains == {"mixed_precision.bf16": 21.5 / 13.0, "fused": 23.2 / 21.5}  # the median of 18.6, 21, 22, 22.8
    assert found.rejected["bnb"] == "not kept: 1.02x in one run (not judged)"
    assert found.rejected["sdp"].startswith("does not apply")
    assert found.tied == 21.0 / 22.8, "rivals are not told apart by less than equal runs differ, but for the oddest"
    assert found.unfinished == {"late": "not tried: the time was over"}
    assert screened(*rows[:1], ("bf16", 20.0, True), ("bf16_again", 20.0, True)).tied == 0.95
    disturbed = [("bf16", 8.0, True), ("bf16_again", 20.0, True), ("bf16_again_2", 20.0, True)]
    assert screened(*disturbed).tied == 0.95, "one disturbed run makes nothing equal"
    assert screened(*disturbed[:2]).tied == 0.85, "nor do two that differ"
    # Where the first of them did not run, the others tell what they can.
    assert {one["name"] for one, _ in screened(*rows[:1], ("bf16", 0, True), *rows[2:]).kept} == {"fused"}


def test_what_is_there_for_memory_is_not_tried():

    from composer_speedups import registry
    from composer_speedups.recommend.jobs import candidates

    base = plain(task={"name": "dummy", "max_length": 8, "train_samples": 8}, model={"pretrained": False})
    facts = candidates({"recipe": base, "ranks": 1}, lambda _: None)
    assert set(facts["left_out"]) >= {"adafactor", "adamw_8bit", "gradient_checkpointing"}
    assert not set(facts["left_out"]) & {one["key"] for one in facts["candidates"]} and facts["candidates"]
    assert set(facts["left_out"]) == {key for key in registry.keys() if registry.speedup_class(key).for_memory}
    for one in facts["candidates"]:
        assert one["redundant_with"] == registry.speedup_class(one["key"]).redundant_with


def test_grouped_batches_are_judged_by_tokens():
    from composer_speedups.recommend.choice import screen

    grouped = {"name": "length_grouped_batches", "key": "length_grouped_batches", "arguments": {}, "stage": "DATA"}
    row = study_row("plain", runs=[{"status": "ok"}], stable=True)
    row |= {"samples_per_second": 100.0, "real_tokens_per_second": 10_000.0}
    lucky = row | {"recipe": "plain+length_grouped_batches", "samples_per_second": 150.0}  # short texts came up
    found = screen([row, lucky], [grouped], "plain")
    assert found.rejected == {"length_grouped_batches": "not kept: 1.00x in one run (not judged)"}
    lucky |= {"samples_per_second": 90.0, "real_tokens_per_second": 13_000.0}
    assert screen([row, lucky], [grouped], "plain").kept == [(grouped, 1.3)]


def test_nothing_helped_is_an_answer_too():
    from composer_speedups.recommend.choice import Screened

    rows, _ = final_rows(plain(), Screened())
    assert [row.name for row in rows] == ["plain"]
    base = study_row("plain", seeds=[1], stable=True, baseline=True, speed_verdict="baseline")
    speed = {"speed_verdict": "no difference shown", "speedup": 1.01, "speedup_interval": [0.9, 1.1]}
    other = study_row("x", seeds=[1], stable=True, **speed)
    found = answer([base, other], 0.99)
    assert found.row is None and "No speed-up was shown to help" in found.sentence
    assert found.rejected == {"x": "no difference shown: 1.01x (99 % interval 0.90 to 1.10)"}
    found = answer([base, other | {"speedup": None, "speed_verdict": "not judged", "speedup_interval": None}], 0.99)
    assert found.row is None and found.rejected == {"x": "not judged: no speed was measured"}


@pytest.mark.parametrize("whose", [0, 1], ids=["plain's", "the other's"])
@pytest.mark.parametrize("verdict", ["no difference shown", "not judged"])
def test_what_other_work_may_have_hidden_is_no_answer(verdict: str, whose: int):
    """To be told to use the plain recipe would be taken for a finding."""
    rows = rows_of({"recipe": "x", "speedup": 6.7, "speed_verdict": verdict} | OPEN)
    assert "may have hidden" not in answer(rows, 0.99).sentence
    rows[whose]["overlapped"] = [2]
    found = answer(rows, 0.99)
    assert found.row is None and found.sentence.startswith("No recommendation: other work on this machine")
    rows[1] |= {"speed_verdict": "faster"} | HOLDS
    assert answer(rows, 0.99).row is rows[1], "a gain that is judged in spite of it"


@pytest.mark.parametrize(("share", "filled", "told"), [(0.93, True, True), (0.93, False, False), (0.1, True, False)])
def test_how_much_of_the_gain_may_be_padding_is_told(share: float, filled: bool, told: bool):
    rows = rows_of({"recipe": "x", "speedup": 6.7} | HOLDS)
    rows[0]["padding_share"] = share
    assert ("93% of the plain recipe's tokens are padding" in answer(rows, 0.99, filled=filled).sentence) == told


@pytest.mark.parametrize(("failed", "says"), [([], "Give more --minutes"), ([1], "did not run. out of memory")])
def test_nothing_measured_is_told_from_nothing_that_ran(failed: list[int], says: str):
    base, other = rows_of({"recipe": "x", "speedup": 1.0, "speed_verdict": "not judged"} | OPEN)
    base, other = base | {"seeds": [], "failed": failed, "reason": "out of memory"}, other | {"seeds": []}
    found = answer([base, other], 0.99)
    assert found.row is None and found.sentence.endswith(says)


def rows_of(*others: dict) -> list[dict]:
    """Rows of a study: plain, and faster ones with what is given of each."""
    ran = {"seeds": [1, 2, 3], "steps": 9}
    base = study_row("plain", **ran, baseline=True, speed_verdict="baseline", stable=True)
    faster = [{"speed_verdict": "faster", "speedup_interval": [o["speedup"] - 1, o["speedup"] + 1]} | o for o in others]
    return [base, *(study_row(**(ran | row)) for row in faster)]


OPEN = {"stable": None, "quality_verdict": "quality not shown to hold", "quality_note": "final loss may be worse"}
UNJUDGED = {"stable": None, "quality_verdict": "not judged", "quality_note": ""}
HOLDS = {"stable": True, "quality_verdict": "quality holds", "quality_note": ""}


@pytest.mark.parametrize("quality", [OPEN, UNJUDGED], ids=["open", "not judged"])
def test_what_holds_quality_comes_before_what_is_as_fast(quality: dict):
    fast, safe = {"recipe": "fast", "speedup": 7.0} | quality, {"recipe": "safe", "speedup": 6.5} | HOLDS
    found = answer(rows_of(fast, safe), 0.99, compare="the command")
    assert found.row is not None and found.row["recipe"] == "safe"
    assert found.sentence.endswith("Quality holds over runs of 9 steps.") and "largest" not in found.sentence
    words, note = ("judged", "") if quality is UNJUDGED else ("shown to hold", "; final loss may be worse")
    why = f"no faster than safe as far as these runs tell, and quality is not {words}"
    assert found.rejected == {"fast": f"{why}: 7.00x (99 % interval 6.00 to 8.00){note}"}
    lost = {"recipe": "lost", "speedup": 9.0, "stable": False, "quality_verdict": "unstable"}
    found = answer(rows_of(fast, safe | quality, lost), 0.99)
    assert found.row is not None and found.row["recipe"] == "fast", "none holds: the fastest that was not shown to lose"


@pytest.mark.parametrize("quality", [OPEN, UNJUDGED], ids=["open", "not judged"])
def test_a_small_gain_that_holds_quality_is_not_preferred_to_a_large_one(quality: dict):
    """Losses that are nearly equal bit for bit hold in any run; the others are open in such short ones by scatter."""
    fast, safe = {"recipe": "fast", "speedup": 3.0} | quality, {"recipe": "safe", "speedup": 1.05} | HOLDS
    lost = {"recipe": "lost", "speedup": 9.0, "stable": False, "quality_verdict": "unstable", "quality_note": "worse"}
    found = answer(rows_of(safe, fast, lost), 0.99, compare="the command")
    assert found.row is not None and found.row["recipe"] == "fast"
    assert "(99 % interval 2.00 to 4.00, 3 seeds; the largest of 2 gains, so likely somewhat high)" in found.sentence
    assert found.sentence.endswith("compare whole trainings with `the command`.")
    assert found.rejected["safe"] == "less than the best: 1.05x (99 % interval 0.05 to 2.05)"
    assert found.rejected["lost"] == "unstable: worse"
    assert "largest" not in answer(rows_of(fast, lost), 0.99).sentence, "of one that could be chosen"


def test_what_does_not_always_end_well_is_not_recommended():
    shaky = {"recipe": "shaky", "speedup": 7.0, "failed": [2], "reason": "1 of 3 seeds: out of memory"} | HOLDS
    found = answer(rows_of(shaky, {"recipe": "safe", "speedup": 3.0} | HOLDS), 0.99)
    assert found.row is not None and found.row["recipe"] == "safe"
    assert found.rejected == {"shaky": "failed in 1 of 3 seeds: out of memory"}


def test_short_runs_do_not_judge_quality_and_say_what_would():
    found = answer(rows_of({"recipe": "x", "speedup": 7.15} | UNJUDGED), 0.99, compare="the command")
    assert "Expected gain: 7.15 times" in found.sentence
    assert found.sentence.endswith(
        "Quality is not judged in runs of 9 steps: compare whole trainings with `the command`."
    )
    found = answer(rows_of({"recipe": "x", "speedup": 7.15} | OPEN), 0.99)
    assert found.sentence.endswith("Quality is not shown to hold in runs of 9 steps (final loss may be worse).")


@pytest.mark.elsewhere
def test_the_command_that_compares_quality_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from composer_speedups.ablation.selection import load_rows

    monkeypatch.setenv("RECOMMEND_WORSE", "1")
    found, _ = made(tmp_path / "an out")
    assert found.answer.row is not None and found.answer.row["stable"] is None
    command = shlex.split(found.answer.sentence.partition("`")[2].partition("`")[0])
    assert command[:2] == ["composer-speedups", "ablate"]
    assert command[4:] == ["--seeds", "3", "--out", str(tmp_path / "an out" / "quality")]
    _, (bare, full), baseline = load_rows(command[2:4])
    assert (bare.name, full.name, baseline) == ("plain", "recommended", "plain") and bare.speedups == PLAIN
    assert full.speedups == found.recipe.speedups and bare.duration == full.duration == "1ep"
    assert bare.batch_size == full.batch_size and bare.evaluate is full.evaluate is True


def test_long_reasons_are_wrapped_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fakes, "CANDIDATES", f"{fakes.__name__}:wordy")
    found, _ = made(tmp_path / "out")
    comments = [line for line in (tmp_path / "out" / "recommended.yaml").read_text().splitlines() if line[0] == "#"]
    assert max(map(len, comments)) <= 120
    words = " ".join(" ".join(comments).replace("#", "").split())
    for name, reason in found.answer.rejected.items():
        assert f"{name}: {' '.join(reason.split())}" in words


def test_a_screening_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fakes, "CANDIDATES", f"{fakes.__name__}:useless")
    found, _ = made(tmp_path / "out")
    assert found.answer.row is None
    assert found.answer.sentence == (
        "No speed-up helped in the screening (one run of each, not judged): use the plain recipe."
    )


def test_options_of_the_task_need_no_prefix():
    assert _dotted("path=a.csv") == "task.path=a.csv" and _dotted("batch_size=8") == "batch_size=8"
    assert _dotted("task.path=a.csv") == "task.path=a.csv" and _dotted("model.pretrained=false").startswith("model.")


def test_the_python_line_is_python():
    import composer_speedups

    speedups = {"mixed_precision": {"dtype": "bf16"}, "torch_compile": {"scope": "block"}, "fused_adamw": {}}
    line = python_line(speedups)
    names = {name: getattr(composer_speedups, name) for name in ("MixedPrecision", "TorchCompile", "FusedAdamW")}
    built = eval(line.removeprefix("algorithms="), names)
    assert [one.key() for one in built] == list(speedups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "--minutes must be above 0 and at most 100,000, got 0"),
        (["--minutes", "-3"], "--minutes must be above 0 and at most 100,000, got -3"),
        (["--minutes", "nan"], "--minutes must be above 0"),
        (["--minutes", "2e5"], "--minutes must be above 0 and at most 100,000, got 200000"),
        (["--task", "imbd"], "task.name must be"),
        (["--task", "text"], "task text needs path"),
        (["speedups={unpadding: {}}"], "name and speedups are what recommend finds"),
        (["max_lenght=3"], "unknown key 'max_lenght'"),
        (["max_length"], "is not key=value"),
        (["--out", "taken"], "--out taken is no folder"),
        (["--out", "x" * 300], f"--out: cannot write to {'x' * 300}: File name too long"),
        (["--out", "/proc/x"], "--out: cannot write to /proc: No such file"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("x")
    assert main(["recommend", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_wrong_task_is_said_at_once(tmp_path: Path):
    with pytest.raises(UserError, match="the text has no column 'stars'"):
        made(tmp_path / "out", base=plain(task={"name": "imdb"}))


def test_a_damaged_store_is_refused(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "runs.sqlite").write_text("garbage")
    with pytest.raises(UserError, match="is damaged"):
        made(tmp_path / "out")
    assert (tmp_path / "out" / "runs.sqlite").read_text() == "garbage"


@pytest.mark.parametrize(
    ("change", "says"),
    [({"a_new_thing": 1}, "unknown key 'a_new_thing'"), ({"batch_size": -4}, "batch_size must be .*, got -4")],
)
def test_a_study_of_another_version_is_refused_in_one_line(tmp_path: Path, change: dict, says: str):
    with Store(tmp_path / "out" / "runs.sqlite") as store:
        store.begin({"name": "out", "baseline": "plain"}, [("plain", plain().to_dict() | change)])
    with pytest.raises(UserError, match=rf"out holds a study of another version \({says}\)\. Choose another") as error:
        made(tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_newline_in_the_command_loses_no_recipe(tmp_path: Path):
    console = Console(file=io.StringIO(), width=140)
    entries = {"entries": fakes.ENTRIES, "candidates": f"{fakes.__name__}:useless"}
    command = "composer-speedups recommend 'description=a\x85batch_size: 7\nlearning_rate: 9'"
    found = recommend(plain(), minutes=1.0, out=tmp_path / "out", console=console, command=command, **entries)
    assert found.path is not None and load_recipe(found.path, check_arguments=False).learning_rate != 9


def test_a_model_with_brackets_is_shown_as_it_is(tmp_path: Path):
    console = Console(file=io.StringIO(), width=140)
    base = plain(model={"name": "a[/notes]"}, task={"name": "imdb"})
    entries = {"entries": fakes.ENTRIES, "candidates": fakes.CANDIDATES}
    with pytest.raises(UserError, match="the text has no column"):
        recommend(base, minutes=1.0, out=tmp_path / "out", console=console, **entries)
    assert "for a[/notes] on imdb" in console.file.getvalue()


@pytest.mark.parametrize("model", ["~nosuchuser/x", "x" * 300])
def test_a_model_that_can_be_no_folder_is_a_name(model: str):
    assert _plain(model, "docstrings", []).model.name == model


@pytest.mark.slow
def test_a_real_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    from small import bert_config

    monkeypatch.chdir(tmp_path)
    bert_config(vocab_size=512).save_pretrained(tmp_path / "model")
    start = time.monotonic()
    command = ["recommend", "--model", "model", "--task", "dummy", "max_length=32", "train_samples=256"]
    assert main([*command, "vocabulary=512", "--minutes", "2", "--out", "out"]) == 0
    assert time.monotonic() - start < 180
    text = capsys.readouterr().out
    assert "Not used, and why" in text and "unavailable" in text
    recipe = load_recipe(tmp_path / "out" / "recommended.yaml")
    assert recipe.model.name == str((tmp_path / "model").resolve())
