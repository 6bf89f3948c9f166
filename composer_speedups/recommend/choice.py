"""What to measure, and what to make of it: the rows of the screening, those of the study, and the recipe to use."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer_speedups.ablation.pairs import speed_key
from composer_speedups.ablation.row import Row

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["DISTURBED", "PLAIN", "Answer", "Screened", "answer", "final_rows", "screen", "screening_rows"]

PLAIN = "plain"
_GAIN = 1.03  # what a screening's one run must show to be studied; it judges nothing: that takes repeated runs
_TIED = 0.95  # of the fastest: rivals above it are as fast, as far as one run can tell on a quiet machine
_LEAST_TIED = 0.85  # whatever the noise: rivals further apart are both worth knowing the faster of
_AGAIN = "_again"  # ends the names of further runs of what the candidates are on top of
_MUCH_PADDING = 0.2  # of the tokens
_MANY = 3  # so many and more get one name together

DISTURBED = (
    "No recommendation: other work on this machine ran beside some of these runs (†) and may have hidden a gain. Give "
    "it the machine to itself, and another --out."
)

SpeedUps = dict[str, dict[str, Any]]
Candidate = Mapping[str, Any]
Gained = tuple[Candidate, float]  # and how many times as fast its run was


@dataclass
class Screened:
    """What one look at each has left: candidates with their gain, and the others with the reason.

    Attributes:
        kept: to be studied.
        rejected: name -> why not.
        unfinished: name -> how the time was too short for it; what would help, whoever asked knows.
        told: whether any run told something of a candidate.
        tied: of the fastest: rivals above it are as fast, as far as one run can tell here.
    """

    kept: list[Gained] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)
    told: bool = False
    tied: float = _TIED

    def reject(self, name: str, why: str, told: bool = True) -> None:
        self.rejected[name] = why
        self.told |= told


@dataclass
class Answer:
    """The row to use (None: no speed-up was shown to help), and why not the others."""

    row: Row | None
    sentence: str
    rejected: dict[str, str]


def screening_rows(base: Recipe, candidates: Sequence[Candidate], first: SpeedUps) -> list[Recipe]:
    """The plain recipe, the low precision that suits this machine, and each candidate on top of that.

    Much of what helps in 16 bits does nothing in 32, and the other way round: a candidate is looked at where it would
    be used. What they are on top of runs three times, spread over the screening: the noise of a single run of it would
    burden every gain. The plain recipe, which precisions are compared with, runs once where there is a low one: the
    study, in which it stands again, judges them. A machine that becomes faster meanwhile burdens what ran early.
    """
    dtype = first.get("mixed_precision")
    ground = next((c for c in candidates if c["key"] == "mixed_precision" and c["arguments"] == dtype), None)
    rows = [base]
    on = dict(base.speedups)
    name = PLAIN
    if ground is not None:
        name = str(ground["arguments"]["dtype"])
        on[ground["key"]] = ground["arguments"]
        rows.append(made(base, name, on))
    tried, compiled = [], []
    for one in candidates:
        if one is ground:
            continue
        alone = one["stage"] == "PRECISION"  # another precision is an alternative, not an addition
        under = dict(base.speedups) if alone else on
        under = {k: v for k, v in under.items() if k != one["key"]} | {one["key"]: one["arguments"]}
        row = made(base, f"{PLAIN if alone else name}+{one['name']}", under)
        (compiled if one["stage"] == "COMPILE" else tried).append(row)
    if tried:
        first, second = (made(base, f"{name}{_AGAIN}{number}", on) for number in ("", "_2"))
        middle = (len(tried) + 1) // 2
        tried = [*tried[:middle], first, *tried[middle:], second]
    rows += [*tried, *compiled]  # compiling takes longest, and the time may not be enough for all
    return rows


def made(base: Recipe, name: str, speedups: SpeedUps, description: str = "") -> Recipe:
    values = {"name": name, "description": description or name, "speedups": dict(speedups)}
    return base.model_copy(deep=True, update=values)


def screen(rows: Sequence[Row], candidates: Sequence[Candidate], ground: str) -> Screened:
    """What one run of each tells.

    Args:
        rows: of the screening study.
        candidates: that were looked at.
        ground: the name of the row that the others are on top of.
    """
    by_name = {row["recipe"]: row for row in rows}
    of_ground = _measures_of_the_ground(by_name, candidates, ground)
    plain = by_name.get(PLAIN)
    of_plain = of_ground if ground == PLAIN else [plain] if plain and _ran(plain) else []
    found = Screened(tied=_tied([row["samples_per_second"] for row in of_ground]))
    for one in candidates:
        alone = one["stage"] == "PRECISION"
        is_ground = one["key"] == "mixed_precision" and ground == one["arguments"].get("dtype")
        row = by_name.get(ground if is_ground else f"{PLAIN if alone else ground}+{one['name']}")
        references = of_plain if alone else of_ground
        name = one["name"]
        status = row["runs"][0]["status"] if row is not None else "pending"
        if status in ("pending", "running", "interrupted"):
            found.unfinished[name] = "not tried: the time was over"
        elif status == "timeout":
            found.unfinished[name] = f"did not end: {row['reason']}"
        elif status == "skipped":
            found.reject(name, f"does not apply: {row['reason']}")
        elif status != "ok":
            found.reject(name, f"failed: {row['reason']}", told=False)
        elif one["key"] in row["no_effect"]:
            found.reject(name, "does not apply: it changed nothing in this model and task")
        elif row["stable"] is False:
            found.reject(name, f"unstable: {row['quality_note'] or 'the loss was not finite'}")
        elif not references or not row["samples_per_second"]:
            found.reject(name, "not judged: what it was to be compared with did not run", told=False)
        else:
            found.told = True
            measured = of_ground if is_ground else [row]
            added, compared = {"speedups": {one["key"]: one["arguments"]}}, (*measured, *references)
            key = speed_key([added], lambda key, of=compared: all(row.get(key) for row in of))
            speed, reference = (statistics.median(r[key] for r in them) for them in (measured, references))
            gain = speed / reference
            if gain >= _GAIN:
                found.kept.append((one, gain))
            else:
                found.reject(name, f"not kept: {gain:.2f}x in one run (not judged)")
    return found


def _measures_of_the_ground(
    rows: Mapping[str, Row], candidates: Sequence[Candidate], ground: str
) -> list[Mapping[str, Any]]:
    """All runs of what the candidates are on top of: its own, and those in which a candidate changed nothing."""
    found = [row for name, row in rows.items() if name == ground or name.startswith(ground + _AGAIN)]
    for one in candidates:
        row = rows.get(f"{ground}+{one['name']}")
        if row is not None and one["stage"] != "PRECISION" and one["key"] in row["no_effect"]:
            found.append(row)
    return [row for row in found if _ran(row)]


def _tied(speeds: Sequence[float]) -> float:
    """The share of the faster's speed from which on two single runs are not told apart, by runs of the same thing.

    The least typical of three and more is left out: one that other work disturbed would make everything equal.
    """
    if not speeds:
        return _TIED
    middle = statistics.median(speeds)
    usual = sorted(speeds, key=lambda speed: abs(speed - middle))[: max(2, len(speeds) - 1)]
    return min(_TIED, max(_LEAST_TIED, min(usual) / max(usual)))


def _ran(row: Row) -> bool:
    return row["runs"][0]["status"] == "ok" and bool(row["samples_per_second"])


def final_rows(base: Recipe, screened: Screened, most: int = 4) -> tuple[list[Recipe], dict[str, str]]:
    """The plain recipe, all that helped together, and the next best choices; and what was left out for another.

    Of those that exclude each other, or leave each other nothing, the faster is kept; within the noise of one run, the
    one that promises most. What compiles gets a row of its own, as its start takes time.
    """
    left, rejected = list(screened.kept), {}
    best = _best_of_slots(left, screened.tied)
    while pair := _redundant(best):
        loser, words = pair
        rejected[loser["name"]] = words
        left = [x for x in left if x[0] is not loser]
        best = _best_of_slots(left, screened.tied)  # its slot may go to one that it had excluded
    for one, gain in sorted(left, key=lambda x: -x[1]):
        other, more = best[one["slot"]]
        if other is not one:
            tied = ", no more than the noise of one run" if gain >= screened.tied * more else ""
            words = f"excluded by {other['name']}: {gain:.2f}x against {more:.2f}x in the screening{tied}"
            rejected[one["name"]] = words
    members = [c for c, _ in _largest_first(best)]
    plain = [c for c in members if c["stage"] != "COMPILE"]
    compiled = [c for c in members if c["stage"] == "COMPILE"]
    precision = [c for c in plain if c["stage"] == "PRECISION"]
    sets: list[tuple[str, list[Candidate]]] = [("together", plain)]
    if compiled:
        sets.append((f"together+{_short(compiled[0])}", [*plain, *compiled]))
    if len(plain) > 2:
        sets.append((f"together-{_short(plain[-1])}", plain[:-1]))
    sets.append(("", [*precision, *[c for c in plain if c not in precision][:1]]))
    rows, seen = [base], [dict(base.speedups)]
    for name, chosen in sets:
        speedups = dict(base.speedups)
        for one in chosen:
            speedups = {k: v for k, v in speedups.items() if k != one["key"]} | {one["key"]: one["arguments"]}
        if chosen and speedups not in seen and len(rows) < most:
            seen.append(speedups)
            words = "+".join(_short(one) for one in chosen)
            # One name for what may be a dozen: it stands in every line of the study.
            short = words if not name or len(chosen) < _MANY else name
            rows.append(made(base, short, speedups, words.replace("+", ", ")))
    return rows, rejected


def _best_of_slots(kept: Sequence[Gained], tied: float) -> dict[str, Gained]:
    """Of each slot the fastest; of those that the noise of one run does not tell from it the first."""
    most: dict[str, float] = {}
    for one, gain in kept:
        most[one["slot"]] = max(gain, most.get(one["slot"], 0.0))
    best: dict[str, Gained] = {}
    for one, gain in kept:  # in the order of what they promise
        if gain >= tied * most[one["slot"]]:
            best.setdefault(one["slot"], (one, gain))
    return best


def _largest_first(best: Mapping[str, Gained]) -> list[Gained]:
    return sorted(best.values(), key=lambda x: -x[1])


def _redundant(best: Mapping[str, Gained]) -> tuple[Candidate, str] | None:
    """One that leaves another nothing to save, or is left nothing, whichever brings less; and the words for it."""
    members = {c["key"]: (c, gain) for c, gain in _largest_first(best)}
    for one, gain in members.values():
        for over, why in one["redundant_with"].items():
            if over in members:
                other, more = members[over]
                words = f"excluded by {one['name']}: {more:.2f}x against {gain:.2f}x in the screening"
                return (one, why) if gain <= more else (other, words)
    return None


def _short(one: Candidate) -> str:
    return str(one["arguments"]["dtype"]) if one["key"] == "mixed_precision" else str(one["name"])


def answer(
    rows: Sequence[Row], confidence: float, samples: int | None = None, compare: str = "", filled: bool = False
) -> Answer:
    """The fastest row of those that were shown to be faster than the plain recipe, and not to lose quality.

    Whether quality holds is mostly open in runs this short, and what decides it is rather their scatter than the
    speed-ups: the sentence says so, and what would tell. Only between rows that are as fast does it count: where it
    holds for one whose gain lies in the interval of the fastest's, that one is preferred.

    Args:
        rows: of the study.
        confidence: of its intervals.
        samples: that the recipe's own training sees: what compiles must have paid for itself by then. None: unknown.
        compare: the command that compares the quality of whole trainings.
        filled: whether the plain recipe fills its batches up to the longest length that is allowed.
    """
    base = next(row for row in rows if row["baseline"])
    others = [row for row in rows if not row["baseline"]]
    rejected: dict[str, str] = {}
    good = [r for r in others if r["speed_verdict"] == "faster" and r["stable"] is not False and not r["failed"]]
    late = {row["recipe"]: why for row in good if (why := _too_late(row, samples))}
    good = [row for row in good if row["recipe"] not in late]
    fastest = max(good, key=lambda row: row["speedup"], default=None)
    as_fast = [row for row in good if fastest is not None and row["speedup"] >= fastest["speedup_interval"][0]]
    holds = [row for row in as_fast if row["stable"] is True]
    best = max(holds, key=lambda row: row["speedup"], default=fastest)
    for row in others:
        if row is best:
            continue
        interval = row["speedup_interval"]
        span = f" ({confidence * 100:.0f} % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        if not row["seeds"]:
            rejected[row["recipe"]] = row["reason"]
        elif row["failed"]:  # what does not always end well is not to be recommended
            rejected[row["recipe"]] = f"failed in {row['reason']}"
        elif row["stable"] is False:
            rejected[row["recipe"]] = f"unstable: {row['quality_note']}"
        elif row["speedup"] is None:
            rejected[row["recipe"]] = f"not judged: {row['speed_note'] or 'no speed was measured'}"
        elif row["recipe"] in late:
            rejected[row["recipe"]] = late[row["recipe"]]
        elif row["speed_verdict"] == "faster" and best is not None and row["speedup"] > best["speedup"]:
            note = f"; {row['quality_note']}" if row["quality_note"] else ""
            why = f"no faster than {best['recipe']} as far as these runs tell, and {_open_quality(row)}"
            rejected[row["recipe"]] = f"{why}: {row['speedup']:.2f}x{span}{note}"
        elif row["speed_verdict"] == "faster":
            rejected[row["recipe"]] = f"less than the best: {row['speedup']:.2f}x{span}"
        else:
            note = f"; {row['speed_note']}" if row["speed_note"] else ""
            rejected[row["recipe"]] = f"{row['speed_verdict']}: {row['speedup']:.2f}x{span}{note}"
    if best is None:
        return Answer(None, _no_answer(base, others), rejected)
    low, high = best["speedup_interval"]
    # The largest of several medians owes some of it to luck.
    lucky = f"; the largest of {len(good)} gains, so likely somewhat high" if best is fastest and len(good) > 1 else ""
    memory = ""
    if best["peak_memory_bytes"] and base["peak_memory_bytes"]:
        memory = f"; peak memory {base['peak_memory_bytes'] / 1e6:,.0f} -> {best['peak_memory_bytes'] / 1e6:,.0f} MB"
    text = (
        f"Expected gain: {best['speedup']:.2f} times the plain recipe's speed ({confidence * 100:.0f} % interval "
        f"{low:.2f} to {high:.2f}, {len(best['seeds'])} seeds{lucky}){memory}. {_quality(best, compare)}"
    )
    text += _padding(base, filled)
    if best["compile_seconds"]:
        after = best["break_even_samples"]
        paid = f"paid for after {after:,} samples" if after else "not paid for"
        text += f" Compiling took {best['compile_seconds']:.0f} s, {paid}."
    return Answer(best, text, rejected)


def _no_answer(base: Row, others: Sequence[Row]) -> str:
    """Why no row is recommended."""
    if not base["seeds"]:
        why = f"the plain recipe did not run. {base['reason']}".strip()
        if not base["failed"]:
            why = "the time was over before anything had been measured. Give more --minutes"
        return f"No recommendation: {why}"
    if any(row["overlapped"] for row in (base, *others)):
        return DISTURBED
    if others and all(row["speed_verdict"] == "not judged" for row in others):
        return "No recommendation: the time was not enough to measure each recipe three times. Give more --minutes."
    return "No speed-up was shown to help here: use the plain recipe."


def _padding(base: Row, filled: bool) -> str:
    """What of the gain a setting of the plain recipe would bring, too; empty where that is little."""
    share = base["padding_share"] or 0.0
    if not filled or share < _MUCH_PADDING:
        return ""
    return (
        f" {share:.0%} of the plain recipe's tokens are padding, as its task.padding is max_length: "
        "task.padding=longest alone would bring a part of this."
    )


def _open_quality(row: Row) -> str:
    return "quality is not " + ("judged" if row["quality_verdict"] == "not judged" else "shown to hold")


def _quality(row: Row, compare: str) -> str:
    """What the runs tell of the best row's quality, and where they do not, what would."""
    runs = f"runs of {row['steps']} steps" if row["steps"] else "these short runs"
    note = f" ({row['quality_note']})" if row["quality_note"] else ""
    if row["stable"] is True:
        return f"Quality holds over {runs}{note}."
    advice = f": compare whole trainings with `{compare}`" if compare else ""
    return f"{_open_quality(row).capitalize()} in {runs}{note}{advice}."


def _too_late(row: Row, samples: int | None) -> str:
    """Why a row that compiles is no gain in a training of so many samples; empty if it is one."""
    if not row["compile_seconds"] or samples is None:
        return ""
    after = row["break_even_samples"]
    if after is not None and after <= samples:
        return ""
    paid = f"is paid for after {after:,} samples" if after else "is not paid for"
    return f"compiling takes {row['compile_seconds']:.0f} s and {paid}; this training has {samples:,}"
