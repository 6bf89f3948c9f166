"""Loss and gradients of a model in float64, and how far those of another precision are from them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from composer.models import ComposerModel
from composer.utils import dist

from composer_speedups.everyone import everyones, summed
from composer_speedups.verification.findings import Errors

__all__ = [
    "Gradients",
    "averaged",
    "errors",
    "gradients",
    "loss_of",
    "mapped",
    "placed",
    "tensors_of",
    "without_dropout",
]


@dataclass(frozen=True)
class Gradients:
    """Of one batch.

    Attributes:
        loss: the batch's.
        tensors: by parameter, those that have one; on the CPU, in the precision of the weights.
    """

    loss: float
    tensors: dict[str, torch.Tensor]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and all(bool(g.isfinite().all()) for g in self.tensors.values())


def errors(found: Gradients, true: Gradients) -> Errors:
    """The errors of `found`, of which a parameter without a gradient counts as one of zeros.

    >>> one = Gradients(2.0, {"weight": torch.tensor([3.0, 4.0]).double()})
    >>> errors(Gradients(2.1, {"weight": torch.tensor([3.0, 4.5]).double()}), one).gradients
    0.1
    """
    tensors, norms = {}, {}
    for name in {**true.tensors, **found.tensors}:
        here, there = (
            tensor.double() if (tensor := of.tensors.get(name)) is not None else None for of in (found, true)
        )
        difference = there if here is None else here if there is None else here - there
        assert difference is not None
        tensors[name] = float(difference.norm())
        norms[name] = 0.0 if there is None else float(there.norm())
    return Errors(
        loss=abs(found.loss - true.loss) / max(abs(true.loss), 1e-30),
        gradients=math.hypot(*tensors.values()) / max(math.hypot(*norms.values()), 1e-30),
        tensors=tensors,
        norms=norms,
    )


def gradients(
    model: ComposerModel,
    batch: Any,
    weights: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
    loss_scale: float = 1.0,
) -> Gradients:
    """What a copy of `model` with `weights` has for `batch`, in training, all of it at once.

    Args:
        model: stays as it is.
        batch: as the model takes it.
        weights: by parameter; others keep the model's. Gradients are of these.
        dtype: of the weights.
        device: where it is computed.
        autocast: under autocast to this; None goes without.
        loss_scale: what the loss is multiplied by before the backward pass, and the gradients are divided by after it.
    """
    twin, loss = _forward(model, batch, weights, dtype, torch.device(device), autocast)
    (loss * loss_scale).backward()
    found = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None and name in weights}
    return Gradients(float(loss.detach()), {name: grad.detach().cpu() / loss_scale for name, grad in found.items()})


def averaged(found: Gradients, share: float, sent_in: torch.dtype | None = None, loss_scale: float = 1.0) -> Gradients:
    """What all ranks have together, each of which has `found` for its part of a batch. For all ranks to call.

    Args:
        found: of this rank's part; a parameter without a gradient counts as one of zeros.
        share: of this part in the batch; those of all ranks add up to 1.
        sent_in: what gradients are rounded to on their way, as DDP's hooks round them; None keeps their precision.
        loss_scale: what they are multiplied by meanwhile.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return found
    kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for one in everyones({name: (tensor.shape, tensor.dtype) for name, tensor in found.tensors.items()}):
        kinds |= one
    tensors = {}
    for name, (shape, dtype) in sorted(kinds.items()):
        own = found.tensors.get(name)
        part = torch.zeros(shape, dtype=dtype) if own is None else own * (share * ranks * loss_scale)
        tensors[name] = summed(part.to(sent_in or dtype).div_(ranks)).to(dtype) / loss_scale
    return Gradients(float(summed(torch.tensor(found.loss * share, dtype=torch.float64))), tensors)


def loss_of(model: ComposerModel, batch: Any, weights: Mapping[str, torch.Tensor]) -> float:
    """The loss alone, in float32 on the CPU."""
    with torch.no_grad():
        return float(_forward(model, batch, weights, torch.float32, torch.device("cpu"), None)[1])


def _forward(
    model: ComposerModel,
    batch: Any,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    autocast: torch.dtype | None,
) -> tuple[ComposerModel, torch.Tensor]:
    twin, batch = placed(model, batch, weights, dtype, device)
    twin.train().zero_grad(set_to_none=True)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        loss = twin.loss(twin(batch), batch)
    return twin, loss["total"] if isinstance(loss, dict) else loss


def placed(
    model: ComposerModel, batch: Any, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> tuple[ComposerModel, Any]:
    """A copy of `model` with `weights`, by parameter, where others keep the model's; and the batch beside it."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    batch = mapped(batch, lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype))
    return twin.to(device=device, dtype=dtype), batch


def mapped(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`batch` with each of its tensors changed, in plain containers: tokenizers' own are mappings, too."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, list):
        return [mapped(value, change) for value in batch]
    if isinstance(batch, tuple):  # named ones, too, become plain ones
        return tuple(mapped(value, change) for value in batch)
    return batch


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors of `batch`, in whatever containers."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(batch, note)
    return found


def without_dropout(model: torch.nn.Module) -> None:
    """Have nothing in `model` dropped, in training either, so that two passes are comparable.

    Dropout modules of whatever class, the rates that attention keeps by itself, and those of configurations.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            own = name == "p" and "dropout" in type(module).__name__.lower()
            if isinstance(value, float) and (own or _is_rate(name)):
                setattr(module, name, 0.0)
        config = getattr(module, "config", None)
        for name, value in list(vars(config).items()) if hasattr(config, "__dict__") else ():
            if isinstance(value, float) and _is_rate(name):
                setattr(config, name, 0.0)


def _is_rate(name: str) -> bool:
    return "dropout" in name or "drop_prob" in name
