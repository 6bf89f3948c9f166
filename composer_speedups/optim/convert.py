"""Turn the optimizer's state inside a checkpoint into another optimizer's, so that training goes on with its moments.

Composer stores the state under the optimizer's class name and goes on with empty moments when it finds another name
there; torch AdamW and bitsandbytes' 32-bit AdamW even have the same name and different contents. All of them keep the
same two moments and the same step: this rewrites them, and the parameter groups, in the other's format.

Exact for float32 weights: everything but 8 bits, which rounds each moment to one of 256 codes (`test_convert.py`
states by how much). Of 16-bit weights torch, Composer and Apex keep moments in 16 bits, to which they are rounded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from composer_speedups.checkpoint_files import Unsafe, read_file, write_file
from composer_speedups.errors import CheckpointError, ConflictError
from composer_speedups.optim.states import MIN_8BIT_SIZE, Layout, Moments, layout_of, read_moments, write_moments

__all__ = ["EMBEDDINGS", "OPTIMIZERS", "Conversion", "convert_checkpoint", "convert_optimizer_state"]

# The names of this file -> the class name under which Composer stores the state.
OPTIMIZERS = {
    "adamw": "AdamW",
    "decoupled_adamw": "DecoupledAdamW",
    "bnb_adamw": "AdamW",
    "adamw_8bit": "AdamW8bit",
    "apex_fused_adamw": "FusedAdam",
}
_ALIASES = {"foreach_adamw": "adamw", "fused_adamw": "adamw"}  # the same class and state: only flags differ
_TORCH = ("adamw", "decoupled_adamw")
_LAYOUT: dict[str, Layout] = {"bnb_adamw": "bnb32", "adamw_8bit": "bnb8", "apex_fused_adamw": "apex"}
_NESTED = "__bnb_optimizer_quant_state__"  # where bitsandbytes' state_dict keeps its tensors, hidden from FSDP
_SHARED = ("lr", "betas", "eps", "weight_decay")

# Weights whose state AdamW8bit leaves in 32 bits: a file knows names, not modules.
EMBEDDINGS = ("*embeddings*.weight", "*embed_tokens.weight", "*.wte.weight", "*.wpe.weight", "*.shared.weight")


@dataclass(frozen=True)
class Conversion:
    """What was converted: names from `OPTIMIZERS`, how many parameters, how many of them in 8 bits, the last step."""

    source: str
    target: str
    parameters: int
    in_8_bits: int
    step: int

    def __str__(self) -> str:
        bits = f", {self.in_8_bits} of them in 8 bits" if self.target == "adamw_8bit" else ""
        return f"{self.source} -> {self.target}: moments of {self.parameters} parameters{bits}, at step {self.step}"


def convert_optimizer_state(
    state_dict: Mapping[str, Any],
    source: str,
    target: str,
    *,
    parameters: Mapping[Any, torch.Tensor] | None = None,
    keep_32_bit: Collection[str | int] = (),
    min_8bit_size: int = MIN_8BIT_SIZE,
) -> dict[str, Any]:
    """The `state_dict()` of one AdamW, as another AdamW's `load_state_dict` takes it.

    Args:
        state_dict: of an optimizer, keyed by number (PyTorch) or by parameter name (Composer, FSDP). Not changed.
        source: which optimizer wrote it, a key of `OPTIMIZERS`; torch's AdamW and Composer's DecoupledAdamW cannot
            be told apart by their states, and mean different things by `weight_decay`.
        target: which is to read it.
        parameters: by the same keys; their shapes are checked, and torch's moments get their dtype.
        keep_32_bit: patterns of keys, such as `"*embeddings*"`, that stay in 32 bits under `adamw_8bit`.
        min_8bit_size: tensors of fewer elements stay in 32 bits under `adamw_8bit`.

    Raises:
        CheckpointError: the state is not what `source` says, does not fit `parameters`, or uses what `target` lacks.
        ConflictError: the moments of a float16 parameter would vanish in float16.

    >>> layer = torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> state = convert_optimizer_state(optimizer.state_dict(), "adamw", "bnb_adamw")
    >>> sorted(state["state"][0]), state["state"][0]["step"]
    (['__bnb_optimizer_quant_state__', 'step'], 1)
    """
    source, target = _known(source), _known(target)
    return _convert(state_dict, source, target, parameters, keep_32_bit, min_8bit_size)[0]


def _convert(
    state_dict: Mapping[str, Any],
    source: str,
    target: str,
    parameters: Mapping[Any, torch.Tensor] | None,
    keep_32_bit: Collection[str | int],
    min_8bit_size: int,
) -> tuple[dict[str, Any], Conversion]:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise CheckpointError("an optimizer's state has the entries 'state' and 'param_groups'; this has not")
    codes = _code_books() if target == "adamw_8bit" else None
    group_of: dict[Any, dict[str, Any]] = {}
    groups = []
    for group in state_dict["param_groups"]:
        groups.append(_convert_group(group, source, target))
        group_of.update(dict.fromkeys(group["params"], group))
    states, steps, in_8_bits = {}, {}, 0
    for key, packed in state_dict["state"].items():
        moments = _read(key, packed, source, group_of.get(key, {}))
        like = moments.exp_avg if parameters is None else _matching(key, moments, parameters)
        layout = _LAYOUT.get(target, "torch")
        if layout == "bnb8" and (like.numel() < min_8bit_size or _matches(key, keep_32_bit)):
            layout = "bnb32"
        in_8_bits += layout == "bnb8"
        states[key] = _pack(write_moments(moments, layout, like, qmaps=codes), target)
        steps[key] = moments.step
    if target == "apex_fused_adamw":
        _steps_to_groups(groups, steps)
    summary = Conversion(source, target, len(states), in_8_bits, max(steps.values(), default=0))
    return {**state_dict, "state": states, "param_groups": groups}, summary


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    overwrite: bool = False,
    keep_32_bit: Collection[str] = EMBEDDINGS,
    min_8bit_size: int = MIN_8BIT_SIZE,
    allow: Sequence[str] = (),
) -> Conversion:
    """Write `target`, which is the Composer checkpoint `source` with its optimizer's state as that of `to`.

    All else in it stays: weights, schedulers, random state, place in the data. The file is read without running
    code from it, and `target` appears when it is complete, or not at all.

    Args:
        source: a `.pt` file that Composer's Trainer saved.
        target: the file to write.
        to: the optimizer that is to go on, a key of `OPTIMIZERS`.
        overwrite: write `target` even if it exists; it may be `source` itself.
        keep_32_bit: patterns of parameter names that stay in 32 bits under `adamw_8bit`.
        min_8bit_size: tensors of fewer elements stay in 32 bits under `adamw_8bit`.
        allow: further classes that may be made from the file, as `module.Class`, where callbacks of your own left them.

    Raises:
        CheckpointError: the file cannot be read or converted, or the target cannot be written.
    """
    to, source, target = _known(to), Path(source), Path(target)
    if (target.exists() or target.is_symlink()) and not overwrite:
        raise CheckpointError(f"{target} exists: choose another name, or add --overwrite")
    try:
        checkpoint = read_file(source, allow)
    except Unsafe as error:
        flags = " ".join(f"--allow {name}" for name in error.names)
        raise CheckpointError(f"{error}. If you trust where the file comes from: {flags}") from error
    state = checkpoint.get("state") if isinstance(checkpoint, Mapping) else None
    if not isinstance(state, dict) or "timestamp" not in state or "model" not in state:
        raise CheckpointError(f"{source} is no Composer checkpoint: it lacks state/model or state/timestamp")
    optimizers = state.get("optimizers")
    if not isinstance(optimizers, dict) or not optimizers:
        raise CheckpointError(f"{source} holds no optimizer state (saved with save_weights_only?): nothing to convert")
    if len(optimizers) > 1:
        raise CheckpointError(f"{source} holds {len(optimizers)} optimizers, {', '.join(optimizers)}: one is expected")
    [(name, stored)] = optimizers.items()
    try:
        was = _recognise(name, stored)
        if was == to:
            raise CheckpointError(f"the optimizer state is {to} already: load it as it is")
        weights = {key: value for key, value in state["model"].items() if isinstance(value, torch.Tensor)}
        kept = {key for key in stored["state"] if _is_kept(key, weights, keep_32_bit)}
        converted, summary = _convert(stored, was, to, weights or None, kept, min_8bit_size)
    except (CheckpointError, ConflictError) as error:
        raise CheckpointError(f"{source}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{source}: its optimizer state is damaged: {type(error).__name__}: {error}") from error
    state["optimizers"] = {OPTIMIZERS[to]: converted}
    write_file(checkpoint, target, overwrite=overwrite)
    return summary


def _known(name: str) -> str:
    name = _ALIASES.get(name, name)
    if name not in OPTIMIZERS:
        raise CheckpointError(f"unknown optimizer {name!r}: choose one of {', '.join([*OPTIMIZERS, *_ALIASES])}")
    return name


def _recognise(name: str, stored: Any) -> str:
    """Which optimizer wrote what Composer stores under this class name."""
    if not isinstance(stored, Mapping) or not isinstance(stored.get("state"), Mapping):
        raise CheckpointError("an optimizer's state has the entries 'state' and 'param_groups'; this has not")
    if name == "AdamW32bit":  # bitsandbytes has two names for it
        return "bnb_adamw"
    if name == "AdamW":
        is_bnb = any(layout_of(_flat(s)).startswith("bnb") for s in stored["state"].values())
        return "bnb_adamw" if is_bnb else "adamw"
    for key, qualname in OPTIMIZERS.items():
        if name == qualname:
            return key
    known = ", ".join(sorted(set(OPTIMIZERS.values())))
    raise CheckpointError(f"the state of the optimizer {name} is not known here: it can be one of {known}")


# ---- one parameter's state


def _flat(state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a parameter's state is {type(state).__name__}, not a dictionary")
    return {**{k: v for k, v in state.items() if k != _NESTED}, **state.get(_NESTED, {})}


def _pack(state: dict[str, Any], target: str) -> dict[str, Any]:
    if target not in ("bnb_adamw", "adamw_8bit"):
        return state
    return {"step": state.pop("step"), _NESTED: state}


def _read(key: Hashable, packed: Any, source: str, group: dict[str, Any]) -> Moments:
    state = _flat(packed)
    try:
        layout = layout_of(state)
        expected = {_LAYOUT.get(source, "torch")} | ({"bnb32"} if source == "adamw_8bit" else set())
        if layout not in expected:
            raise ValueError(f"it is in the format {layout}, not that of {source}")
        moments = read_moments(state, group)
        if moments.exp_avg.shape != moments.exp_avg_sq.shape:
            raise ValueError(f"its moments differ in shape: {moments.exp_avg.shape}, {moments.exp_avg_sq.shape}")
    except KeyError as error:
        raise CheckpointError(f"the state of {key} is damaged: it lacks {error}") from error
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the state of {key} is damaged: {error}") from error
    return moments


def _matching(key: Hashable, moments: Moments, parameters: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    if key not in parameters:
        raise CheckpointError(f"the optimizer's state is another model's: the model has no parameter {key}")
    shape, expected = tuple(moments.exp_avg.shape), tuple(parameters[key].shape)
    if shape != expected:
        raise CheckpointError(f"the optimizer's state is another model's: {key} is {expected}, its moments are {shape}")
    return parameters[key]


def _matches(key: Hashable, patterns: Collection[str | int]) -> bool:
    return key in patterns or any(fnmatchcase(str(key), str(pattern)) for pattern in patterns)


def _is_kept(key: Hashable, weights: Mapping[str, torch.Tensor], patterns: Collection[str]) -> bool:
    """Whether `key`, or a weight tied to it, matches: the optimizer may know an embedding as the decoder's weight."""
    own = weights.get(key)  # type: ignore[call-overload]
    tied = [k for k, w in weights.items() if own is not None and w.numel() and w.data_ptr() == own.data_ptr()]
    return any(_matches(name, patterns) for name in [key, *tied])


def _code_books() -> tuple[torch.Tensor, torch.Tensor]:
    import bitsandbytes.functional as bnb

    return bnb.create_dynamic_map(signed=True), bnb.create_dynamic_map(signed=False)


# ---- parameter groups


def _defaults(optimizer: str) -> dict[str, Any]:
    """What a group of this optimizer holds if nothing is asked for; read off the installed version's class."""
    if optimizer == "apex_fused_adamw":
        return {"bias_correction": True}
    if optimizer == "decoupled_adamw":
        from composer.optim import DecoupledAdamW as cls
    elif optimizer == "adamw":
        from torch.optim import AdamW as cls
    else:
        import bitsandbytes.optim

        cls = getattr(bitsandbytes.optim, OPTIMIZERS[optimizer])
    return dict(cls([torch.nn.Parameter(torch.zeros(1))]).defaults)


def _convert_group(group: Mapping[str, Any], source: str, target: str) -> dict[str, Any]:
    unsupported = ("maximize", "differentiable") if target in _TORCH else ("amsgrad", "maximize", "differentiable")
    for flag in unsupported:
        if target != "adamw" and group.get(flag):
            raise CheckpointError(f"{target} has no {flag}=True, which a parameter group sets")
    implementation = (set(_defaults(source)) | {"step"}) - set(_SHARED)
    new = {key: value for key, value in group.items() if key not in implementation}
    rate = float(group["lr"])
    if target not in _TORCH:
        new["lr"] = rate
    initial = float(group.get("initial_lr", rate))
    if source == "decoupled_adamw" and group["weight_decay"]:
        if not initial:
            raise CheckpointError("DecoupledAdamW decays at a learning rate of 0, which no other AdamW does")
        new["weight_decay"] = group["weight_decay"] / initial
    if target == "decoupled_adamw":
        new["initial_lr"] = initial
        new["weight_decay"] = new["weight_decay"] * initial
    missing = {key: value for key, value in _defaults(target).items() if key not in new}
    if source in _TORCH and target in _TORCH:
        missing["amsgrad"] = group.get("amsgrad", False)
    return new | missing


def _steps_to_groups(groups: list[dict[str, Any]], steps: Mapping[Any, int]) -> None:
    for group in groups:
        found = {steps[key] for key in group["params"] if key in steps}
        if len(found) > 1:
            raise CheckpointError(f"Apex keeps one step for a group, its parameters are at the steps {sorted(found)}")
        group["step"] = found.pop() if found else 0
