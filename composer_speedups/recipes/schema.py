"""What a recipe may say: fields, types, limits, and how a mistake is explained.

Imports pydantic only: reading and checking a recipe needs neither torch nor Composer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from composer_speedups.recipes.yaml import show
from composer_speedups.tasks.spec import ModelSpec, TaskSpec

__all__ = [
    "DESCRIPTIVE",
    "LOGGERS",
    "OptimizerSpec",
    "Published",
    "RecipeFields",
    "ScheduleSpec",
    "SuiteFields",
    "changes",
    "count_and_unit",
    "explain",
    "flattened",
    "in_samples",
    "nearest",
]

Scalar = bool | int | float | str | None
DESCRIPTIVE = ("name", "description", "published")  # keys of a recipe that say nothing of what is trained

# Composer's loggers that a recipe may name. A fixed list, so that no recipe can have code imported; the Trainer's
# own progress bar and console are options of the Trainer, and uploading to a bucket is no logger's job here.
LOGGERS = (
    "CometMLLogger",
    "FileLogger",
    "InMemoryLogger",
    "MLFlowLogger",
    "NeptuneLogger",
    "SlackLogger",
    "TensorboardLogger",
    "WandBLogger",
)

_WRONG_FORM = "wrong form"  # the field's own wording says what the right one is
DURATION = re.compile(r"[1-9][0-9]{0,8}(ep|ba|sp)", re.ASCII)
INTERVAL = re.compile(r"[1-9][0-9]{0,8}(ep|ba)", re.ASCII)
WARMUP = re.compile(r"(0|[1-9][0-9]{0,8})(ep|ba|sp)|0(\.[0-9]{1,9})?dur", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*", re.ASCII)


def _field(must: str, example: str, default: Any = ..., **limits: Any) -> Any:
    """A field whose errors read "KEY must be MUST, got VALUE. Write e.g. KEY: EXAMPLE"."""
    extra: Any = {"must": must, "example": example}
    if isinstance(default, dict):
        return Field(default_factory=lambda: dict(default), json_schema_extra=extra, **limits)
    return Field(default, json_schema_extra=extra, **limits)


def _matching(pattern: re.Pattern[str]) -> BeforeValidator:
    def check(value: Any) -> Any:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(_WRONG_FORM)
        return value

    return BeforeValidator(check)


def _warmup(value: Any) -> Any:
    """A fraction of the duration or a number of batches becomes Composer's notation: 0.1 -> 0.1dur, 100 -> 100ba."""
    if isinstance(value, float) and 0 <= value < 1:
        value = f"{value:.9f}".rstrip("0").rstrip(".") + "dur"
    elif isinstance(value, int) and not isinstance(value, bool):
        value = f"{value}ba"
    if not isinstance(value, str) or not WARMUP.fullmatch(value):
        raise ValueError(_WRONG_FORM)
    return value


def _interval(value: Any) -> Any:
    if not isinstance(value, bool) and not (isinstance(value, str) and INTERVAL.fullmatch(value)):
        raise ValueError(_WRONG_FORM)
    return value


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # YAML has no tuples


Beta = Annotated[float, Field(ge=0, lt=1)]


class _Fields(BaseModel):
    # Strict: "2" is not 2 and True is not 1; a mistake is to be told about, not guessed at.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class OptimizerSpec(_Fields):
    """The optimizer that training builds, before any speed-up replaces it: a plain for-loop AdamW.

    Attributes:
        name: `adamw` (torch's, with foreach and fused off) or `decoupled_adamw` (Composer's).
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: as in torch's AdamW, for both (the decoupled one is given the equal decay).
    """

    name: Literal["adamw", "decoupled_adamw"] = "adamw"
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_pair)] = _field(
        "two numbers from 0 to below 1", "[0.9, 0.999]", (0.9, 0.999)
    )
    eps: float = _field("a positive number", "1e-8", 1e-8, gt=0)
    weight_decay: float = _field("a number from 0", "0.01", 0.01, ge=0)


class ScheduleSpec(_Fields):
    """How the learning rate goes: linear warm-up, then `name`.

    Attributes:
        name: `cosine` or `linear` decay to zero at the end, or `constant`.
        warmup: a share of the duration (`0.1` or `0.1dur`), batches (`100` or `100ba`) or epochs; samples
            (`800sp`) where the duration is in samples, and only there.
    """

    name: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Annotated[str, BeforeValidator(_warmup)] = _field(
        "a share of the duration below 1, or a number of batches, samples or epochs", "0.1dur, or 100ba", "0.1dur"
    )


class Published(_Fields):
    """The figures of the source that a recipe reproduces. Never inherited: they belong to one set of values.

    Attributes:
        samples_per_second: training throughput.
        speedup: ratio to the source's own baseline: 1.47 is 47 % faster.
        wallclock_seconds: the whole fine-tuning, with compilation and evaluation as the source counted it.
        memory_mb: what was taken of the GPU's memory, as the source counted it (with CUDA's own share, or without).
        stable: whether the source called the run stable.
        hardware: what it ran on.
        source: where the figures stand.
    """

    samples_per_second: float | None = _field("a positive number", "137", None, gt=0)
    speedup: float | None = _field("a positive ratio", "1.47", None, gt=0)
    wallclock_seconds: float | None = _field("a positive number", "153", None, gt=0)
    memory_mb: float | None = _field("a positive number", "14949", None, gt=0)
    stable: bool | None = None
    hardware: str | None = None
    source: str | None = None


class RecipeFields(_Fields):
    """A recipe with everything resolved.

    Attributes:
        name: from the file: `finetune/fp32` for a shipped one.
        description: a few words; shown in tables.
        extends: the recipe that this one was derived from, for the record.
        task: what is trained on what.
        model: which model.
        batch_size: samples per optimizer step, over all ranks.
        eval_batch_size: samples per evaluation step; None is `batch_size`.
        microbatch_size: gradient accumulation: samples per forward pass on one device; None is all at once.
        learning_rate: the peak, reached at the end of the warm-up.
        optimizer: see `OptimizerSpec`.
        schedule: see `ScheduleSpec`.
        duration: `2ep` epochs, `500ba` batches or `8000sp` samples.
        seed: of weights, order of samples and dropout.
        evaluate: True: at the end; `1ep` or `100ba`: that often, and at the end; False: never.
        speedups: key -> arguments, as `composer-speedups algorithms` lists them.
        loggers: name of a Composer logger -> its arguments.
        workers: processes that load data; 0 loads in the training process.
        published: see `Published`.
    """

    name: str = _field(
        "letters, digits and _ . + - /", "my_recipe", "recipe", max_length=150, pattern=rf"^{NAME.pattern}$"
    )
    description: str = _field("a few words", "fp16 and compile", "", max_length=500)
    extends: str | None = _field("the name of a recipe, or the path of its file", "finetune/fp32", None)
    task: TaskSpec = _field("a mapping", "{name: docstrings}", {}, validate_default=True)
    model: ModelSpec = _field("a mapping", "{name: bert-base-uncased}", {}, validate_default=True)
    batch_size: int = _field("a positive integer", "32", 32, gt=0, le=1_000_000)
    eval_batch_size: int | None = _field("a positive integer", "64", None, gt=0, le=1_000_000)
    microbatch_size: int | None = _field("a positive integer", "8", None, gt=0, le=1_000_000)
    # The bound is what a float32 still holds some thousand times of; every rate that trains is far below.
    learning_rate: float = _field("a positive number, at most 1e30", "1e-4", 5e-5, gt=0, le=1e30)
    optimizer: OptimizerSpec = _field("a mapping", "{name: adamw}", {}, validate_default=True)
    schedule: ScheduleSpec = _field("a mapping", "{name: cosine, warmup: 0.1dur}", {}, validate_default=True)
    duration: Annotated[str, _matching(DURATION)] = _field(
        "a number of epochs, batches or samples", "2ep, 500ba or 8000sp", "1ep"
    )
    seed: int = _field("an integer from 0 to 4294967295", "17", 17, ge=0, lt=2**32)
    evaluate: Annotated[bool | str, BeforeValidator(_interval)] = _field(
        "true, false, or an interval in epochs or batches", "1ep", True
    )
    speedups: dict[str, dict[str, Scalar]] = _field(
        "a mapping of speed-ups to their arguments, which are single values", "{fused_adamw: {}}", {}
    )
    loggers: dict[str, dict[str, Scalar]] = _field(
        "a mapping of logger names to their arguments, which are single values", "{TensorboardLogger: {}}", {}
    )
    workers: int = _field("an integer from 0 to 64", "2", 0, ge=0, le=64)
    published: Published | None = _field("a mapping", "{samples_per_second: 137}", None)

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of an update come from several forward passes, in one process."""
        return self.accumulates_on(1)

    def accumulates_on(self, ranks: int) -> bool:
        """The same of `ranks`, which share a batch; a microbatch is one rank's."""
        return self.microbatch_size is not None and self.microbatch_size * ranks < self.batch_size

    def short(self, steps: int) -> Self:
        """The same for so many steps, and no evaluation."""
        schedule = self.schedule.model_copy(update={"warmup": "0.1dur"})
        changes = {"duration": f"{steps}ba", "evaluate": False, "loggers": {}, "schedule": schedule}
        return self.model_copy(update=changes)

    def unshared_by(self, ranks: int) -> str:
        """Why `ranks` cannot have equal shares of the batches; empty if they can."""
        sizes = {"batch_size": self.batch_size}
        if self.evaluate and self.eval_batch_size:
            sizes["eval_batch_size"] = self.eval_batch_size
        wrong = [f"{key} {size}" for key, size in sizes.items() if size % ranks]
        return f"{wrong[0]} cannot be shared by {ranks} ranks: choose a multiple of {ranks}" if wrong else ""

    @model_validator(mode="after")
    def _fits_together(self) -> RecipeFields:
        if self.microbatch_size is not None and self.microbatch_size > self.batch_size:
            raise ValueError(f"microbatch_size {self.microbatch_size} exceeds batch_size {self.batch_size}: lower it")
        if self.schedule.warmup.endswith("dur"):  # a share of the duration, below 1
            return self
        (count, unit), (total, whole) = map(count_and_unit, (self.schedule.warmup, self.duration))
        if count and (unit == "sp") != (whole == "sp"):  # Composer cannot set samples against anything else
            units = "samples" if whole == "sp" else "batches or epochs"
            raise ValueError(
                f"schedule.warmup {self.schedule.warmup} and duration {self.duration} are not both in samples: "
                f"give the warm-up in {units}, or as a share (0.1dur)"
            )
        if unit == whole and count >= total:
            raise ValueError(
                f"schedule.warmup {self.schedule.warmup} leaves nothing of duration {self.duration}: shorten it"
            )
        return self


class SuiteFields(_Fields):
    """Recipes to be compared.

    Attributes:
        description: a line or two, for who reads the file.
        baseline: the recipe against which speed-ups are counted.
        recipes: names, or paths relative to the suite's file, in the order of the table.
        overrides: changes to every recipe, in a recipe's own form.
    """

    description: str = _field("a few words", "what is compared", "", max_length=500)
    baseline: str = _field("the name of one of the recipes", "finetune/fp32")
    recipes: list[str] = _field(
        "a list of recipe names", "[finetune/fp32, finetune/fp16]", min_length=1, max_length=200
    )
    overrides: dict[str, Any] = _field("a mapping, in a recipe's form", "{duration: 200ba}", {})


def in_samples(time: str, dataset: int, batch: int) -> int:
    """How many samples a duration or warm-up is, with `dataset` samples an epoch.

    >>> in_samples("2ep", 8000, 32), in_samples("10ba", 8000, 32), in_samples("500sp", 8000, 32)
    (16000, 320, 500)
    """
    count, unit = count_and_unit(time)
    return count * {"ep": dataset, "ba": batch, "sp": 1}[unit]


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """A recipe's values by their dotted keys.

    >>> flattened({"batch_size": 8, "task": {"name": "dummy"}, "speedups": {"unpadding": {}}})
    {'batch_size': 8, 'task.name': 'dummy', 'speedups.unpadding': {}}
    """
    if not isinstance(value, dict) or (path and not value):
        return {path: value}
    return {k: v for key, child in value.items() for k, v in flattened(child, f"{path}.{key}" if path else key).items()}


def changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The dotted keys in which two recipes differ, each with both values; null is as good as absent, as in a recipe.

    >>> changes({"seed": 1, "speedups": {"unpadding": {}}}, {"seed": 1, "task": {"path": None}})
    [('speedups.unpadding', {}, None)]
    """
    a, b = flattened(dict(one)), flattened(dict(other))
    return [(key, a.get(key), b.get(key)) for key in sorted({*a, *b}) if a.get(key) != b.get(key)]


def count_and_unit(time: str) -> tuple[int, str]:
    """The parts of a duration, or of a warm-up in such units.

    >>> count_and_unit("10ba")
    (10, 'ba')
    """
    found = re.fullmatch("([0-9]+)(ep|ba|sp)", time)
    if found is None:
        raise ValueError(f"{time!r} is no duration: write e.g. 3ep, 100ba or 5000sp")
    return int(found[1]), found[2]


def nearest(name: str, names: Iterable[str]) -> str:
    """The names most like `name`, for an error; all of them if none is like it and they are few."""
    names = list(names)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if not near:
        tails = {n.rpartition("/")[2]: n for n in names}
        near = [tails[t] for t in difflib.get_close_matches(name.rpartition("/")[2], tails, n=3, cutoff=0.5)]
    if near:
        return f"Nearest: {', '.join(near)}"
    return f"Known: {', '.join(names)}" if len(names) <= 24 else "None is like it"


def explain(error: ValidationError, model: type[BaseModel]) -> tuple[tuple[str, ...], str]:
    """The first mistake as (path of the value, one line that says what to write)."""
    found = [(*_locate(model, details["loc"]), details) for details in error.errors()]
    # A misspelt key explains the rest, and whatever a part's own check says comes before the whole's.
    keys, owner, field, details = min(found, key=lambda f: (f[-1]["type"] != "extra_forbidden", not f[0]))
    dotted = ".".join(keys)
    if details["type"] == "extra_forbidden":
        where = f" in {'.'.join(keys[:-1])}" if len(keys) > 1 else ""
        return keys, f"unknown key {show(keys[-1])}{where}. {nearest(keys[-1], owner.model_fields)}"
    if details["type"] == "missing" and len(details["loc"]) == len(keys):
        return keys, f"{dotted} is missing. Write e.g. {keys[-1]}: {field['example']}"
    message = details["msg"].removeprefix("Value error, ")
    if details["type"] == "value_error" and message != _WRONG_FORM:
        return keys, message if not dotted or message.startswith(keys[-1]) else f"{dotted}: {message}"
    if field is not None:
        must, example = field["must"], f". Write e.g. {keys[-1]}: {field['example']}"
    else:
        musts = [d["msg"].removeprefix("Input should be ") for k, _, _, d in found if k == keys]
        must, example = " or ".join(m[:1].lower() + m[1:] for m in musts).replace("a valid ", "a "), ""
        must = must.removeprefix("be ")
    return keys, f"{dotted} must be {must}, got {show(details['input'])}{example}"


def _locate(model: type[BaseModel], path: Sequence[str | int]) -> tuple[tuple[str, ...], type[BaseModel], Any]:
    """The path without pydantic's own steps ("bool", an index), the model that owns its end, the end's wording."""
    keys: list[str] = []
    owner, field, inner = model, None, model
    for step in path:
        if inner is None:  # inside a scalar, a list, or a mapping whose keys are free
            break
        keys.append(str(step))
        owner, found = inner, inner.model_fields.get(str(step))
        if found is None:
            field, inner = None, None
            continue
        field = found.json_schema_extra
        types = (found.annotation, *get_args(found.annotation))
        inner = next((t for t in types if isinstance(t, type) and issubclass(t, BaseModel)), None)
    return tuple(keys), owner, field
