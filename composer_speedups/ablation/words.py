"""What a study says in words: its conditions, the machine's drift, the verdict, and the notes under its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from composer_speedups import hardware
from composer_speedups.ablation.drift import Drift
from composer_speedups.ablation.names import short_names
from composer_speedups.ablation.plans import WITHOUT
from composer_speedups.ablation.quality import METRICS
from composer_speedups.ablation.row import Row
from composer_speedups.ablation.statistics import CONFIDENCE, FEWEST

__all__ = ["conditions", "drift_lines", "failures", "flaw", "notes", "quality_words", "sentence"]

Facts = Mapping[str, Any]
_NAMED = 4  # rows; of more their number is told


def conditions(environment: Facts, study: Facts, rows: Sequence[Row], recipes: Mapping[str, Facts]) -> list[str]:
    """The lines above a table, without which its numbers mean nothing."""
    first = recipes[study["baseline"]]
    task, model = first.get("task") or {}, first.get("model") or {}
    counted = [row for row in rows if row["seeds"]]
    seeds = sorted({seed for row in counted for seed in row["seeds"]})
    steps = sorted({row["steps"] for row in counted if row["steps"]})
    what = [f"{task.get('name', '?')} ({task.get('objective', '?')})"]
    if found := next((row["train_samples"] for row in counted if row["train_samples"]), None):
        what.append(f"{found:,} samples")
    elif task.get("train_samples"):  # asked for; how many there are is known after the first run
        what.append(f"up to {task['train_samples']:,} samples")
    if task.get("max_length"):
        what.append(f"{task['max_length']} tokens {'padded' if task.get('padding') == 'max_length' else 'at most'}")
    what.append(f"duration {first.get('duration', '?')}")
    changed = ", ".join(f"{k}={v}" for k, v in (model.get("config") or {}).items())
    weights = {True: "pretrained", False: "random weights"}.get(
        next((row["pretrained"] for row in counted if row["pretrained"] is not None), None), ""
    )
    name = str(model.get("name", "?")) + (f" ({changed})" if changed else "")
    different = [row["recipe"] for row in rows if (recipes[row["recipe"]].get("model") or {}) != model]
    others = f"; not the same in {', '.join(different)}" if different else ""
    lines = [
        f"Hardware: {hardware.summary(environment)}",
        f"Task: {', '.join(what)}",
        f"Model: {name}" + (f", {weights}" if weights else "") + others,
    ]
    if (ranks := environment.get("ranks", 1)) > 1:
        lines.append(f"Ranks: {ranks} on this machine (DDP): batches are of all together, peak memory is of one")
    if counted:
        most = max(len(row["seeds"]) for row in counted)
        spread = "" if most == 1 else " [lowest, highest]" if most <= 5 else " [95 % interval]"
        order = "not all interleaved" if any(row["apart"] for row in rows) else "interleaved"
        span = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0]) if steps else "?"
        lines.append(
            f"Runs: seeds {', '.join(map(str, seeds))}; {span} steps; {order}, each in a fresh process; "
            f"medians over seeds{spread}; baseline {study['baseline']}"
        )
        lines += [f"Data: {note}" for note in dict.fromkeys(note for row in counted for note in row["data_notes"])]
    return lines


def drift_lines(trend: Drift | None, baseline: Sequence[float]) -> list[str]:
    """The baseline's speed each time it was measured, and what that and all other runs tell of the machine."""
    if not baseline:
        return []
    if len(baseline) == 1:
        return ["Baseline measured once: whether the machine drifted is not known; --seeds 3 measures it again"]
    line = f"Baseline re-measured: {', '.join(f'{speed:.4g}' for speed in baseline)} samples/s in order of time"
    if trend is not None:
        low, high = 100 * trend.low, 100 * trend.high
        interval = f"({CONFIDENCE * 100:.0f} % interval {low:+.1f} to {high:+.1f} %)"
        if trend.shown:
            word = "slower" if trend.change < 0 else "faster"
            line += f"; the machine became {abs(trend.change) * 100:.1f} % {word} from first round to last {interval}"
        elif trend.high > 1.0 or trend.low < -0.5:  # it may have doubled or halved
            line += "; too few rounds to tell whether the machine drifted"
        else:
            line += f"; no drift of the machine shown {interval}"
    return [line]


def sentence(rows: Sequence[Row]) -> str:
    """The verdict in a sentence or two."""
    base = next((row for row in rows if row["baseline"]), None)
    if base is None or not base["seeds"]:
        why = f": {base['reason']}" if base and base["reason"] else ""
        return f"No verdict: the baseline has no finished run{why}."
    measured = [row for row in rows if row["seeds"] and not row["baseline"] and row["speedup"] is not None]
    others = [row for row in rows if row["seeds"] and row is not base]
    if others and not any({*row["seeds"]} & {*base["seeds"]} for row in others):
        return "No verdict: no other recipe has a finished run with a seed of the baseline's."
    if not measured:
        why = [row["speed_note"] for row in others if row["speed_note"]]
        return f"No verdict: {why[0] if why else 'only the baseline has been measured'}."
    names = dict(zip((row["recipe"] for row in rows), short_names([row["recipe"] for row in rows]), strict=True))
    left_out = _left_out(rows, base)
    if left_out:
        return _without(names[base["recipe"]], [(left_out[r["recipe"]], r) for r in measured])
    if all(row["speed_verdict"] == "not judged" for row in measured):
        return _not_judged(measured, base, names)
    faster = [row for row in measured if row["speed_verdict"] == "faster"]
    return _of_faster(faster, base, names) if faster else "No recipe was shown to be faster than the baseline."


def _not_judged(measured: Sequence[Row], base: Row, names: Mapping[str, str]) -> str:
    """Why no row is, and what to do about it."""
    if base["failed"]:
        mend = "Mend what they say, then the same command with --retry."
        return f"No verdict: {failures(base)} of the baseline. {mend}"
    if other := [row for row in measured if len({*row["seeds"]} & {*base["seeds"]}) >= FEWEST]:
        return f"No verdict: {names[other[0]['recipe']]}: {other[0]['speed_note']}."
    best = max(measured, key=lambda row: row["speedup"])
    if best["overlapped"] or base["overlapped"]:  # one that is slowed alone may look like any speed-up
        return (
            f"Too few seeds to judge, and of the baseline and {names[best['recipe']]}, which measured highest, "
            "at least one shared the machine with other work (†): run 3 seeds or more (--seeds 3, another --out) "
            "with the machine to themselves."
        )
    return (
        f"Too few seeds to judge: {names[best['recipe']]} measured highest, {best['speedup']:.2f} times "
        f"the baseline's speed; run 3 seeds or more (--seeds 3) to tell what is real."
    )


def _of_faster(faster: Sequence[Row], base: Row, names: Mapping[str, str]) -> str:
    """Which of those that were shown to be faster is the one to take."""
    # What did nothing, or did not always end well, is not to be recommended, however fast the rest of it was.
    fast = [row for row in faster if not flaw(row)]
    kept = [row for row in fast if row["quality_verdict"] == "quality holds"]
    best = max(kept or fast or faster, key=lambda row: row["speedup"])
    name, times = names[best["recipe"]], f"{best['speedup']:.2f} times"
    if kept:
        text = _fastest(best, [row for row in kept if row["recipe"] in best["alike"]], names)
        above = max(fast, key=lambda row: row["speedup"])
        if above["stable"] is not False and above["speedup"] > best["speedup"]:
            text += f" {names[above['recipe']]} measured {above['speedup']:.2f} times, but {quality_words(above)}."
    elif fast:
        quality = quality_words(best).replace("unstable", "it is unstable")
        text = f"{name} is faster, {times} the baseline's speed, but {quality}: {best['quality_note']}."
    else:
        text = (
            f"No recipe without a flaw was shown to be faster than the baseline: {name} is, {times} its speed, but "
            f"{flaw(best)}."
        )
    return text + _beside_others(best, base)


def _fastest(best: Row, alike: Sequence[Row], names: Mapping[str, str]) -> str:
    """The verdict on the fastest of those that kept their quality, and on what the seeds do not tell from it."""
    low, high = best["speedup_interval"]
    evaluated = "eval_accuracy" in best["worse_by"] or "eval_r2" in best["worse_by"]
    holds = "quality holds" if evaluated else "loss holds (accuracy was not measured)"
    interval = f"({CONFIDENCE * 100:.0f} % interval {low:.2f} to {high:.2f})"
    name, times = names[best["recipe"]], f"{best['speedup']:.2f} times"
    if not alike:
        return f"{name} is the fastest whose {holds}: {times} the baseline's speed {interval}."
    ordered = sorted(alike, key=lambda row: -row["speedup"])
    listed = [names[row["recipe"]] for row in ordered[:_NAMED]]
    if more := len(ordered) - len(listed):
        listed.append(f"{more} more")
    others = ", ".join(listed[:-1]) + " and " * (len(listed) > 1) + listed[-1]
    return (
        f"{name} measured highest of those whose {holds}: {times} the baseline's speed {interval}; not told from it: "
        f"{others} (from {ordered[-1]['speedup']:.2f} times)."
    )


def flaw(row: Row) -> str:
    """Why the numbers of a measured row are not those of its recipe, in words; empty where they are."""
    if row["failed"]:
        return failures(row)
    if row["numerics"].get("holds") is False:
        return "it does not compute what the plain model does"
    return f"{', '.join(row['no_effect'])} changed nothing in it" if row["no_effect"] else ""


def failures(row: Row) -> str:
    failed = len(row["failed"])
    return f"{failed} of {failed + len(row['seeds'])} seeds failed"


def _beside_others(row: Row, base: Row) -> str:
    """What takes away from a verdict: runs that were slowed by others on the same machine."""
    if not row["overlapped"] and not base["overlapped"]:
        return ""
    return " Some of these runs shared the machine with others (†)."


def quality_words(row: Row) -> str:
    return row["quality_verdict"].replace("not judged", "quality not judged")


def _left_out(rows: Sequence[Row], base: Row) -> dict[str, str]:
    """What each row leaves out of the baseline, if that is what the study is about; else empty."""
    others = [row["recipe"] for row in rows if row is not base]
    start = base["recipe"] + WITHOUT
    return {name: name.removeprefix(start) for name in others} if all(n.startswith(start) for n in others) else {}


def _without(full: str, measured: Sequence[tuple[str, Row]]) -> str:
    """The verdict on a recipe from which one speed-up after the other was taken away."""
    ordered = sorted(measured, key=lambda item: item[1]["speedup"])
    first, worst = ordered[0]
    if all(row["speed_verdict"] == "not judged" for _, row in ordered):
        return (
            f"Too few seeds to judge: without {first}, {full} measured slowest, at {worst['speedup']:.2f} of its full "
            f"speed; run 3 seeds or more (--seeds 3) to tell what is real."
        )
    by_verdict: dict[str, list[tuple[str, Row]]] = {}
    for key, row in ordered:
        by_verdict.setdefault(row["speed_verdict"], []).append((key, row))
    out = []
    if slower := by_verdict.get("slower"):
        (key, row), *rest = slower
        low, high = row["speedup_interval"]
        out.append(
            f"{key} matters most in {full}: taken away, it leaves {row['speedup']:.2f} of the speed "
            f"({CONFIDENCE * 100:.0f} % interval {low:.2f} to {high:.2f}), so it brings a factor of "
            f"{1 / row['speedup']:.2f} on top of the others."
        )
        if rest:
            factors = ", ".join(f"{key} {1 / row['speedup']:.2f}" for key, row in rest)
            out.append(f"Then come {factors}." if len(rest) > 1 else f"Then comes {factors}.")
    else:
        out.append(f"No speed-up of {full} was shown to matter when it alone is taken away.")
    if faster := by_verdict.get("faster"):
        words = ", ".join(f"{key} ({row['speedup']:.2f} times the speed)" for key, row in faster)
        out.append(f"It is faster without {words}.")
    if slower and (idle := by_verdict.get("no difference shown")):
        out.append(f"Not shown to matter: {', '.join(key for key, _ in idle)}.")
    return " ".join(out)


def notes(rows: Sequence[Row]) -> list[str]:
    """What belongs under a table: why rows were skipped or failed, and what the marks mean."""
    names = short_names([row["recipe"] for row in rows])
    reasons: dict[str, list[str]] = {}
    for row, name in zip(rows, names, strict=True):
        if row["reason"]:
            label = f"{row['status']}: " if not row["seeds"] else "partly failed: " if row["failed"] else ""
            reasons.setdefault(f"{label}{row['reason'].removeprefix(f'{name}: ')}", []).append(name)
    lines = [f"{', '.join(who)} {reason}" for reason, who in reasons.items()]
    judged = [row for row in rows if row["seeds"] and not row["baseline"]]
    verdicts: dict[str, list[str]] = {}
    for row, name in zip(rows, names, strict=True):
        for text in _verdict_notes(row):
            verdicts.setdefault(text, []).append(name)
    for text, who in verdicts.items():
        everybody = len(who) == len(judged) > 2
        lines.append(f"{'all but the baseline' if everybody else ', '.join(who)}: {text}")
    for row, name in zip(rows, names, strict=True):
        if row.get("interaction"):
            lines.append(row["interaction"]["text"])
        if row["no_effect"]:
            lines.append(f"* {name}: {', '.join(row['no_effect'])} changed nothing, so this row does not show it")
        if row["numerics"].get("holds") is False:
            wrong = row["numerics"]["wrong"][0]
            lines.append(
                f"{name} DOES NOT COMPUTE what the plain model does: {wrong}; look by composer-speedups verify"
            )
        if row["compile_seconds"] and row["seeds"]:
            lines.append(_break_even(row, name))
    if right := [(row, name) for row, name in zip(rows, names, strict=True) if row["numerics"].get("holds")]:
        lines.append(_computed(right))
    if held := [
        (name, row) for row, name in zip(rows, names, strict=True) if row["quality_verdict"] == "quality holds"
    ]:
        lines.append(_held(held))
    if shared := [(name, row) for row, name in zip(rows, names, strict=True) if row["overlapped"]]:
        which = "; ".join(_overlaps(row, name) for name, row in shared)
        if all(row["overlapped"] == row["seeds"] for row in rows if row["seeds"]):
            which = "all there are"
        count = sum(len(row["overlapped"]) for _, row in shared)
        lines.append(
            f"† {count} run{'s' * (count > 1)} shared this machine with other work{_waiting(rows)}: {which}. "
            f"Such speeds are not the recipe's own; measure them again, into another --out"
        )
    if any(row["speed_verdict"] == "not judged" and len(row["seeds"]) == 1 for row in judged):
        lines.append("Stable ?, speed not judged: one seed tells nothing about the spread; run 3 or more (--seeds 3)")
    return lines


def _verdict_notes(row: Row) -> list[str]:
    """What is to be said of a row's speed and quality beyond the verdicts' names."""
    found = []
    needed = row["speed_seeds_needed"]
    its_own = needed is None or len(row["seeds"]) < needed or row["apart"]  # and not for want of the baseline's seeds
    if row["speed_verdict"] == "not judged" and len(row["seeds"]) > 1 and row["speed_note"] and its_own:
        found.append(f"speed not judged: {row['speed_note']}")
    elif row["apart"]:
        which = ", ".join(map(str, row["apart"]))
        found.append(f"seed {which} not made in one round with the baseline's, and not compared with it")
    if (row["mfu"] or 0.0) > 1.0:
        found.append("MFU above 100 %: its kernels beat the plain matmul that was measured as the peak here")
    if row["speed_verdict"] == "no difference shown":
        found.append("no difference in speed shown" + (f"; {row['speed_note']}" if row["speed_note"] else ""))
    if row["quality_verdict"] in ("unstable", "quality not shown to hold"):
        found.append(f"{row['quality_verdict']}: {row['quality_note']}")
    elif row["quality_verdict"] == "not judged" and row["quality_note"] not in ("", row["speed_note"]):
        found.append(f"quality not judged: {row['quality_note']}")
    return found


def _held(rows: Sequence[tuple[str, Row]]) -> str:
    """The numbers behind "quality holds": how much worse each row may be at most, and what was allowed."""
    parts = []
    for metric, word in METRICS.items():
        found = [(name, row["worse_by"][metric]) for name, row in rows if metric in row["worse_by"]]
        if found:
            bounds = ", ".join(f"{name} {max(0.0, facts['high'] or 0.0):.2g}" for name, facts in found)
            parts.append(f"{word} worse by at most (margin {found[0][1]['margin']:.2g}) {bounds}")
    return f"Quality holds: {'; '.join(parts)}"


def _computed(rows: Sequence[tuple[Row, str]]) -> str:
    """The numbers behind "computes the same": how far gradients are from float64, and the plain model's are."""
    parts = [f"{name} {row['numerics']['gradients']:.1e} ({row['numerics']['plain']:.1e})" for row, name in rows]
    return f"Gradients' error against float64 (the plain model's in the same precision): {', '.join(parts)}"


def _overlaps(row: Row, name: str) -> str:
    seeds = row["overlapped"]
    if seeds == row["seeds"] and len(seeds) > 1:
        return f"{name}, all seeds"
    return f"{name} seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _waiting(rows: Sequence[Row]) -> str:
    """What the other work did to the runs that had to wait for it."""
    shares = [share for row in rows for share in row["waited"].values()]
    return f", which had a core for up to {max(shares):.0%} of the time that a run wanted it" if shares else ""


def _break_even(row: Row, name: str) -> str:
    against = short_names([row["recipe"], row["break_even_against"]])[1] if row["break_even_against"] else ""
    seconds = f"{name}: compile took {row['compile_seconds']:.1f} s"
    if row["compile_cached"]:
        seconds += " with a cache that held its graphs (a first run may take longer)"
    elif row["compile_seconds_warm"]:
        seconds += f" the first time, and {row['compile_seconds_warm']:.1f} s with the cache that left"
    if row["break_even_steps"] is not None:
        return (
            f"{seconds}, paid for after {row['break_even_steps']:,} steps ({row['break_even_samples']:,} samples) "
            f"against {against}"
        )
    if not against:
        return seconds
    if row["break_even_verdict"] == "no difference shown":
        return f"{seconds}, not shown to pay: no difference in speed from {against} shown"
    return f"{seconds}, never paid for: no faster than {against}"
