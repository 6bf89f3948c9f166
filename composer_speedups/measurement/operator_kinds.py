"""Which kind of work an operator is: by its name, by what calls it, and in the backward pass by what caused it.

Operators inside others count with these where the outer one is a kind of work by itself (the random numbers inside a
dropout are dropout, the softmax inside attention is attention), and the backward pass counts with the operator of the
forward pass that caused it, which autograd's sequence numbers tell. What a checkpoint computes again in the backward
pass has the kinds that it had in the forward pass. What no rule knows is `other`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["AROUND", "HEAD", "INSIDE", "KINDS", "STEPS", "classify", "kinds", "without_node"]

KINDS = (
    "matmul",
    "attention",
    "norm",
    "dropout",
    "activation",
    "embedding",
    "loss and head",
    "compiled",
    "copies",
    "optimizer",
    "exchange",
    "data",
    "other",
    "loop",
    "idle",
)
HEAD = "composer_speedups: head"
STEPS = "composer_speedups: steps"
INSIDE = "composer_speedups: forward and backward"  # Composer runs both inside of the optimizer's step
AROUND = (STEPS, INSIDE, "DistributedDataParallel.forward")  # their own time is between operators: it is the loop's
_NODE = re.compile(r"^autograd::engine::evaluate_function: ")
_OPERATOR = 0  # PyTorch's RecordScope::FUNCTION; backward nodes have one of their own

# The first rule that is found in a name says its kind, and whether what the operator calls counts with it. A name with
# two kinds in it is a fusion, such as dropout_add_norm: it goes to the first here.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), kind, whole)
    for pattern, kind, whole in (
        (r"^enumerate\(DataLoader\)|DataLoaderIter", "data", True),
        # Of gradients between ranks: starting one, and DDP's copies into its buckets and out of them.
        (r"^(c10d|gloo|nccl):|^torch(::|\.)distributed(::|\.)", "exchange", True),
        (r"^Optimizer\.|_fused_adam|_foreach_|_amp_(foreach|update)", "optimizer", True),
        (rf"^{HEAD}$|cross_?entropy|nll_loss|log_?softmax|mse_loss|_FusedLoss", "loss and head", True),
        (r"scaled_?dot_?product|flash_attention|flash_attn|efficient_?attention|varlen_attention|packed_?attention"
         r"|_PerSequence|softmax|aten::(bmm|baddbmm)|Baddbmm|BmmBackward", "attention", True),
        (r"layer_?norm|batch_?norm|group_?norm|rms_?norm|add_norm|AddNorm", "norm", True),
        (r"dropout|bernoulli", "dropout", True),
        (r"gelu|relu|silu|swish|tanh|sigmoid|mish|aten::(elu|selu|celu|glu)\b", "activation", True),
        (r"embedding", "embedding", True),
        (r"^Torch-Compiled Region|CompiledFunction|^triton_|^TorchDynamo|^graph_\d|AOTAutograd|^## Call|inductor",
         "compiled", False),
        (r"aten::_?(linear|addmm|mm|mv|addmv|matmul|einsum|scaled_mm|addbmm|conv\w*)\b|mkldnn|cutlass|\bgemm"
         r"|^(Addmm|Mm|Linear|Conv)\w*Backward", "matmul", False),
        (r"aten::(to|_to_copy|copy_|contiguous|clone|cat|stack|detach|detach_|index|index_select|index_copy|gather"
         r"|scatter\w*|empty\w*|zeros\w*|zero_|ones\w*|full\w*|fill_|new_\w*|resize_|pin_memory|view\w*|_?reshape\w*"
         r"|_unsafe_view|t|transpose|permute|expand\w*|as_strided|select|slice|split\w*|unbind|unflatten|flatten"
         r"|squeeze|unsqueeze|narrow|chunk|alias|item|_local_scalar_dense|lift_fresh)$"
         r"|Memcpy|Memset|AccumulateGrad|^(To|ToCopy|Copy|Clone|View|Transpose|T|Index\w*|Slice|Select)Backward",
         "copies", False),
    )
)  # fmt: skip


def classify(name: str) -> str:
    """The kind of an operator by its name alone; `other` for those that no rule knows.

    >>> classify("aten::addmm"), classify("composer_speedups::layer_norm"), classify("mine::stencil")
    ('matmul', 'norm', 'other')
    """
    return _rule(name)[0]


def _rule(name: str) -> tuple[str, bool]:
    return next(((kind, whole) for pattern, kind, whole in _RULES if pattern.search(name)), ("other", False))


def without_node(name: str, instead: str = "") -> str:
    """The name of a node of the backward pass without autograd's words before it."""
    return _NODE.sub(instead, name)


def kinds(events: Iterable[Any]) -> Mapping[int, tuple[str, bool]]:
    """The kind of every event, by its id, and whether that holds for all that it calls."""
    found: dict[int, tuple[str, bool]] = {}
    forward: dict[tuple[int, int], tuple[str, bool]] = {}
    again: set[int] = set()  # events of a forward pass that runs inside of the backward pass
    # In order of time a parent comes before its children, and the forward pass before the backward pass.
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        if event.name == INSIDE:
            found[id(event)] = ("other", False)
            continue
        parent = event.cpu_parent
        above = found.get(id(parent), ("other", False)) if parent is not None else ("other", False)
        backward = _in_backward(event)
        if parent is not None and id(parent) in again:
            again.add(id(event))
        elif backward and _is_recomputed(event):
            # A checkpoint computes a whole block again when the first of its nodes asks for what it has kept. That
            # node says nothing about the block.
            again.add(id(event))
            above = ("other", False)
        kind = above if above[1] else _rule(without_node(event.name))
        if not above[1] and _NODE.match(event.name):
            # The node's cause: of the operators with its number, the last one to start made it.
            cause = forward.get((event.fwd_thread, event.sequence_nr), ("other", False))
            kind = cause if cause[0] != "other" else kind
        elif kind[0] == "other":
            kind = above  # a helper of what called it
        found[id(event)] = kind
        if event.sequence_nr >= 0 and not backward:
            forward[event.thread, event.sequence_nr] = kind
    return found


def _is_recomputed(event: Any) -> bool:
    """Whether an event inside of a backward node is an operator that records a graph; what the node runs does not."""
    return event.scope == _OPERATOR and event.sequence_nr >= 0 and not _NODE.match(event.name)


def _in_backward(event: Any) -> bool:
    while event is not None:
        if _NODE.match(event.name):
            return True
        event = event.cpu_parent
    return False
