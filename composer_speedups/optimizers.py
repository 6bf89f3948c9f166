"""Turn a user's AdamW into another AdamW, in place.

The optimizer *object* stays and becomes an instance of the other class. Everything that holds on to it keeps
working: Composer's schedulers and PyTorch's (which would otherwise go on adjusting an optimizer that nobody
steps, so that the learning rate silently stays constant), the GradScaler, FSDP, and the user's own variable.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from composer.core import Event, State
from composer.loggers import Logger
from torch.optim import Optimizer

from composer_speedups.arguments import check_flag
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.optimizer_loading import Loading, another_way, is_resumed_by_train, source
from composer_speedups.optimizer_states import Layout, read_moments, write_moments
from composer_speedups.speedup import SpeedUp, Stage

__all__ = [
    "OptimizerSpeedUp",
    "become",
    "become_torch",
    "describe",
    "is_adamw",
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


def _family(optimizer: Optimizer) -> str | None:
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
    return _family(optimizer) is not None


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
    family = _family(optimizer)
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
def _groups_kept_on_error(optimizer: Optimizer) -> Iterator[None]:
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
    if _family(optimizer) == "decoupled" and defaults["lr"]:
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


class OptimizerSpeedUp(SpeedUp):
    """Base of the speed-ups that change which AdamW runs.

    A subclass names its plain function in `convert`, and what a group of torch's AdamW must hold in `flags`: loading a
    checkpoint brings the groups of the file back, so they are set again after it. One that computes another update than
    AdamW says by `knows` which optimizers it makes, and by `check_moments` what a file must hold (`adafactor.py`).

    Args:
        no_decay_on_bias_and_norm: take the weight decay off parameters of fewer than two dimensions. A checkpoint
            saved with another value loads, with this one's weight decay. Only a Trainer without this package, which
            has one group again, would take the one without decay for all: give it `load_ignore_keys` or two groups.
            Sharded files of FSDP2 (`state_dict_type="sharded"`) load with the value that they were saved with.
    """

    stage = Stage.OPTIMIZER
    slot = "optimizer"
    events = frozenset({Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.BEFORE_DATALOADER})
    flags: ClassVar[dict[str, Any]] = {}

    def __init__(self, no_decay_on_bias_and_norm: bool = False) -> None:
        self.no_decay_on_bias_and_norm = check_flag("no_decay_on_bias_and_norm", no_decay_on_bias_and_norm)

    def state_bytes(self, model: torch.nn.Module, trained: Sequence[torch.Tensor]) -> int:
        """Bytes of the state that the optimizer keeps for the parameters `trained` of `model`."""
        return adamw_state_bytes(trained)

    def step_bytes(self, trained: Sequence[torch.Tensor]) -> int:
        """Bytes that a step takes for itself for a while, beyond parameters, gradients and state."""
        return 0

    @abstractmethod
    def convert(self, optimizer: Optimizer, model: torch.nn.Module) -> int:
        """Change `optimizer` in place; return for how many parameters the update is now another one's."""

    def install(self, state: State, logger: Logger) -> None:
        if not state.optimizers:
            raise SpeedUpUnavailable(f"{self!r} found no optimizer. Pass one to the Trainer: optimizers=AdamW(...).")
        optimizer = state.optimizers[0]
        before = describe(optimizer)
        if not is_adamw(optimizer):
            hint = (
                " (Composer's default, used because the Trainer got no optimizers=)"
                if type(optimizer).__name__ == "DecoupledSGDW"
                else ""
            )
            self.report(
                logger,
                0,
                f"the optimizer is {before}{hint}, not torch.optim.AdamW or Composer's DecoupledAdamW",
                optimizer=before,
            )
            return
        with _groups_kept_on_error(optimizer):
            moved = split_off_no_decay(optimizer) if self.no_decay_on_bias_and_norm else 0
            changed = self.convert(optimizer, state.model)
        self.report(
            logger,
            changed + moved,
            f"the optimizer is {before} already",
            optimizer=describe(optimizer),
            optimizer_before=before,
            moved_to_no_decay=moved,
        )

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BEFORE_LOAD:
            self._check_schedulers(state.schedulers, state.optimizers)
        elif (checkpoint := Loading.end(state)) is not None and (event is Event.AFTER_LOAD or checkpoint.asked):
            self.check_moments(state, checkpoint)
            checkpoint.restore_groups(state)
            reassert(checkpoint.optimizer, self.flags)
        if event in (Event.BEFORE_LOAD, Event.AFTER_LOAD) and self.knows(state.optimizers[0]):
            Loading(state)

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether `optimizer` is one that this makes, or would have made had it not been one before."""
        return is_adamw(optimizer)

    def check_moments(self, state: State, checkpoint: Loading) -> None:
        """Raise if a checkpoint in mid-training was loaded, and its moments were another optimizer's."""
        _refuse_lost_moments(state, checkpoint)

    def _check_schedulers(self, schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
        # A PyTorch scheduler made before the split would set the rates of the first groups only, silently.
        for scheduler in schedulers:
            rates = len(getattr(scheduler, "base_lrs", optimizers[0].param_groups))
            if self.no_decay_on_bias_and_norm and rates != len(optimizers[0].param_groups):
                raise ConflictError(
                    f"no_decay_on_bias_and_norm=True splits the parameter groups, and {type(scheduler).__name__} was "
                    f"made for {rates}. Use a Composer scheduler, or give the groups to AdamW yourself."
                )


def adamw_state_bytes(trained: Sequence[torch.Tensor], step: int = 4) -> int:
    """Bytes of AdamW's two moments in float32, and of a count of steps for each parameter: torch has a tensor for it.

    >>> adamw_state_bytes([torch.zeros(10), torch.zeros(2)])
    104
    """
    return sum(8 * parameter.numel() + step for parameter in trained)


def sizes(trained: Sequence[torch.Tensor]) -> list[int]:
    """Bytes of each parameter."""
    return [parameter.numel() * parameter.element_size() for parameter in trained]


def _refuse_lost_moments(state: State, checkpoint: Loading) -> None:
    """Raise if a checkpoint in mid-training was loaded, and its moments were not, as they were another optimizer's.

    Composer stores an optimizer's state under the name of its class, and goes on with empty moments if it finds
    another name there: the loss then jumps, and nobody knows why. torch and bitsandbytes share the name AdamW: then
    the wrong entries are loaded, and the first step fails.
    """
    optimizer = checkpoint.optimizer
    family = _family(optimizer)
    if family is None or not state.timestamp.batch.value:
        return
    entry = "state1" if family == "bnb" else "exp_avg"
    if optimizer.state and all(entry in moments for moments in optimizer.state.values()):
        return
    if not checkpoint.lost(state):
        return
    to = {"torch": "adamw", "decoupled": "decoupled_adamw", "apex": "apex_fused_adamw"}.get(family) or (
        "adamw_8bit" if type(optimizer).__name__ == "AdamW8bit" else "bnb_adamw"
    )
    path = str(state.load_path or "FILE.pt")
    target, options = f"{path.removesuffix('.pt')}-{to}.pt", ""
    if is_resumed_by_train(state):
        target, options = path, " --overwrite"  # it would never look at another name
    raise ConflictError(
        f"{source(state)} holds no state of {describe(optimizer)}: it was saved with another optimizer. Convert "
        f"it: `composer-speedups convert-checkpoint {shlex.quote(path)} {shlex.quote(target)} --to {to}{options}`; or "
        f"use that optimizer's speed-up; or {another_way(state)}."
    )


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
