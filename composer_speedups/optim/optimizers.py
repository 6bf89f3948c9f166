"""Turn a user's AdamW into another AdamW, in place.

The optimizer *object* stays and becomes an instance of the other class. Everything that holds on to it keeps
working: Composer's schedulers and PyTorch's (which would otherwise go on adjusting an optimizer that nobody
steps, so that the learning rate silently stays constant), the GradScaler, FSDP, and the user's own variable.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.optim.states import Layout, read_moments, write_moments

__all__ = [
    "become",
    "become_torch",
    "describe",
    "family_of",
    "groups_kept_on_error",
    "is_adamw",
    "reassert",
    "refuse_other",
    "refuse_unsupported",
    "split_off_no_decay",
    "torch_groups",
]

# What torch's AdamW keeps in a group beyond the hyper-parameters that every AdamW has.
_TORCH_FLAGS = (
    "amsgrad",
    "foreach",
    "maximize",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
)
_BNB_FLAGS = ("alpha", "t_alpha", "t_beta3")
_APEX_FLAGS = ("bias_correction", "step")


def family_of(optimizer: Optimizer) -> str | None:
    """`torch`, `decoupled`, `bnb` or `apex` for exactly those classes; None for all others, subclasses too."""
    cls = type(optimizer)
    if cls is torch.optim.AdamW:
        return "torch"
    if cls.__module__ == "composer.optim.decoupled_weight_decay" and cls.__name__ == "DecoupledAdamW":
        return "decoupled"
    if cls.__module__ == "bitsandbytes.optim.adamw" and cls.__name__ in (
        "AdamW",
        "AdamW8bit",
        "AdamW32bit",
    ):
        return "bnb"
    if cls.__module__.startswith("apex.") and cls.__name__ == "FusedAdam":
        return "apex" if getattr(optimizer, "adam_w_mode", 1) else None
    return None


def is_adamw(optimizer: Optimizer) -> bool:
    """Whether this is an AdamW whose groups and moments are understood here."""
    return family_of(optimizer) is not None


def refuse_other(optimizer: Optimizer) -> None:
    """Raise unless `optimizer` is an AdamW that is known here: to convert another would change what it computes."""
    if is_adamw(optimizer):
        return
    cls = type(optimizer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if cls.__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        raise SpeedUpUnavailable(
            f"the optimizer is accelerate's {cls.__name__}, which would no longer be one: apply this before "
            "accelerator.prepare"
        )
    raise SpeedUpUnavailable(
        f"the optimizer is {name}, which may compute another update than AdamW. Make it torch.optim.AdamW, or leave "
        "this speed-up out"
    )


def torch_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups as torch's AdamW would hold them, without implementation flags.

    Parameters, learning rates and all the user's own entries stay. Composer's DecoupledAdamW multiplies weights
    by `1 - lr / initial_lr * weight_decay`, torch by `1 - lr * weight_decay`: with `weight_decay / initial_lr`
    the two are the same at every learning rate of a schedule.

    Raises:
        ConflictError: a decoupled weight decay with an initial learning rate of 0 has no such equivalent.
    """
    family = family_of(optimizer)
    groups = []
    for group in optimizer.param_groups:
        own = _TORCH_FLAGS + _BNB_FLAGS + (_APEX_FLAGS if family == "apex" else ())
        new = {key: value for key, value in group.items() if key not in own}
        new["lr"] = group["lr"] if isinstance(group["lr"], torch.Tensor) else float(group["lr"])
        if family == "decoupled" and group["weight_decay"] != 0:
            initial = group.get("initial_lr", group["lr"])
            if not initial:
                raise ConflictError(
                    f"DecoupledAdamW with weight_decay={group['weight_decay']} and an initial learning rate of 0 "
                    "decays without learning; no other AdamW does. Set weight_decay=0 for that group."
                )
            new["weight_decay"] = group["weight_decay"] / initial
        groups.append(new)
    return groups


def torch_adamw(optimizer: Optimizer, *, foreach: bool, fused: bool) -> Optimizer:
    """A `torch.optim.AdamW` with the groups of `optimizer` and the given implementation; no state yet."""
    flags = [
        {key: group.get(key, False) for key in ("amsgrad", "maximize", "differentiable", "capturable")}
        for group in optimizer.param_groups
    ]
    groups = [group | flag for group, flag in zip(torch_groups(optimizer), flags, strict=True)]
    return torch.optim.AdamW(groups, foreach=foreach, fused=fused)


def refuse_unsupported(optimizer: Optimizer, what: str) -> None:
    """Raise if a group asks for what only torch's AdamW computes."""
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "maximize", "differentiable"):
            if group.get(flag):
                remedy = "Unset it." if flag == "differentiable" else "Use fused_adamw or foreach_adamw."
                raise SpeedUpUnavailable(f"{what} has no {flag}=True, which your AdamW sets. {remedy}")
        for parameter in group["params"]:
            if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise SpeedUpUnavailable(
                    f"{what} has no kernel for {parameter.dtype} parameters. Use fused_adamw or foreach_adamw."
                )


def split_off_no_decay(optimizer: Optimizer) -> int:
    """Move biases and norms (all parameters of fewer than two dimensions) to groups without weight decay.

    Each group that decays and holds such parameters is split; the new groups stand at the end. Returns how many
    parameters were moved. Decaying a bias or a norm's scale pulls the output towards zero without regularising
    the function; BERT's own recipe leaves them out.
    """
    moved = 0
    for group in list(optimizer.param_groups):
        small = [p for p in group["params"] if p.ndim < 2]
        if not small or not group["weight_decay"]:
            continue
        moved += len(small)
        if len(small) == len(group["params"]):
            group["weight_decay"] = 0.0
            continue
        group["params"] = [p for p in group["params"] if p.ndim >= 2]
        optimizer.param_groups.append({**group, "params": small, "weight_decay": 0.0})
    return moved


@contextlib.contextmanager
def groups_kept_on_error(optimizer: Optimizer) -> Iterator[None]:
    """What is refused leaves the user's groups as they were, and the same objects: schedulers hold them."""
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    try:
        yield
    except BaseException:
        for group, before in groups:
            group.clear()
            group.update(before)
        optimizer.param_groups[:] = [group for group, _ in groups]
        raise


def become(optimizer: Optimizer, template: Optimizer, layouts: dict[torch.Tensor, Layout]) -> None:
    """Make `optimizer` what `template` is, keeping its identity, its moments and its hooks.

    Args:
        optimizer: the user's; changed in place.
        template: a fresh optimizer over the same parameters; not to be used afterwards.
        layouts: in which layout the template expects each parameter's moments.
    """
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    for group in template.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            moments = read_moments(state, group_of[parameter])
            template.state[parameter] = write_moments(
                moments,
                layouts[parameter],
                parameter,
                step_on_device=bool(group.get("fused") or group.get("capturable")),
                qmaps=_qmaps(template),
            )
            if layouts[parameter] == "apex":
                group["step"] = moments.step
    template.defaults.update(_shared_defaults(optimizer, template))
    old = vars(optimizer)
    kept = {name: old[name] for name in old if name.endswith("_hooks") or name == "_opt_called"}
    watched = hasattr(old.get("step"), "_wrapped_by_lr_sched")
    optimizer.__class__ = type(template)
    optimizer.__dict__ = {**vars(template), **kept}
    if watched:
        _watch_step(optimizer)


def _shared_defaults(optimizer: Optimizer, template: Optimizer) -> dict[str, Any]:
    """What groups that are added later get of `optimizer`, where its user has not said it for them."""
    defaults = {key: value for key, value in optimizer.defaults.items() if key in template.defaults}
    for flag in ("foreach", "fused", "decoupled_weight_decay"):  # of the implementation, which is to be another
        defaults.pop(flag, None)
    if family_of(optimizer) == "decoupled" and defaults["lr"]:
        defaults["weight_decay"] /= defaults["lr"]  # as `torch_groups` has it
    return defaults


def become_torch(optimizer: Optimizer, *, foreach: bool, fused: bool) -> int:
    """Make any AdamW torch's, in the given implementation; return how many parameters it updates, 0 if it was so.

    Raises:
        SpeedUpUnavailable: the optimizer is no AdamW (`refuse_other`), or one with `differentiable=True`.
    """
    refuse_other(optimizer)
    groups = optimizer.param_groups
    if type(optimizer) is torch.optim.AdamW and all(
        bool(g["foreach"]) == foreach and bool(g["fused"]) == fused for g in groups
    ):
        return 0
    if any(group.get("differentiable") for group in groups):
        raise SpeedUpUnavailable("your AdamW sets differentiable=True, which only its for-loop computes. Unset it")
    if foreach and any(isinstance(g["lr"], torch.Tensor) and not g.get("capturable") for g in groups):
        raise SpeedUpUnavailable(
            "PyTorch's foreach AdamW takes a learning rate that is a tensor with capturable=True only. Make it a "
            "number, or use fused_adamw"
        )
    template = torch_adamw(optimizer, foreach=foreach, fused=fused)
    parameters = [p for g in groups for p in g["params"]]
    become(optimizer, template, dict.fromkeys(parameters, "torch"))
    return len(parameters)


def _qmaps(optimizer: Optimizer) -> tuple[torch.Tensor, torch.Tensor] | None:
    maps = getattr(optimizer, "name2qmap", None)
    return (maps["dynamic"], maps["udynamic"]) if maps else None


def _watch_step(optimizer: Optimizer) -> None:
    """Wrap `step` as PyTorch's schedulers do: they warn about a wrong order of calls if it is not.

    The wrapper they made calls the *old* class's step, hence a new one.
    """
    step = type(optimizer).step
    reference = weakref.ref(optimizer)

    @functools.wraps(step)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        this = reference()
        assert this is not None
        this._opt_called = True  # type: ignore[attr-defined]
        return step.__get__(this, type(this))(*args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = wrapper  # type: ignore[method-assign]


def reassert(optimizer: Optimizer, flags: dict[str, Any]) -> None:
    """Set implementation flags again, and put each step where they need it: a loaded file has undone both."""
    if type(optimizer) is not torch.optim.AdamW:
        return
    for group in optimizer.param_groups:
        group.update(flags)
        on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                step = torch.as_tensor(state["step"], dtype=torch.float32)
                state["step"] = step.to(parameter.device if on_device else "cpu")


def describe(optimizer: Optimizer) -> str:
    """The class and the implementation that its groups ask for: `torch AdamW (fused)`."""
    cls = type(optimizer)
    name = f"{cls.__module__.partition('.')[0]} {cls.__name__}"
    if cls is not torch.optim.AdamW:
        return name
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return f"{name} (fused)"
    if group.get("foreach"):
        return f"{name} (foreach)"
    return f"{name} (for-loop)" if group.get("foreach") is False else f"{name} (torch's default)"
