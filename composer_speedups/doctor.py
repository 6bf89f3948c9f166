"""What this machine can do, which sizes of a model waste it, and what to switch on first.

Nothing is trained and nothing is measured: it says what would work, `composer-speedups ablate` says what it brings.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from composer_speedups import hardware, registry
from composer_speedups.compilation import compiler, missing_tools
from composer_speedups.errors import TaskError, UserError, in_a_line
from composer_speedups.families import UNPADDABLE
from composer_speedups.installed import is_installed, version

if TYPE_CHECKING:
    from composer_speedups.fitting import Remedy
    from composer_speedups.measurement.memory import Memory
    from composer_speedups.recipes import Recipe

__all__ = [
    "Diagnosis",
    "Finding",
    "Need",
    "capabilities",
    "choices",
    "examine",
    "memory_need",
    "sizes",
    "speedups",
]

# Field of a Hugging Face configuration, the multiple that is best on tensor cores, and whether a user may round it
# up: a vocabulary can be padded, while other sizes are part of the pretrained weights.
# 64 half-precision numbers are the 128 bytes that NVIDIA's guide asks for on the A100 and later; eight are the least.
_SIZES = (("vocab_size", 64, True), ("hidden_size", 64, False), ("intermediate_size", 64, False))
_HEAD = 8  # flash kernels and tensor cores take head sizes in steps of eight


@dataclass(frozen=True)
class Finding:
    """One line: a thing, whether it works here, and what more is to be said (the remedy where it does not)."""

    name: str
    works: bool
    detail: str = ""


@dataclass(frozen=True)
class Need:
    """The memory that training would take, and whether it is there.

    Attributes:
        what: model, batch and recipe in words.
        memory: bytes by kind.
        free: bytes that are free on the device; None if nobody knows.
        largest: the largest batch that would fit, where `free` is known.
        remedy: where it does not fit: what to switch on, if anything helps.
        ranks: that train together. Memory is of each of them, batches are of all.
    """

    what: str
    memory: Memory
    free: int | None
    largest: int | None
    remedy: Remedy | None = None
    ranks: int = 1

    @property
    def fits(self) -> bool | None:
        return None if self.free is None else self.memory.peak <= self.free


@dataclass
class Diagnosis:
    """Everything that was found."""

    environment: dict[str, Any]
    capabilities: list[Finding]
    speedups: list[Finding]
    model: list[Finding] = field(default_factory=list)
    first: dict[str, dict[str, Any]] = field(default_factory=dict)  # speed-ups, as a recipe writes them
    reasons: list[str] = field(default_factory=list)  # one for each of `first`


def examine(model: str | None = None) -> Diagnosis:
    """Look at this machine, and at a model's sizes.

    Args:
        model: the folder of a Hugging Face model, or its name.

    Raises:
        UserError: the model's configuration cannot be read.
    """
    environment = hardware.environment()
    device = torch.device(environment["hardware"])
    bf16 = hardware.multiplies_bf16() if device.type == "cpu" else None
    diagnosis = Diagnosis(environment, list(capabilities(environment, bf16)), list(speedups(device)))
    family = None
    if model is not None:
        config = _config(model)
        diagnosis.model, family = sizes(config), getattr(config, "model_type", None)
    for key, arguments, reason in _first(environment, diagnosis, family):
        diagnosis.first[key] = arguments
        diagnosis.reasons.append(reason)
    return diagnosis


def memory_need(
    model: str | None = None,
    recipe: str | None = None,
    batch: int | None = None,
    length: int | None = None,
    progress: Callable[[str], None] | None = None,
    ranks: int = 1,
) -> Need:
    """The memory by kind of a step, from shapes alone: nothing is trained, and no weights are loaded.

    Args:
        model: the folder of a Hugging Face model, or its name; None is the recipe's, or BERT-base.
        recipe: name or path; None is a plain float32 classifier with a for-loop AdamW.
        batch: samples a forward pass, of all ranks together; None is the recipe's, or 32.
        length: tokens a sample; None is the recipe's, or 256. A recipe that computes on real tokens only is counted
            with lengths as its task has them, if the task's texts are on this machine.
        progress: called with short lines while those texts are read.
        ranks: processes that train together under DDP: one for each GPU, or for some of the cores. If several, tell
            this process by `isolation.ranks.look_for` first, whom speed-ups ask whether they can be had there.

    Raises:
        UserError: recipe or model cannot be had, the model is none whose memory can be predicted, or the batch cannot
            be shared by the ranks.
    """
    from composer_speedups.fitting import what_fits
    from composer_speedups.measurement.memory import free_memory, largest_batch, predict, rows_per_pass

    chosen = _recipe_to_predict(model, recipe, batch, length)
    name = chosen.model.name
    device = torch.device(hardware.hardware())
    if why := chosen.unshared_by(ranks):
        raise UserError(why)
    rows = batch // ranks if batch else rows_per_pass(chosen, ranks=ranks)
    free, largest = free_memory(device), None
    if free is not None and device.type == "cpu":
        free //= ranks
    lengths = None if length is not None else _typical_lengths(chosen, rows, progress)
    # With the texts' own lengths where they count: as many tokens as rows of their mean have.
    mean = None if lengths is None else round(sum(lengths) / len(lengths))
    width = chosen.task.max_length if chosen.task.padding == "max_length" else None
    remedy = None

    def predicted_for(one: Recipe) -> Memory:
        return predict(one, batch_size=rows, length=width, lengths=lengths, device=device, ranks=ranks)

    try:
        predicted = predicted_for(chosen)
        if free is not None:
            largest = largest_batch(chosen, free, length=mean, ranks=ranks)
            # It looks at multiples of eight only: the size that was asked for may lie above the last one that fits.
            largest = max(largest, rows) if predicted.peak <= free else largest
            remedy = None if predicted.peak <= free else what_fits(chosen, predicted.peak, free, predicted_for, device)
    except UserError:
        raise
    except Exception as error:  # what a model that is no encoder makes of a batch of tokens: anything
        raise TaskError(
            f"the memory of {name!r} cannot be predicted ({in_a_line(error)}): choose a BERT-like encoder"
        ) from error
    tokens = f"{chosen.task.max_length} tokens" if mean is None else f"{mean} tokens (the task's mean)"
    label = chosen.name if recipe is not None else "float32 with AdamW"
    what = f"{name}, batch {rows * ranks} of {tokens}, {label}"
    return Need(what, predicted, free, None if largest is None else largest * ranks, remedy, ranks)


def _recipe_to_predict(model: str | None, recipe: str | None, batch: int | None, length: int | None) -> Recipe:
    """The recipe as asked for; without one, a plain classifier."""
    from composer_speedups.recipes import Recipe, load_recipe
    from composer_speedups.tasks.known_models import known
    from composer_speedups.tasks.models import longest_input

    if recipe is not None:
        changes = [f"model.name={json.dumps(model)}"] if model is not None else []
        if batch is not None:
            changes += [f"batch_size={batch}", "microbatch_size=null"]
        if length is not None:
            changes.append(f"task.max_length={length}")
        chosen = load_recipe(recipe, changes)
        spec = chosen.model
        if spec.pretrained is True and known(spec.name) and not os.path.exists(spec.name):
            # Its sizes are known, and all that is needed; without its weights the vocabulary would be the task's own.
            config = {"vocab_size": _config(spec.name).vocab_size} | spec.config
            spec = spec.model_copy(update={"pretrained": False, "config": config})
        return chosen.model_copy(update={"model": spec})
    name = model or "bert-base-uncased"
    room = longest_input(_config(name)) or 512
    # Sizes follow from the configuration: no weights are looked for.
    size = {"name": name, "pretrained": False} if os.path.exists(name) or known(name) else {"name": name}
    task = {"name": "dummy", "max_length": length or min(256, room)}
    return Recipe.model_validate({"name": "plain", "task": task, "model": size, "batch_size": batch or 32})


def _typical_lengths(recipe: Recipe, rows: int, progress: Callable[[str], None] | None) -> list[int] | None:
    """How long the rows of a typical batch are, where padding costs nothing and so the texts' own lengths count.

    None where rows are counted as full: with padding, where batches are made by length, and where the texts would have
    to be downloaded.
    """
    import numpy as np

    from composer_speedups.tasks import build_task

    there = recipe.task.path is not None and os.path.exists(os.path.expanduser(recipe.task.path))
    needs_download = recipe.task.name in ("imdb", "hub") and not there
    if "unpadding" not in recipe.speedups or registry.regrouping() & recipe.speedups.keys() or needs_download:
        return None
    try:
        known = build_task(recipe.task, recipe.model, seed=recipe.seed, progress=progress).train.lengths
    except UserError:  # the memory can be told without the texts; training will say what is wrong with them
        return None
    return np.quantile(known, (np.arange(rows) + 0.5) / rows).round().astype(int).tolist()


def capabilities(environment: Mapping[str, Any], bf16: bool | None = None) -> Iterator[Finding]:
    """What hardware, PyTorch and the optional packages support.

    Args:
        environment: of the machine.
        bf16: whether PyTorch multiplies bfloat16 on its CPU, by which speed-ups go; None is what its flags say.
    """
    gpus = environment.get("gpus") or []
    flags = set((environment.get("cpu") or {}).get("flags") or [])
    if gpus:
        level = min(tuple(int(n) for n in gpu["capability"].split(".")) for gpu in gpus)
        name = f"compute capability {level[0]}.{level[1]}"
        yield Finding("TF32", level >= (8, 0), name if level >= (8, 0) else f"{name}; it needs 8.0 (Ampere)")
        yield Finding("bf16", level >= (8, 0), name if level >= (8, 0) else f"{name}; it needs 8.0. Use fp16")
        yield Finding("fp16", level >= (7, 0), "with loss scaling" if level >= (7, 0) else "no tensor cores for it")
        yield Finding("fp8", level >= (8, 9), name if level >= (8, 9) else f"{name}; it needs 8.9 (Ada, Hopper)")
    else:
        yield Finding("TF32", False, "it needs an Ampere or newer CUDA GPU")
        arm = environment["cpu"].get("machine") in ("aarch64", "arm64")
        named = [flag for flag in (("bf16",) if arm else hardware.X86_BF16) if flag in flags]
        native = bool(named) if bf16 is None else bf16
        text = "emulated, so slower than fp32: this CPU has no bf16 products"
        if native:
            text = f"native{': ' if named else ''}{', '.join(named)}"
        elif named:
            text = f"emulated, so slower than fp32: the CPU has {', '.join(named)}, and this PyTorch does not use it"
        yield Finding("bf16", native, text)
        yield Finding("fp16", False, f"it needs a CUDA GPU{'. Use bf16' if native else ''}")
        yield Finding("fp8", False, "it needs an Ada, Hopper or newer GPU")
    yield _flash(gpus)
    triton = is_installed("triton")
    detail = version("triton") or "without a version" if triton else "pip install triton"
    yield Finding("Triton", triton and bool(gpus), detail if gpus else f"{detail}; of use on a GPU only")
    device = torch.device("cuda" if gpus else "cpu")
    missing = missing_tools(device)
    yield Finding("torch.compile", missing is None, missing or f"{_compiler(device)} and Python's headers are there")
    for package, part, label, remedy in (
        # The index has another project of that name.
        ("apex", "apex.optimizers", "Apex", "build it from github.com/NVIDIA/apex with its CUDA extensions"),
        ("bitsandbytes", "bitsandbytes", "bitsandbytes", "pip install bitsandbytes"),
        ("torchao", "torchao", "torchao", "pip install torchao"),
    ):
        found = is_installed(package, part)
        yield Finding(label, found, version(package) or "" if found else f"not installed: {remedy}")
    if len(gpus) > 1:
        linked = all(
            torch.cuda.can_device_access_peer(a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b
        )
        text = "every GPU reads every other's memory" if linked else "some pairs go through the CPU's memory: slow DDP"
        yield Finding("links between GPUs", linked, text)


def speedups(device: torch.device) -> Iterator[Finding]:
    """Every speed-up of this package, and what it says of this machine."""
    for key, arguments, reason in choices(device):
        name = key + (f" ({', '.join(map(str, arguments.values()))})" if arguments else "")
        yield Finding(name, reason is None, reason or "")


def choices(device: torch.device) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Every registered speed-up's key, with each of its choices of arguments, and why not to use it on `device`."""
    for key in registry.keys():
        for arguments in registry.speedup_class(key).choices:
            try:
                speedup = registry.build(key, **arguments)
                yield key, arguments, speedup.unavailable(device) or speedup.too_slow(device)
            except UserError as error:
                yield key, arguments, str(error)


def sizes(config: Any) -> list[Finding]:
    """Which of a model's sizes miss the multiples that tensor cores and vector units like."""
    found = []
    for name, multiple, may_pad in _SIZES:
        size = getattr(config, name, None)
        if not isinstance(size, int):
            continue
        good = -(-size // multiple) * multiple
        if size == good:
            found.append(Finding(name, True, f"{size} is a multiple of {multiple}"))
            continue
        text = f"{size} -> {good}, the next multiple of {multiple}"
        if may_pad:
            text += f": model.resize_token_embeddings(pad_to_multiple_of={multiple})"
        else:
            text += "; it is part of the pretrained weights: choose it for a new model"
        found.append(Finding(name, False, text))
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if isinstance(hidden, int) and isinstance(heads, int) and heads:
        size = hidden // heads
        works = hidden % heads == 0 and size % _HEAD == 0
        text = f"{size} is a multiple of {_HEAD}" if works else f"{hidden} / {heads} heads is no multiple of {_HEAD}"
        found.append(Finding("head size", works, text))
    return found


def _first(
    environment: Mapping[str, Any], diagnosis: Diagnosis, family: str | None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Speed-ups that cost least and bring most, of those that work here, in the order in which to try them."""
    can = {finding.name: finding.works for finding in [*diagnosis.capabilities, *diagnosis.speedups]}
    if can["bf16"]:
        yield "mixed_precision", {"dtype": "bf16"}, "matmuls in half the bits, without loss scaling"
    elif can["fp16"]:
        yield "mixed_precision", {"dtype": "fp16"}, "matmuls in half the bits, with loss scaling"
    if can["TF32"]:
        yield "matmul_precision", {"precision": "high"}, "TF32 for the matmuls that stay in float32"
    if can.get("fused_adamw"):
        yield "fused_adamw", {}, "one kernel for all parameters; the same arithmetic"
    if can.get("unpadding") and family in (None, *UNPADDABLE):
        yield "unpadding", {}, "no work on padding; pays where texts differ in length"
    elif can.get("length_grouped_batches"):
        yield "length_grouped_batches", {}, "less padding; pays where texts differ in length. Compare the quality, too"
    if can.get("gradient_as_bucket_view"):
        yield "gradient_as_bucket_view", {}, "ranks exchange the gradients where they lie; one copy less"
    if can.get("fast_dropout") and environment["hardware"] == "cpu":
        yield "fast_dropout", {}, "torch draws dropout masks with one thread; other masks, the same statistics"
    if can["torch.compile"]:
        yield "torch_compile", {"scope": "block"}, "fewer passes over memory; pays in runs of minutes, not seconds"


def _flash(gpus: list[Any]) -> Finding:
    """Whether PyTorch's scaled_dot_product_attention has a flash kernel here."""
    if not gpus:
        return Finding("flash attention", True, "PyTorch's own for the CPU, chosen by scaled_dot_product_attention")
    built = torch.backends.cuda.is_flash_attention_available()
    new_enough = all(int(gpu["capability"].split(".")[0]) >= 8 for gpu in gpus)
    works = built and new_enough and torch.backends.cuda.flash_sdp_enabled()
    text = "PyTorch's own, in fp16 and bf16" if works else "PyTorch's memory-efficient kernel is used instead"
    package = version("flash-attn")
    return Finding("flash attention", works, text + (f"; flash-attn {package}" if package else ""))


def _config(model: str) -> Any:
    from transformers import AutoConfig

    from composer_speedups.tasks.known_models import known
    from composer_speedups.tasks.model_sources import load_config, resolve
    from composer_speedups.tasks.spec import ModelSpec

    # The sizes of well-known models are known here: no need to ask the hub, and no word about missing weights.
    if not os.path.exists(model) and (shape := known(model)) is not None:
        return AutoConfig.for_model(shape[0], **shape[1])
    # Only the configuration is read: weights without a tokenizer, which cannot be trained, have sizes, too.
    return load_config(resolve(ModelSpec(name=model, pretrained=False)))


def _compiler(device: torch.device) -> str:
    """Path and version of the compiler: gcc and clang both name their version in the first line of `--version`."""
    path = compiler(device) or ""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout.partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return path
    return f"{path} ({said})" if said else path
