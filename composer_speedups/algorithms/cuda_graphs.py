"""CUDAGraphs: all kernels of the layers' forward pass by one call of the host, and all of their backward pass by
another. With `scope="model"`, those of the embeddings, the head and the loss with them.

**Why it is faster.** Every kernel costs the host some microseconds, for Python, autograd, PyTorch's dispatcher and the
driver; a step of BERT-base has about a thousand. A fast GPU with a small batch computes them sooner than the host
launches them, and waits. Here the kernels are recorded once for each shape of a batch, with their addresses, and
replayed by one call. Nothing is compiled: what is recorded are the kernels that run anyway.

**Numerics.** The same kernels on the same numbers. Sums of gradients of hidden states, for which autograd has kernels
of its own, the recorded norms of `FusedDropoutAddNorm` take when they read them: of two readers (as with `Unpadding`)
rounded alike, of more in another order. Dropout draws new masks in each replay, from PyTorch's generator; not the same
ones as without, as recording has drawn some, too. Gradients are those of the microbatch, accumulated as ever.

**When it pays.** Where the host is slower than the GPU: large GPUs, small batches or models, compiled or not. For
BERT-base with 64 reviews on an H200 a step took 55 ms with blocks compiled and no graphs, 21 with those of the layers
and 19 with the model's, not compiled (single runs, `benchmarks/results/2026-11-26_h200_profiles`; 18 with what was
built since, `2026-11-27_h200_peers`). A shape is run kernel by kernel when it comes first, and recorded when it comes
again; so shapes must come again. Batches of one size padded to one length have one. With `Unpadding`, `multiple_of=512`
leaves a few totals of tokens, and 256 tokens of padding to compute on average; batches padded to their longest want
`pad_to_multiple_of`. Other shapes than the first `limit` ones that came again run kernel by kernel. With
`scope="model"`, a total that was not recorded yet is filled up to one that was and is up to an eighth larger, and gets
a graph of its own when four batches of such padding have been computed: a recording costs some steps, too (0.11 to 0.22
s there).

**Needs.** CUDA, and a model of BERT's, RoBERTa's, XLM-RoBERTa's, CamemBERT's, ELECTRA's or DistilBERT's layers, or with
`Unpadding` of ModernBERT's. `scope="model"` needs `Unpadding` and a head of transformers' own, called with arguments by
name; only its loss has gradients then (asking for those of logits beside it is an error; without labels they have
theirs), and `MaskedTokenHead` needs a `capacity`. Models with modules or a loss of your own, with BatchNorm, for
multiple choice, and ELECTRA's and ModernBERT's that choose tokens by a mask are left alone, and so is a model that
Accelerate has prepared (apply this before). DDP exchanges gradients after the whole backward pass, not beside it; not
under FSDP. Works with `TorchCompile(scope="block")`, and not with `scope="model"`, with one of its modes that record
graphs, or with `GradientCheckpointing`. A hook in a layer makes all run kernel by kernel, and so do evaluation, a
second forward pass before the first one's backward pass, and gradients that somebody keeps elsewhere than as a
parameter's `grad`. Layers that were moved or frozen, or have another dropout rate, are recorded anew, up to twenty
times; so are those with a module of your own, or an adapter's, if what it keeps in Python has changed (numbers, words
and functions, in containers and plain objects, too, and other tensors). What else such a module computes with, as
Python's random numbers, stays as it was recorded. What a forward pass keeps for backward stays allocated between steps,
once for all shapes; a shape that is not recorded needs as much beside it. A Trainer gives it back when training ends;
elsewhere it lives as long as the model.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs and NVIDIA's submissions of BERT to MLPerf.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Event, State
from composer.loggers import Logger

from composer_speedups.algorithms.masked_token_head import waits_for_predicted
from composer_speedups.arguments import check_choice, check_count
from composer_speedups.errors import ConflictError
from composer_speedups.families import GRAPHED, MODERNBERT, layers_of, stack_of
from composer_speedups.first_request import asked_for_first
from composer_speedups.graphs.model import can_be_whole, known_loss, read_on_host, total_of
from composer_speedups.graphs.replay import Graphs, all_modules
from composer_speedups.graphs.unrecordable import unrecordable
from composer_speedups.packed.packing import Packing
from composer_speedups.speedup import SpeedUp, Stage, warn
from composer_speedups.surgery import having, mix_in

__all__ = ["CUDAGraphs", "apply_cuda_graphs"]

SCOPES = ("layers", "model")
_ASKED = ("output_hidden_states", "output_attentions", "return_dict")
_UNREAD = "num_items_in_batch"  # transformers gives it to all that it calls; no layer reads it, and it always differs


def apply_cuda_graphs(model: torch.nn.Module, limit: int = 8, scope: str = "layers") -> int:
    """Let every encoder in `model` be recorded and replayed in training, in place; return how many encoders.

    Args:
        model: changed in place, after everything else that changes it.
        limit: how many shapes of a batch are recorded at most.
        scope: `layers` of each encoder, or each whole `model` whose encoder is unpadded, from the ids to the loss.

    Raises:
        ConflictError: a head in a whole `model` waits to learn how many tokens it has to predict.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9))
    >>> apply_cuda_graphs(bert), apply_cuda_graphs(bert)
    (1, 0)
    """
    check_count("limit", limit)
    check_choice("scope", scope, SCOPES)
    if scope == "model":
        if any(map(waits_for_predicted, model.modules())):
            raise ConflictError(
                "cuda_graphs with scope='model' cannot record how masked_token_head waits to learn how many tokens are "
                "predicted. Give it a capacity, as 0.2 for masks of 15 %, or use scope='layers'"
            )
        found = [m for m in model.modules() if can_be_whole(m) and not having(m, _Graphed)]
    else:
        encoders = [m for m in model.modules() if _family(m) in GRAPHED]
        stacks = dict.fromkeys(stack_of(encoder) for encoder in encoders)
        whole = {id(m) for graphed in model.modules() if isinstance(graphed, _Whole) for m in graphed.modules()}
        found = [s for s in stacks if s is not None and not isinstance(s, _Graphed) and id(s) not in whole]
        found = [stack for stack in found if _family(stack) not in MODERNBERT or hasattr(stack, "run_layers")]
    for module in found:
        module.graphs_limit = limit
        mix_in(_Whole if scope == "model" else _Packed if hasattr(module, "run_layers") else _Stack, module)
    return len(found)


class CUDAGraphs(SpeedUp):
    """Apply `apply_cuda_graphs` at `Event.INIT`.

    Args:
        limit: how many shapes of a batch are recorded at most.
        scope: `layers` of each encoder, or each whole `model` whose encoder is unpadded, from the ids to the loss.

    >>> CUDAGraphs()
    CUDAGraphs(limit=8, scope='layers')
    """

    no_fsdp = "what it does between layers cannot be replayed. Use DDP, or remove it"
    stage = Stage.RECORD
    events = frozenset({Event.AFTER_LOAD, Event.EPOCH_END, Event.FIT_END})

    def __init__(self, limit: int = 8, scope: str = "layers") -> None:
        self.limit = check_count("limit", limit)
        self.scope = check_choice("scope", scope, SCOPES)

    def unavailable(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "CUDA graphs need a GPU of NVIDIA's: remove it"

    def contradicts(self, other: SpeedUp) -> str | None:
        key, own = other.key(), vars(other)
        if key == "torch_compile" and (own["scope"] != "block" or own["mode"] not in (None, "default")):
            its = f"{other!r} compiles what is around them or records graphs itself"
            return f"cuda_graphs records what layers launch, and {its}. Give it scope='block' and no mode, or remove it"
        if key in ("gradient_checkpointing", "gradient_release"):
            return f"cuda_graphs keeps the memory that {key} gives back. Remove one of them"
        return None

    def held_bytes(self, activations: int) -> int:
        return activations  # graphs have their own for what they keep, while a new shape runs without them

    def install(self, state: State, logger: Logger) -> None:
        if reason := unrecordable(state.model):
            raise ConflictError(f"cuda_graphs cannot record {reason}")
        count = apply_cuda_graphs(state.model, self.limit, self.scope)
        nothing = f"no layers of {', '.join(GRAPHED)} (with unpadding) in the model"
        if self.scope == "model":
            nothing = f"no unpadded model of {', '.join(GRAPHED)} with transformers' own head. Use scope='layers'"
        self.report(logger, count, nothing, already=having(state.model, _Graphed))

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.AFTER_LOAD:
            self.at_close(state, partial(_release, state.model))  # a fit that fails comes to no end
            return
        all_graphs = [graphs for m in state.model.modules() if (graphs := _GRAPHS.get(m)) is not None]
        if not all_graphs:
            return
        counts = {name: sum(getattr(g, name) for g in all_graphs) for name in ("recorded", "replayed", "launched")}
        self.evidence.update(counts)
        logger.log_metrics({f"{self.key()}/{name}": value for name, value in counts.items()})
        if event is Event.FIT_END and not counts["replayed"] and counts["launched"] > 2:
            reasons = sorted({g.reason for g in all_graphs})
            warn(NoEffectWarning(f"{self!r} replayed nothing in {counts['launched']} forward passes: {reasons[0]}"))
        if event is Event.FIT_END:
            _release(state.model)


def _release(model: torch.nn.Module) -> None:
    """What graphs in `model` hold, which whoever evaluates it, or trains another, may need."""
    for graphs in filter(None, map(_GRAPHS.get, model.modules())):
        graphs.release()


def _family(module: torch.nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "model_type", None)


class _Graphed:
    """Mixed into the module that runs the layers, or the whole model."""

    graphs_limit: int = 8

    def _graphs(self) -> Graphs | None:
        """Those of this module, made when it trains first; None where its kernels are wanted one by one."""
        if torch.compiler.is_compiling() or not (self.training and torch.is_grad_enabled()):
            return None
        graphs = _GRAPHS.get(self)
        if graphs is None:
            graphs = _GRAPHS[self] = Graphs()
        return graphs


class _Layers(_Graphed):
    def _in_graphs(self, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """`run(*args, **kwargs)`, which runs the layers: as a graph if it may be one."""
        graphs = self._graphs()
        if graphs is None:
            return run(*args, **kwargs)
        layers = layers_of(self)
        kwargs.pop(_UNREAD, None)
        config = getattr(self, "config", None)
        around = asked_for_first(layers[-1]), *(getattr(config, name, None) for name in _ASKED)
        return graphs(all_modules(layers), run, args, kwargs, self.graphs_limit, around, steady=_steady)


class _Stack(_Layers):
    """Of those whose `forward` is nothing else."""

    def forward(self, *args: Any, **kwargs: Any):
        return self._in_graphs(super().forward, args, kwargs)


class _Packed(_Layers):
    """Of ModernBERT, whose encoder runs them itself; `Unpadding` has put that into a method of its own."""

    def run_layers(self, *args: Any) -> torch.Tensor:
        return self._in_graphs(super().run_layers, args, {})


class _Whole(_Graphed):
    """Of a model whose encoder is unpadded."""

    def forward(self, *args: Any, **kwargs: Any):
        graphs = self._graphs()
        if graphs is None:
            return super().forward(*args, **kwargs)
        total = None if args else total_of(self.base_model, **kwargs)
        if total is None or not known_loss(self):
            graphs.launched += 1
            graphs.reason = "not called with ids and mask by name, or its batches cannot be packed"
            if total is not None:
                graphs.reason = "the model was given a loss that is not transformers'. Use scope='layers'"
            return super().forward(*args, **kwargs)
        if isinstance(number := kwargs.get(_UNREAD), int):  # which a loss reads, and it always differs
            kwargs[_UNREAD] = torch.tensor(number, device=kwargs["input_ids"].device)
        around = read_on_host(self, kwargs.get("labels"))
        return graphs(all_modules(self), super().forward, (), kwargs, self.graphs_limit, around, total)


_GRAPHS: weakref.WeakKeyDictionary[torch.nn.Module, Graphs] = weakref.WeakKeyDictionary()  # not copied, not pickled


def _steady(x: Any) -> Any:
    """Without what differs from batch to batch and no kernel reads."""
    return x.steady() if isinstance(x, Packing) else x
