"""One reading of Adam's moments for every optimizer that keeps them.

torch AdamW (any flags), Composer's DecoupledAdamW, bitsandbytes 32-bit and 8-bit, and Apex FusedAdam compute
the same update from the same two moments, and store them under different names and in different formats.
`read_moments` and `write_moments` translate between a stored state and plain float tensors, so that a swap
of optimizers keeps what was accumulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from composer_speedups.errors import ConflictError

__all__ = [
    "BLOCK_SIZE",
    "MIN_8BIT_SIZE",
    "Layout",
    "Moments",
    "layout_of",
    "read_moments",
    "write_moments",
]

Layout = Literal["torch", "bnb32", "bnb8", "apex"]

BLOCK_SIZE = 256  # elements that share one scale in bitsandbytes' block-wise optimizers
MIN_8BIT_SIZE = 4096  # bitsandbytes keeps smaller tensors in 32 bits


@dataclass
class Moments:
    """What Adam knows about one parameter.

    Attributes:
        step: updates done so far.
        exp_avg: running mean of the gradient; the parameter's shape.
        exp_avg_sq: running mean of its square; the parameter's shape.
        max_exp_avg_sq: AMSGrad's running maximum, or None.
    """

    step: int
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None = None


def layout_of(state: dict[str, Any]) -> Layout:
    """Tell from a parameter's state which kind of optimizer wrote it; ValueError if none known did."""
    if "state1" in state:
        return "bnb8" if state["state1"].dtype == torch.uint8 else "bnb32"
    if "exp_avg" in state:
        return "torch" if "step" in state else "apex"
    raise ValueError(
        f"no AdamW state known here has the entries {sorted(state)}: expected exp_avg and exp_avg_sq "
        "(torch, Composer, Apex) or state1 and state2 (bitsandbytes)"
    )


def read_moments(state: dict[str, Any], group: dict[str, Any] | None = None) -> Moments:
    """Read one parameter's moments.

    Args:
        state: the parameter's entry in `optimizer.state`, or in a saved state dict.
        group: its parameter group; Apex keeps the step there.
    """
    layout = layout_of(state)
    if layout == "bnb8":
        return Moments(int(state["step"]), _dequantize(state, "1"), _dequantize(state, "2"))
    if layout == "bnb32":
        return Moments(int(state["step"]), state["state1"], state["state2"])
    step = state["step"] if layout == "torch" else (group or {}).get("step", 0)
    return Moments(int(step), state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq"))


def write_moments(
    moments: Moments,
    layout: Layout,
    parameter: torch.Tensor,
    *,
    step_on_device: bool = False,
    qmaps: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Write one parameter's moments in the given layout.

    Args:
        moments: what to write.
        layout: whose format.
        parameter: gives the device and, for torch's layout, the dtype of the moments.
        step_on_device: fused and capturable AdamW keep the step beside the parameter, the others on the CPU.
        qmaps: the signed and the unsigned 8-bit code book (`optimizer.name2qmap`), for `bnb8`.

    Raises:
        ConflictError: torch's layout would have them in float16, in which some squares of gradients are zero.
    """
    device = parameter.device
    if layout in ("bnb32", "bnb8"):
        first, second = (m.to(device, torch.float32).contiguous() for m in (moments.exp_avg, moments.exp_avg_sq))
        state: dict[str, Any] = {"step": moments.step}
        if layout == "bnb32":
            # Clones: two optimizers must not write to the same moments.
            return state | {"state1": first.clone(), "state2": second.clone()}
        assert qmaps is not None, "bnb8 needs the optimizer's code books"
        for number, value, qmap in (("1", first, qmaps[0]), ("2", second, qmaps[1])):
            state |= _quantize(value, qmap.to(device), number)
        return state
    # Adam's own rule: moments have the parameter's dtype.
    if parameter.dtype == torch.float16 and moments.exp_avg_sq.dtype != torch.float16:
        square = moments.exp_avg_sq
        if bool(((square != 0) & (square.to(torch.float16) == 0)).any()):  # the next update would divide by eps
            raise ConflictError(
                f"the optimizer's moments of a float16 parameter of shape {tuple(parameter.shape)} would be kept in "
                "float16, where squares of small gradients are zero. Keep the weights in float32 (mixed_precision "
                "computes in 16 bits), or this optimizer"
            )
    state = {
        "exp_avg": moments.exp_avg.to(device, parameter.dtype, copy=True),
        "exp_avg_sq": moments.exp_avg_sq.to(device, parameter.dtype, copy=True),
    }
    if layout == "torch":
        where = device if step_on_device else "cpu"
        state = {"step": torch.tensor(float(moments.step), dtype=torch.float32, device=where)} | state
        if moments.max_exp_avg_sq is not None:
            state["max_exp_avg_sq"] = moments.max_exp_avg_sq.to(device, parameter.dtype, copy=True)
    return state


def _quantize(value: torch.Tensor, qmap: torch.Tensor, number: str) -> dict[str, torch.Tensor]:
    import bitsandbytes.functional as bnb

    codes, quant_state = bnb.quantize_blockwise(value, code=qmap, blocksize=BLOCK_SIZE)
    return {
        f"state{number}": codes.reshape(value.shape),
        f"qmap{number}": qmap,
        f"absmax{number}": quant_state.absmax.float(),
    }


def _dequantize(state: dict[str, Any], number: str) -> torch.Tensor:
    import bitsandbytes.functional as bnb

    codes, scales = state[f"state{number}"], state[f"absmax{number}"]
    blocks = -(-codes.numel() // BLOCK_SIZE)
    if scales.numel() != blocks or state[f"qmap{number}"].numel() != 256:  # the kernel would read beyond them
        raise ValueError(f"{codes.numel()} elements in 8 bits need {blocks} scales and 256 codes")
    value = bnb.dequantize_blockwise(
        codes.contiguous(),
        absmax=scales,
        code=state[f"qmap{number}"],
        blocksize=BLOCK_SIZE,
    )
    return value.reshape(codes.shape).float()
