"""From the store's runs to one row a recipe: what `results.json` holds and every table and plot shows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_speedups.ablation.pairs import SAMPLES, apart, by_seed, speed_key, undisturbed, waited
from composer_speedups.ablation.quality import compare_quality
from composer_speedups.ablation.row import Row
from composer_speedups.ablation.statistics import Noise, Ratio, compare_speed, median_interval, pooled_noise
from composer_speedups.ablation.store import OPEN, Run
from composer_speedups.measurement.results import INSIDE, NO_FUSED_KERNEL
from composer_speedups.recipes.schema import DESCRIPTIVE

__all__ = ["build_rows", "precision"]

# Fields of a run whose median over the seeds is the row's.
_MEDIANS = (
    "samples_per_second",
    "real_tokens_per_second",
    "wallclock_seconds",
    "train_seconds",
    "peak_memory_bytes",
    "final_loss",
    "eval_loss",
    "eval_accuracy",
    "eval_r2",
    "padding_share",
)
# What one run of each recipe is enough for.
_LOOKED_AT_ONCE = (*INSIDE, "numerics")
_NOT_RUN = "not run yet"


def build_rows(
    recipes: Mapping[str, dict[str, Any]],
    runs: Sequence[Run],
    baseline: str,
    peaks: Mapping[str, float] | None = None,
    hardware: str = "cpu",
) -> list[Row]:
    """One row for each recipe, in order.

    Args:
        recipes: resolved recipes by name.
        runs: all runs of the study.
        baseline: the recipe that the others are compared with.
        peaks: FLOP/s of a plain matmul by precision, for the MFU.
        hardware: `cpu` or `cuda`.
    """
    by_recipe: dict[str, list[Run]] = {name: [] for name in recipes}
    for run in runs:
        by_recipe[run.recipe].append(run)
    base = _good(by_recipe.get(baseline, []))
    noise = pooled_noise(
        {n: by_seed(good.values(), speed_key([recipes[n]])) for n, r in by_recipe.items() if (good := _good(r))}
    )
    rows = []
    for name, recipe in recipes.items():
        good = _good(by_recipe[name])
        row = _row(name, recipe, by_recipe[name], good)
        row["baseline"] = name == baseline
        row["precision"] = precision(recipe, hardware)
        row["mfu"] = _mfu(good, (peaks or {}).get(row["precision"]))
        row["apart"] = apart(good, base, runs)
        key = _common_key(recipes, (name, baseline), good, base)
        row |= _speed(good, base, row, noise and noise.of(name, baseline), key)
        row |= _quality(good, base, name == baseline)
        rows.append(row)
    for row in rows:
        reference = _reference(row, rows, recipes)
        shown, speeds = "not judged", [{}, {}]
        if reference is not None:
            names = (row["recipe"], reference["recipe"])
            speeds = _paired_speeds(names, SAMPLES, by_recipe)
            shown = compare_speed(*speeds, noise and noise.of(*names)).verdict
        row |= _break_even(row, reference if all(speeds) else None, speeds, shown)
        row["alike"] = [
            other["recipe"]
            for other in rows
            if _may_be_as_fast(other, row) and not _shown_faster(row, other, recipes, by_recipe, noise)
        ]
    return rows


def _may_be_as_fast(other: Row, row: Row) -> bool:
    """Whether `other`, shown to be faster than the baseline as `row` is, gained no more, and its interval meets the
    other's: most pairs need no closer look."""
    both = row["speed_verdict"] == other["speed_verdict"] == "faster" and other is not row
    return both and other["speedup"] <= row["speedup"] and other["speedup_interval"][1] >= row["speedup_interval"][0]


def _shown_faster(
    row: Row, other: Row, recipes: Mapping[str, Any], by_recipe: Mapping[str, Sequence[Run]], noise: Noise | None
) -> bool:
    names = (row["recipe"], other["recipe"])
    key = _common_key(recipes, names, *(_good(by_recipe[name]) for name in names))
    speeds = _paired_speeds(names, key, by_recipe)
    return compare_speed(*speeds, noise and noise.of(*names)).verdict == "faster"


def _paired_speeds(names: Sequence[str], key: str, by_recipe: Mapping[str, Sequence[Run]]) -> list[dict[int, float]]:
    """Of two recipes, by seed, as `_speed` compares them: without runs that were not made side by side."""
    one, other = (_good(by_recipe[name]) for name in names)
    left_out = apart(one, other, [run for of in by_recipe.values() for run in of])
    return [{s: speed for s, speed in by_seed(of.values(), key).items() if s not in left_out} for of in (one, other)]


def _common_key(recipes: Mapping[str, Any], names: Sequence[str], *good: Mapping[int, Run]) -> str:
    """The field by which the speeds of these recipes are compared, whose runs that ended well are `good`."""
    return speed_key((recipes[n] for n in names), lambda key: all(by_seed(runs.values(), key) for runs in good))


def precision(recipe: Mapping[str, Any], hardware: str) -> str:
    """In which precision a recipe's matmuls run: `fp32`, `tf32`, `fp16` or `bf16`."""
    speedups = recipe.get("speedups") or {}
    if "mixed_precision" in speedups:
        return str((speedups["mixed_precision"] or {}).get("dtype", "bf16"))
    level = (speedups.get("matmul_precision") or {}).get("precision", "highest")
    # On CPUs `medium` is bfloat16 inside oneDNN, and `high` changes nothing.
    if hardware == "cpu":
        return "bf16" if level == "medium" else "fp32"
    return "fp32" if level == "highest" else "tf32"


def _row(name: str, recipe: Mapping[str, Any], runs: Sequence[Run], good: Mapping[int, Run]) -> dict[str, Any]:
    status, reason = _status(runs, good)
    results = [run.result for run in good.values()]
    first = results[0] if results else {}
    row: dict[str, Any] = {
        "recipe": name,
        "description": recipe.get("description", ""),
        "status": status,
        "reason": reason,
        "batch_size": first.get("batch_size") or recipe.get("batch_size"),
        "learning_rate": first.get("learning_rate") or recipe.get("learning_rate"),
        "seeds": sorted(good),
        "failed": sorted(run.seed for run in _bad(runs)),
    }
    values = {key: _values(results, key) for key in _MEDIANS}
    middles = {key: median_interval(found) for key, found in values.items()}
    row |= {key: middle[0] if middle else None for key, middle in middles.items()}
    row["intervals"] = {key: [*middle[1:]] for key, middle in middles.items() if middle and len(values[key]) > 1}
    if row["peak_memory_bytes"] is not None:
        row["peak_memory_bytes"] = round(row["peak_memory_bytes"])
    row |= _compiling(results)
    row |= {
        "steps": first.get("steps"),
        "samples_per_step": _samples_per_step(results),
        "warmup_steps": first.get("warmup_steps"),
        "kernels": sorted({kernel for result in results for kernel in _kernels(result)}),
        "evidence": first.get("evidence") or {},
        "no_effect": _no_effect(results),
        "pretrained": first.get("pretrained"),
        **{key: next((r[key] for r in results if r.get(key)), {}) for key in _LOOKED_AT_ONCE},
        "overlapped": sorted(run.seed for run in good.values() if run.result.get("overlapped") or waited(run)),
        "waited": {run.seed: share for run in good.values() if (share := waited(run))},
        "train_samples": first.get("train_samples"),
        "data_notes": first.get("data_notes") or [],
        "warnings": sorted({w for result in results for w in result.get("warnings") or []}),
        "published": recipe.get("published"),
        "runs": [
            {
                "seed": run.seed,
                "status": run.status,
                "reason": run.reason,
                "samples_per_second": run.result.get("samples_per_second"),
                "real_tokens_per_second": run.result.get("real_tokens_per_second"),
                "wallclock_seconds": run.result.get("wallclock_seconds"),
                "final_loss": run.result.get("final_loss"),
                "eval_accuracy": run.result.get("eval_accuracy"),
                "eval_r2": run.result.get("eval_r2"),
                "peak_memory_bytes": run.result.get("peak_memory_bytes"),
            }
            for run in runs
        ],
    }
    return row


def _kernels(result: Mapping[str, Any]) -> list[str]:
    """Of the speed-ups, and of the attention, whoever chose it."""
    attention = (result.get("as_it_ran") or {}).get("attention", NO_FUSED_KERNEL)
    seen = [] if attention == NO_FUSED_KERNEL else attention.split(", ")
    return [*(result.get("kernels") or []), *seen]


def _status(runs: Sequence[Run], good: Mapping[int, Run]) -> tuple[str, str]:
    """`ok`, `skipped` or `failed`, and why."""
    bad = _bad(runs)
    if good:
        if not bad:  # a run that ended well may still have something to say
            return "ok", next((run.reason for run in good.values() if run.reason), "")
        return "ok", f"{len(bad)} of {len(runs)} seeds: {_why(bad[0])}"
    failures = [run for run in bad if run.status != "skipped"]
    if failures:
        return "failed", _why(failures[0])
    if bad:
        return "skipped", bad[0].reason
    return "skipped", _NOT_RUN


def _bad(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.status not in ("ok", *OPEN)]


def _why(run: Run) -> str:
    return f"out of memory: {run.reason}" if run.status == "out_of_memory" else run.reason


def _good(runs: Sequence[Run]) -> dict[int, Run]:
    return {run.seed: run for run in runs if run.status == "ok"}


def _values(results: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [float(result[key]) for result in results if isinstance(result.get(key), (int, float))]


def _mfu(good: Mapping[int, Run], peak: float | None) -> float | None:
    flops = _values([run.result for run in good.values()], "model_flops_per_second")
    return statistics.median(flops) / peak if flops and peak else None


def _speed(
    good: Mapping[int, Run], base: Mapping[int, Run], row: Mapping[str, Any], noise: Noise | None, key: str
) -> dict[str, Any]:
    if row["baseline"]:
        verdict = "baseline" if good else "not judged"
        value = 1.0 if good else None
        return _speed_fields(value, None, verdict, "", None)
    if not good:
        return _speed_fields(None, None, "not judged", "", None)
    own, its = ({s: run for s, run in runs.items() if s not in row["apart"]} for runs in (good, base))
    ratio = compare_speed(by_seed(own.values(), key), by_seed(its.values(), key), noise)
    if row["apart"] and ratio.verdict == "not judged":
        which = ", ".join(map(str, row["apart"]))
        note = f"not made in one round with the baseline's (seed {which}): compare them in another --out"
        ratio = replace(ratio, note=note)
    elif not _stands(ratio, own, its, noise, key):
        note = "other work on this machine may have made the difference (†): measure again, in another --out"
        ratio = replace(ratio, verdict="not judged", note=note)
    interval = None if ratio.low is None or ratio.high is None else [ratio.low, ratio.high]
    return _speed_fields(ratio.value, interval, ratio.verdict, ratio.note, ratio.seeds_needed)


def _stands(ratio: Ratio, own: Mapping[int, Run], its: Mapping[int, Run], noise: Noise | None, key: str) -> bool:
    """Whether the verdict would be the same if the slower of the two had had the machine to itself."""
    faster = ratio.verdict == "faster"
    slower = its if faster else own
    if ratio.verdict not in ("faster", "slower") or not any(undisturbed(run, 1.0) > 1.0 for run in slower.values()):
        return True
    alone = {seed: undisturbed(slower[seed], speed) for seed, speed in by_seed(slower.values(), key).items()}
    pair = (by_seed(own.values(), key), alone) if faster else (alone, by_seed(its.values(), key))
    return compare_speed(*pair, noise).verdict == ratio.verdict


def _samples_per_step(results: Sequence[Mapping[str, Any]]) -> float | None:
    """The batch size, or where batches are made by a budget of tokens, the mean of the samples they held."""
    held = [samples for result in results for samples in result.get("step_samples") or []]
    return statistics.mean(held) if held else next((r["batch_size"] for r in results if r.get("batch_size")), None)


def _no_effect(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The speed-ups that changed nothing, by their own evidence or by Composer's warning."""
    found = []
    for result in results:
        found += [key for key, facts in (result.get("evidence") or {}).items() if (facts or {}).get("changed") == 0]
        for warning in result.get("warnings") or []:
            kind, _, text = warning.partition(": ")
            name = text.partition("(")[0].lower()
            known = [key for key in result.get("evidence") or {} if key.replace("_", "") == name]
            found += known if kind == "NoEffectWarning" else []
    return sorted(set(found))


def _reference(row: Row, rows: Sequence[Row], recipes: Mapping[str, dict[str, Any]]) -> Row | None:
    """What a compiled row is set against: the same recipe without compile if the study has it, else the baseline."""

    def without_compile(name: str) -> dict[str, Any]:
        kept = {k: v for k, v in recipes[name].items() if k not in DESCRIPTIVE}
        speedups = {k: v for k, v in (kept.get("speedups") or {}).items() if k != "torch_compile"}
        return kept | {"speedups": speedups}

    if "torch_compile" in (recipes[row["recipe"]].get("speedups") or {}):
        for other in rows:
            plain = "torch_compile" not in (recipes[other["recipe"]].get("speedups") or {})
            if plain and other["seeds"] and without_compile(other["recipe"]) == without_compile(row["recipe"]):
                return other
    return next((other for other in rows if other["baseline"] and other is not row and other["seeds"]), None)


def _compiling(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds that compiling took with an empty cache (the most of all seeds: only the first finds it so), and with a
    filled one."""
    cold, warm = [], []
    for result in results:
        if seconds := result.get("compile_seconds"):
            facts = (result.get("evidence") or {}).get("torch_compile") or {}
            cached = facts.get("cache_hits") and not facts.get("cache_misses")
            (warm if cached else cold).append(float(seconds))
    again = statistics.median(warm) if warm else None
    return {
        "compile_seconds": max(cold) if cold else again,
        "compile_seconds_warm": again,
        "compile_cached": bool(warm) and not cold,
    }


def _break_even(row: Row, reference: Row | None, speeds: Sequence[Mapping[int, float]], shown: str) -> dict[str, Any]:
    """After how many steps, and samples, the gain in speed has paid for the time that compiling took.

    Not where there is no gain to be seen: `shown` is the verdict on `speeds`, the row's and the reference's.
    """
    fields: dict[str, Any] = {
        "break_even_steps": None,
        "break_even_samples": None,
        "break_even_against": reference["recipe"] if reference and row["compile_seconds"] else None,
        "break_even_verdict": shown,
    }
    if not row["compile_seconds"] or reference is None or not row["samples_per_step"]:
        return fields
    own, its = (statistics.median(of.values()) for of in speeds)
    gain = 1 / its - 1 / own if own and its else 0.0  # seconds that each sample is sooner done
    if gain > 0 and shown in ("faster", "not judged"):
        steps = math.ceil(row["compile_seconds"] / (gain * row["samples_per_step"]))
        fields |= {"break_even_steps": steps, "break_even_samples": round(steps * row["samples_per_step"])}
    return fields


def _speed_fields(
    value: float | None, interval: list[float] | None, verdict: str, note: str, needed: int | None
) -> dict[str, Any]:
    return {
        "speedup": value,
        "speedup_interval": interval,
        "speed_verdict": verdict,
        "speed_note": note,
        "speed_seeds_needed": needed,
    }


def _quality(good: Mapping[int, Run], base: Mapping[int, Run], is_baseline: bool) -> dict[str, Any]:
    fields = {"stable": None, "quality_verdict": "not judged", "quality_note": "", "worse_by": {}}
    if not good:
        return fields
    measured = {seed: run.result for seed, run in good.items()}
    if is_baseline:
        finite = all(result.get("finite", True) for result in measured.values())
        verdict = "baseline" if finite else "unstable"
        note = "" if finite else "the loss was not finite"
        return fields | {"stable": finite, "quality_verdict": verdict, "quality_note": note}
    quality = compare_quality(measured, {seed: run.result for seed, run in base.items()})
    return {
        "stable": quality.stable,
        "quality_verdict": quality.verdict,
        "quality_note": quality.note,
        "worse_by": quality.worse_by,
    }
