"""What differs between the software stacks: transformers 4.53 and 5.x, torch 2.7, 2.11 and newer.

Small functions with one meaning on all; nothing else in the package asks for a version.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers

from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.surgery import mix_in

__all__ = [
    "INDUCTOR_PRECOMPILES",
    "MPNET_AFTER_MASK",
    "CompileCounters",
    "Float32Precision",
    "announce_sdpa",
    "attention_dropout",
    "attention_implementation",
    "compile_counters",
    "distilbert_attention",
    "keep_module_integers_static",
    "lacks_sdpa",
    "layer_result",
    "make_sdpa",
    "no_initial_weights",
    "own_checkpointing",
    "places_without_pooler",
    "read_float32_precision",
    "set_float32_precision",
    "why_no_sdpa",
    "write_float32_precision",
]

try:
    from transformers.utils.output_capturing import _active_collector as _COLLECTOR
except ImportError:  # before 5.0
    _COLLECTOR = None

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_TRANSFORMERS = int(transformers.__version__.split(".")[0])

# --- attention in Hugging Face models -----------------------------------------------------------------
# transformers 4.53: BERT and its relatives choose the attention's class when built, from a table in their
# module (`BERT_SELF_ATTENTION_CLASSES`), and fall back to eager code for `output_attentions`. Others, and
# every family in 5.x, look up a function by `config._attn_implementation` on each call; with SDPA that
# function returns no weights, and 5.x then hands out `attentions=(None, ...)` without a word.

_INTERFACES = {"ALL_ATTENTION_FUNCTIONS", "MODERNBERT_ATTENTION_FUNCTION"}
_CLASS_STATE = {"dropout_prob", "require_contiguous_qkv"}  # what the SDPA classes of 4.53 set in __init__
_COPIES = ("attn_implementation", "_attn_implementation")  # of the config's value, kept by some models


def attention_implementation(module: torch.nn.Module) -> str | None:
    """How `module` computes attention ("eager", "sdpa", ...); None if it is no Hugging Face attention layer."""
    cls = type(module)
    for table in _class_tables(cls):
        for name, member in table.items():
            if member is cls:
                return name
    forward = inspect.unwrap(cls.forward)
    if _INTERFACES & set(getattr(getattr(forward, "__code__", None), "co_names", ())) or (
        isinstance(module, _NoAttentionWeights)
    ):
        return getattr(getattr(module, "config", None), "_attn_implementation", None)
    return None


def lacks_sdpa(owner: torch.nn.Module) -> str | None:
    """The reason if the installed transformers has no SDPA for the family of `owner`; None if it has."""
    if getattr(owner, "_supports_sdpa", False):
        return None
    return f"transformers {transformers.__version__} has no SDPA for {type(owner).__name__}"


def why_no_sdpa(owner: torch.nn.Module, module: torch.nn.Module) -> str | None:
    """Why the eager attention `module` of the Hugging Face model `owner` cannot become SDPA; None if it can."""
    config = owner.config
    if (reason := lacks_sdpa(owner)) is not None:
        return reason
    position = getattr(module, "position_embedding_type", "absolute")  # 5.x has no other any more
    if position != "absolute":
        return f"position_embedding_type={position!r} adds to the attention scores, which SDPA does not return"
    if getattr(config, "output_attentions", False):
        return "config.output_attentions is True, and SDPA computes no attention weights: set it to False"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "config.reorder_and_upcast_attn asks for float32 attention, which only the eager code does"
    own_scale = not getattr(module, "scale_attn_weights", True) or getattr(
        module, "scale_attn_by_inverse_layer_idx", False
    )
    if own_scale and not hasattr(module, "scaling"):
        return f"transformers {transformers.__version__} ignores the config's scale of attention scores in SDPA"
    tables = [table for table in _class_tables(type(module)) if table.get("eager") is type(module)]
    if tables and _sdpa_class(type(module)) is None:
        return f"{type(module).__name__} has no SDPA counterpart that can be swapped in"
    return None


def make_sdpa(module: torch.nn.Module) -> None:
    """Let the eager attention `module` call `scaled_dot_product_attention`; its model's config must follow."""
    new = _sdpa_class(type(module))
    if new is not None:
        dropout = getattr(module, "attention_dropout", None) or getattr(module, "dropout", None)
        for name, value in (("dropout_prob", getattr(dropout, "p", 0.0)), ("require_contiguous_qkv", False)):
            if name in _set_in_init(new):
                setattr(module, name, value)
        module.__class__ = new
    elif not _falls_back(type(module)):
        mix_in(_NoAttentionWeights, module)


def _falls_back(cls: type) -> bool:
    """Whether the layer computes eagerly by itself when attention weights are asked for, as 4.53 does."""
    names = inspect.signature(inspect.unwrap(cls.forward)).parameters
    return _TRANSFORMERS < 5 and "output_attentions" in names


def announce_sdpa(owner: torch.nn.Module) -> None:
    """Tell the Hugging Face model `owner` that its attention is SDPA: it makes the padding mask accordingly."""
    owner.config._attn_implementation = "sdpa"
    for module in owner.modules():
        for name in _COPIES:
            if module.__dict__.get(name) == "eager":
                setattr(module, name, "sdpa")
        if module.__dict__.get("_use_sdpa") is False:
            module._use_sdpa = True


@cache
def _class_tables(cls: type) -> tuple[dict[str, type], ...]:
    """The tables "implementation -> class" of the file that defines `cls`."""
    names = vars(sys.modules.get(cls.__module__, object))
    return tuple(
        table for name, table in names.items() if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict)
    )


def _sdpa_class(cls: type) -> type | None:
    for table in _class_tables(cls):
        new = table.get("sdpa")
        if table.get("eager") is cls and new not in (None, cls) and _set_in_init(new) <= _CLASS_STATE:
            return new
    return None


@cache
def _set_in_init(cls: type) -> frozenset[str]:
    """The attributes that the `__init__` of `cls` itself, not of its bases, sets."""
    init = vars(cls).get("__init__")
    if init is None:
        return frozenset()
    return frozenset(i.argval for i in dis.get_instructions(init) if i.opname == "STORE_ATTR")


class _NoAttentionWeights:
    """Mixed into an attention layer: asking for attention weights is an error, not a tuple of None."""

    def forward(self, *args, **kwargs):
        if self.config._attn_implementation == "sdpa" and _weights_wanted(kwargs):
            raise SpeedUpUnavailable(
                "output_attentions=True: SDPA computes no attention weights. Leave sdp_attention out, or call"
                " model.set_attn_implementation('eager') before asking for them"
            )
        return super().forward(*args, **kwargs)


def _weights_wanted(kwargs: dict) -> bool:
    """Whether the caller wants attention weights: by argument, or (GPT-2 in 5.x) only in the collector."""
    if kwargs.get("output_attentions"):
        return True
    if _COLLECTOR is None or torch.compiler.is_compiling():  # a compiled forward pass cannot read it
        return False
    return "attentions" in (_COLLECTOR.get() or ())


def attention_dropout(attention: torch.nn.Module) -> float:
    """The rate at which stock code drops attention weights now.

    Some attention has a number for it, other a module. Eager code of 4.53, and MPNet's and DeBERTa's in every version,
    calls that module, which may be training alone (Monte Carlo dropout) or be at rest alone. All others read the flag
    of the attention itself. No cache and no inspection: compilers trace it.
    """
    rate = attention.__dict__.get("attention_dropout")  # ModernBERT's, and of those with Llama's names
    if rate is not None:
        return rate if attention.training else 0.0
    if _TRANSFORMERS < 5:  # what the classes of SDPA and of flash attention set
        called = not (hasattr(attention, "dropout_prob") or hasattr(attention, "_flash_attn_uses_top_left_mask"))
    else:
        called = not hasattr(attention, "is_causal")
    if isinstance(attention.dropout, torch.nn.Identity):  # in its place, to have none
        return 0.0
    rate = getattr(attention.dropout, "p", attention.dropout)  # a number in ESM's of 5.x
    return rate if (attention.dropout if called else attention).training else 0.0


# --- precision of float32 matrix products -------------------------------------------------------------
# torch 2.9 added `fp32_precision` per backend and operation. Reading the old names raises if they disagree
# with the new ones (`allow_tf32=True` after "medium" is enough), while *setting* the old names sets both.
# Hence: set through the old names, save and restore through both.


@dataclass(frozen=True)
class Float32Precision:
    """Process-wide settings; `matmul` and `cudnn_tf32` are None where old and new names disagree."""

    matmul: str | None
    cudnn_tf32: bool | None
    operations: tuple[tuple[str, str], ...] = ()  # `fp32_precision` by operation; empty before torch 2.9

    def __str__(self) -> str:
        matmul = self.matmul or f"mixed (CUDA {dict(self.operations)['cuda.matmul']})"
        cudnn = {True: "TF32", False: "float32", None: "mixed"}[self.cudnn_tf32]
        return f"matmul {matmul}, cuDNN {cudnn}"


def _precision_operations() -> dict[str, Any]:
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):
        return {}
    return {
        "cuda.matmul": backends.cuda.matmul,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
        "mkldnn.matmul": backends.mkldnn.matmul,
    }


def read_float32_precision() -> Float32Precision:
    """What is set now, whichever names it was set through."""
    try:
        matmul = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = None
    try:
        cudnn = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        cudnn = None
    operations = tuple((name, op.fp32_precision) for name, op in _precision_operations().items())
    return Float32Precision(matmul, cudnn, operations)


def set_float32_precision(matmul: str, cudnn_tf32: bool) -> None:
    """Set both, so that old and new names agree."""
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn_tf32


def write_float32_precision(saved: Float32Precision) -> None:
    """Put back what `read_float32_precision` returned."""
    by_operation = dict(saved.operations)
    tf32 = by_operation.get("cuda.matmul") == "tf32"
    set_float32_precision(saved.matmul or ("high" if tf32 else "highest"), bool(saved.cudnn_tf32))
    for name, operation in _precision_operations().items():
        if operation.fp32_precision != by_operation[name]:
            operation.fp32_precision = by_operation[name]


# --- what torch.compile did ---------------------------------------------------------------------------

# Whether Inductor precompiles the headers of its C++ kernels by itself: since 2.8.
INDUCTOR_PRECOMPILES = _TORCH >= (2, 8)


@cache
def keep_module_integers_static() -> None:
    """Let Dynamo take integers of modules (a head's width) for constants with `dynamic=True`, too, as newer versions.

    PyTorch 2.7 makes each a symbol, whose guards the cache of compiled graphs may not be able to write down: it ends
    with "AssertionError: s4 ... not in {s0: ...}".
    """
    if _TORCH >= (2, 8):
        return
    from torch._dynamo import utils
    from torch._dynamo.variables import builder

    own = utils.is_int_specialization_case

    def is_int_specialization_case(value: Any, source: Any) -> bool:
        return own(value, source) or source.guard_source().is_unspecialized_nn_module()

    utils.is_int_specialization_case = builder.is_int_specialization_case = is_int_specialization_case


@dataclass(frozen=True)
class CompileCounters:
    """Dynamo's and Inductor's counters of this process, since it started."""

    graphs: int = 0
    graph_breaks: int = 0
    seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0
    frames: dict[Any, int] = field(default_factory=dict)  # how often each Python frame was compiled


def compile_counters() -> CompileCounters:
    """Read the counters; all zero where dynamo was not imported yet, which this does not do either."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return CompileCounters()
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    empty: Counter[str] = Counter()  # `counters` is a defaultdict: looking by [] would add keys to it
    return CompileCounters(
        graphs=utils.counters.get("stats", empty)["unique_graphs"],
        graph_breaks=sum(utils.counters.get("graph_break", empty).values()),
        # Dynamo's frames, and the backward graphs that are compiled during the first backward.
        seconds=float(utils.calculate_time_spent().get("total_wall_time", 0.0)),
        cache_hits=utils.counters.get("inductor", empty)["fxgraph_cache_hit"],
        cache_misses=utils.counters.get("inductor", empty)["fxgraph_cache_miss"],
        frames=dict(getattr(convert_frame, "FRAME_COMPILE_COUNTER", {})),
    )


# --- models -------------------------------------------------------------------------------------------


def no_initial_weights() -> AbstractContextManager:
    """While it lasts, models of transformers are built without drawing their weights, nor tying them."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before 5.0
        from transformers.modeling_utils import no_init_weights
    return no_init_weights()


def own_checkpointing() -> str:
    """How transformers calls its own checkpointing: before `_enable()` and `_disable()`."""
    newer = hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")  # since 5.24 or a little before
    return "activation_checkpointing" if newer else "gradient_checkpointing"


# --- encoder layers -----------------------------------------------------------------------------------


# What an MPNet layer and its attention take behind their mask: in 4.53 masks of heads, too.
MPNET_AFTER_MASK = (*(("head_mask",) if _TRANSFORMERS < 5 else ()), "position_bias", "output_attentions")


def layer_result(hidden: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor]:
    """What a BERT layer returns: in 4.53 a tuple that may also hold attention weights, in 5.x the hidden states."""
    return (hidden,) if _TRANSFORMERS < 5 else hidden


def places_without_pooler(family: str) -> bool:
    """Whether the tuple of an encoder that may have a pooler holds None where it has none."""
    return family == "mpnet" or (_TRANSFORMERS < 5 and family != "electra")


def distilbert_attention(
    block: torch.nn.Module, hidden: torch.Tensor, mask: Any = None, *others: Any, **named: Any
) -> torch.Tensor:
    """What a DistilBERT block's attention makes of `hidden`, with what the block was given besides.

    In 4.53 those are a head's mask and whether attention weights are asked for, which must not be; in 5.x keywords.
    """
    if _TRANSFORMERS < 5:
        head_mask = others[0] if others else named.get("head_mask")
        return block.attention(query=hidden, key=hidden, value=hidden, mask=mask, head_mask=head_mask)[0]
    return block.attention(hidden, attention_mask=mask, **named)[0]
