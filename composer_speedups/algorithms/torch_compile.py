"""TorchCompile: the model's code becomes fused kernels, for training and for evaluation.

**Why it is faster.** Chains of element-wise operations (bias, GELU, dropout, residual, norm, casts) become one
kernel each, which reads and writes memory once; forward and backward are planned together; and Python's time
between kernels goes.

**Numerics.** Same formulas, other order of rounding: results differ from eager code by a few units in the
last place of the compute dtype. Dropout draws other random numbers.

**When it pays.** When the run is longer than the compilation: compare `compile_seconds` with the time saved.
`scope="block"` compiles the repeated layer once and uses it for all of them; `scope="model"` also fuses what
lies around the layers, and takes longer to compile, as every layer is in the graph. Batches of ever new
lengths recompile. Few lengths come from the data: `padding: longest` with `pad_to_multiple_of: 64`, or
`LengthGroupedBatches(multiple_of=64)`. `dynamic=True` makes one graph for all sizes, which the packed batches of
`Unpadding` need. `mode="reduce-overhead"` records CUDA graphs, one for each size: for few sizes (see `CUDAGraphs`).

**Needs.** For Inductor a C++ compiler and Python's headers on CPU; Triton, a C compiler and compute capability
7.0 on CUDA. A `cache_dir` holds code that is loaded and run: point it only to folders that you trust. It is
set for the whole process. `copy.deepcopy` of a compiled module is eager again. Blocks with a hook in them stay as they
are; PyTorch does not see hooks set later. Without a GPU the first compilation is made shorter: `inductor_cpp.py`.

The evidence counts graphs, graph breaks, recompiles, seconds and cache hits.

Source: https://pytorch.org/docs/stable/generated/torch.compile.html and its "regional compilation" recipe.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Event, State
from composer.loggers import Logger
from composer.models import ComposerModel

from composer_speedups.arguments import check_choice
from composer_speedups.compat import CompileCounters, compile_counters
from composer_speedups.compilation import check_backend, compile_statistics, missing_tools, prepare_inductor, use_cache
from composer_speedups.errors import ConflictError
from composer_speedups.speedup import SpeedUp, Stage, warn
from composer_speedups.surgery import compiled, hooked_inside, repeated_blocks

__all__ = ["TorchCompile", "apply_torch_compile"]

_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes that record CUDA graphs
SCOPES = ("model", "block")
CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def apply_torch_compile(
    model: torch.nn.Module,
    scope: str = "model",
    backend: str = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    cache_dir: str | None = None,
) -> int:
    """Compile `model`, or its repeated block, in place; return how many modules compile when first called.

    The modules stay what they are, so that `state_dict` keys are untouched. A model of which a part is
    compiled already is left alone. The arguments are those of `TorchCompile`.

    >>> import torch
    >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> apply_torch_compile(layers, scope="block", backend="eager")
    2
    >>> apply_torch_compile(layers, scope="block", backend="eager")
    0
    """
    _check(scope, backend, mode, dynamic, fullgraph, cache_dir)
    if any(map(compiled, model.modules())):
        return 0
    if scope == "block":  # they share code, which would call the hooks of the block that it was compiled for
        targets = [block for block in repeated_blocks(model) if not hooked_inside(block)]
    else:
        targets = _callables(model)
    if cache_dir is not None:
        use_cache(cache_dir)
    block = scope == "block" and mode in (None, "default")  # torch.compile takes a mode or options, not both
    how = (prepare_inductor(block, bool(dynamic)) if targets and backend == "inductor" else {}) or {"mode": mode}
    for module in targets:
        _compile(module, backend=backend, dynamic=dynamic, fullgraph=fullgraph, **how)
    return len(targets)


class TorchCompile(SpeedUp):
    """Apply `apply_torch_compile` at `Event.INIT`, after all other speed-ups have changed the model.

    Args:
        scope: `model` (the whole Hugging Face model, or each module of a `ComposerModel`) or `block`.
        backend: a name out of `torch._dynamo.list_backends(None)`.
        mode: None, `default`, `reduce-overhead`, `max-autotune`, ... (Inductor only).
        dynamic: None (decide at the first recompile), True (any length from the start) or False (never).
        fullgraph: raise at a graph break instead of running that part in Python.
        cache_dir: folder of compiled code, used again by later processes; None: PyTorch's own.

    >>> TorchCompile(scope="block")  # doctest: +ELLIPSIS
    TorchCompile(scope='block', backend='inductor', mode=None, dynamic=None, fullgraph=False, cache_dir=None)
    """

    stage = Stage.COMPILE
    slot = "compile"
    events = frozenset(
        {Event.FIT_START, Event.EVAL_STANDALONE_START, Event.BEFORE_TRAIN_BATCH}
        | {Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD}
        | {Event.BATCH_END, Event.EVAL_END, Event.EVAL_STANDALONE_END, Event.FIT_END}
    )

    def __init__(
        self,
        scope: str = "model",
        backend: str = "inductor",
        mode: str | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        cache_dir: str | None = None,
    ) -> None:
        _check(scope, backend, mode, dynamic, fullgraph, cache_dir)
        self.scope = scope
        self.backend = backend
        self.mode = mode
        self.dynamic = dynamic
        self.fullgraph = fullgraph
        self.cache_dir = cache_dir
        self._since = CompileCounters()
        self._warned = False
        self._microbatches = 0  # of this batch

    def unavailable(self, device: torch.device) -> str | None:
        return missing_tools(device) if self.backend == "inductor" else None

    def install(self, state: State, logger: Logger) -> None:
        _refuse_compile_config(state.model)
        self._since, self._warned = compile_counters(), False
        arguments = {name: getattr(self, name) for name in self.parameters()}
        nothing = "no ModuleList or Sequential of equal blocks without hooks in them. Use scope='model'"
        if any(map(compiled, state.model.modules())):
            nothing = "a part of the model is compiled already"
        count = apply_torch_compile(state.model, **arguments)
        self.report(logger, count, nothing, **compile_statistics(self._since))

    def on_event(self, event: Event, state: State, logger: Logger) -> None:
        if event in (Event.FIT_START, Event.EVAL_STANDALONE_START):
            _refuse_compile_config(state.model)
            micro, batch = state.device_train_microbatch_size, getattr(state.train_dataloader, "batch_size", None)
            if event is Event.FIT_START and None not in (micro, batch) and micro < batch:
                _refuse_microbatches(self, state)
        elif event is Event.BEFORE_TRAIN_BATCH:
            self._microbatches = 0
        elif event in (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD):
            self._microbatches += event is Event.BEFORE_FORWARD
            if self._microbatches > 1:  # of a loader without a batch size, or found by trying: known only now
                _refuse_microbatches(self, state)
            if self.mode is not None and "cuda" in state.device._device.type:
                # CUDA graphs write into the same memory again: say that the last step's outputs are done with.
                torch.compiler.cudagraph_mark_step_begin()
        else:
            self._log_statistics(state, logger, event)

    def _log_statistics(self, state: State, logger: Logger, event: Event) -> None:
        now = compile_statistics(self._since)
        news = {name: value for name, value in now.items() if self.evidence.get(name) != value}
        if news:
            self.evidence.update(news)
            logger.log_metrics({f"{self.key()}/{name}": value for name, value in news.items()})
        if self._warned or not self.evidence.get("changed"):
            return
        if compile_counters().graphs == 0:  # of the process: code compiled for an earlier Trainer is used again
            self._warned = True
            warn(
                NoEffectWarning(
                    f"{self!r} compiled nothing by {event.value}: no compiled module was called. "
                    "Its code runs outside `forward`, or TORCHDYNAMO_DISABLE is set"
                )
            )
        elif now["frames_over_limit"]:
            self._warned = True
            warn(
                UserWarning(
                    f"{self!r}: code was compiled over and over until dynamo's recompile_limit, and new inputs now run "
                    "uncompiled. Pad batches to few lengths, or set dynamic=True"
                )
            )


def _check(scope: Any, backend: Any, mode: Any, dynamic: Any, fullgraph: Any, cache_dir: Any) -> None:
    check_choice("scope", scope, SCOPES)
    for name, value, kinds in (
        ("backend", backend, str), ("mode", mode, str | None),
        ("dynamic", dynamic, bool | None), ("fullgraph", fullgraph, bool), ("cache_dir", cache_dir, str | None),
    ):  # fmt: skip
        if not isinstance(value, kinds):
            wanted = getattr(kinds, "__name__", str(kinds))
            raise TypeError(f"{name}={value!r} has the wrong type. Give {wanted}")
    if cache_dir is not None and not cache_dir.strip():
        raise ValueError("cache_dir='' names no folder. Leave it out for PyTorch's own")
    check_backend(backend, mode)


def _refuse_microbatches(algorithm: TorchCompile, state: State) -> None:
    """CUDA graphs keep gradients in memory that the next microbatch writes over, before the optimizer has seen them."""
    if algorithm.mode not in _GRAPHS or algorithm.backend != "inductor" or "cuda" not in state.device._device.type:
        return
    micro = state.device_train_microbatch_size
    raise ConflictError(
        f"mode={algorithm.mode!r} records CUDA graphs, whose gradients do not outlive a microbatch, and the batch is "
        f"cut into microbatches of {micro}. Leave out mode, or device_train_microbatch_size"
    )


def _callables(model: torch.nn.Module) -> list[torch.nn.Module]:
    """What to compile for the whole model.

    Of a ComposerModel its parts with parameters: training calls the ComposerModel, but evaluation calls its
    `eval_forward`, and both come to these. Lists of modules are never called themselves.
    """
    if not isinstance(model, (ComposerModel, *CONTAINERS)):
        return [model]
    parts = [part for part in model.children() if next(part.parameters(), None) is not None]
    return [module for part in parts for module in _callables(part)] or [model]


def _compile(module: torch.nn.Module, **options: Any) -> None:
    if type(module).forward.__module__.startswith("torch."):
        # Dynamo never starts in PyTorch's own files: `Sequential.compile()` or `Linear.compile()` stay eager
        # without a word. Started from here, it goes into them.
        module._compiled_call_impl = functools.partial(torch.compile(_call, **options), module)
    else:
        module.compile(**options)


def _call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _refuse_compile_config(model: torch.nn.Module) -> None:
    inner = getattr(model, "module", model)  # out of DDP
    if any(hasattr(m.forward, "_torchdynamo_orig_callable") for m in (model, inner) if hasattr(m, "forward")):
        raise ConflictError(
            "torch_compile and the Trainer's compile_config (or a model given to it compiled) contradict each "
            "other: the model would be compiled twice. Keep one of them"
        )
