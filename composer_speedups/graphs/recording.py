"""A function of tensors and parameters as CUDA graphs: all kernels of its forward pass by one call of the host, and all
of its backward pass by another.

A graph is its kernels with the addresses that they had when it was recorded. So inputs are copied to where it reads
them, outputs are copied out, and whoever replays looks first whether the parameters are where they were. What a forward
pass keeps for its backward pass lies in memory of the graphs' own, and all of them use the same: between a forward pass
and its backward pass no other is replayed. Each parameter's gradient has one place for all graphs. What is there at the
next replay as a parameter's `grad` is moved away first; while somebody else holds it, nothing may be replayed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

__all__ = ["Memory", "Recorded"]

Tensors = Sequence[torch.Tensor]


class Memory:
    """What graphs of one module share, as they are never replayed at the same time.

    Attributes:
        pool: of PyTorch's allocator.
        stream: on which all are recorded.
        gradients: where all graphs leave each parameter's gradient, by the parameter's number.
    """

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), _stream(torch.cuda.current_device())
        self.gradients: dict[int, torch.Tensor] = {}
        self._users: dict[int, int] = {}  # of each gradient's storage, while nobody outside has it
        self._waiting: Callable[[], _Pass | None] = lambda: None

    def taken(self) -> bool:
        """Whether it holds what a backward pass that may still come has to read."""
        waiting = self._waiting()
        return waiting is not None and not waiting.done

    def take(self) -> _Pass:
        """For a forward pass, until its backward pass is done or nobody can ask for it any more."""
        now = _Pass()
        self._waiting = weakref.ref(now)
        return now

    def vacate(self, parameters: Tensors) -> bool:
        """Move gradients that are still there, of microbatches before or not set to None, to memory of their own.

        Returns:
            Whether nobody else holds one of them.
        """
        for number, ours in self.gradients.items():
            _move_away(parameters[number], ours)
        return all(torch._C._storage_Use_Count(storage) == users for storage, users in self._users.items())

    def keep(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """While recording: move the parameters' gradients to where those of the graphs before are, if there are any,
        and if they were not written there at once.

        Autograd gives both terms of a sum one tensor, and copies it when it becomes a second parameter's `grad`. A
        replay gives it twice, hence the second has a place of its own from the first graph on.
        """
        places = {g.data_ptr() for g in self.gradients.values()}
        for number, gradient in enumerate(gradients):
            if gradient is not None and number not in self.gradients:
                shared = gradient.data_ptr() in places
                self.gradients[number] = torch.empty_like(gradient) if shared else gradient
                places.add(gradient.data_ptr())
        kept = [None if g is None else self.gradients[number] for number, g in enumerate(gradients)]
        moved = [(k, g) for k, g in zip(kept, gradients, strict=True) if k is not g]
        if moved:
            torch._foreach_copy_(*map(list, zip(*moved, strict=True)))
        return kept

    def count_users(self) -> None:
        """To be called when a recording is done, and nothing of it is held by anybody else."""
        storages = [g.untyped_storage()._cdata for g in self.gradients.values()]
        self._users = {storage: torch._C._storage_Use_Count(storage) for storage in storages}


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for all that is recorded: cuBLAS has a workspace for each stream, and keeps it for ever."""
    return torch.cuda.Stream(device)


def _move_away(parameter: torch.Tensor, ours: torch.Tensor) -> None:
    """By itself, so that no name is left that holds a gradient: who does is counted."""
    if parameter.grad is not None and parameter.grad.data_ptr() == ours.data_ptr():
        parameter.grad = parameter.grad.clone()


class _Pass:
    """One forward pass, as long as its backward pass may come."""

    done = False


class Recorded:
    """`function(*inputs)` with the module's `parameters`, recorded once.

    Args:
        function: returns tensors, and how many of them, the first, have their gradients recorded. It must use the given
            stand-ins for `parameters`, which are of the same memory, and must neither wait for the device nor depend on
            numbers on the host that change.
        inputs: tensors on the device as those that will come.
        parameters: whose gradients are wanted where they require one.
        memory: shared with other graphs of the same parameters.

    Attributes:
        differentiable: of each output, whether it has a gradient.
        sources: of how many of those, the first, it was recorded; that of another one raises.

    Raises:
        RuntimeError: something in it cannot be recorded.
    """

    def __init__(
        self,
        function: Callable[[Tensors, Tensors], tuple[Tensors, int]],
        inputs: Tensors,
        parameters: Tensors,
        memory: Memory,
    ) -> None:
        self._memory = memory
        self._inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        # Stand-ins, as autograd's nodes of the parameters themselves may be of another stream and still be in use.
        standing_in = [torch.nn.Parameter(p.detach(), p.requires_grad) for p in parameters]
        wanted = [x for x in (*self._inputs, *standing_in) if x.requires_grad]

        def forward() -> tuple[Tensors, Tensors]:
            outputs, recorded = function(self._inputs, standing_in)
            return outputs, [y for y in outputs[:recorded] if y.requires_grad]

        def backward(outputs: Tensors) -> Tensors:
            return torch.autograd.grad(outputs, wanted, self._given, allow_unused=True)

        main = torch.cuda.current_stream()
        torch.cuda.empty_cache()  # what ran kernel by kernel before was as large
        memory.stream.wait_stream(main)
        with torch.cuda.stream(memory.stream):  # what libraries make at their first use, they must not make recording
            outputs, sources = forward()
            self._given = [torch.zeros_like(y) for y in sources]
            backward(sources)
            del outputs, sources
        main.wait_stream(memory.stream)

        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Threads that prepare batches may ask for pinned memory meanwhile: "global" would not let them.
        how = {"pool": memory.pool, "stream": memory.stream, "capture_error_mode": "thread_local"}
        with torch.cuda.stream(main):  # PyTorch before 2.15 stays on the other stream if recording fails
            with torch.cuda.graph(self._forward, **how):
                outputs, sources = forward()
            self.differentiable = [y.requires_grad for y in outputs]
            with torch.cuda.graph(self._backward, **how):
                found = iter(backward(sources))
                gradients = [next(found) if x.requires_grad else None for x in (*self._inputs, *standing_in)]
                self._of_inputs, self._of_parameters = gradients[: len(inputs)], memory.keep(gradients[len(inputs) :])
                del gradients, found
        self.sources = len(sources)
        # Without their history, so that what it kept is memory for the next graph.
        self._inputs, self._outputs = [x.detach() for x in self._inputs], [y.detach() for y in outputs]
        del outputs, sources
        memory.count_users()

    def __call__(self, inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        """What the function returns for `inputs`; only while the memory is not `taken`, and after `vacate`."""
        return _Replay.apply(self, self._memory.take(), *inputs, *parameters)

    def replay_forward(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        torch._foreach_copy_(self._inputs, list(inputs))
        self._forward.replay()
        return tuple(y.clone() for y in self._outputs)

    def replay_backward(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        for ours, g in zip(self._given, given[: len(self._given)], strict=True):
            ours.zero_() if g is None else ours.copy_(g)
        self._backward.replay()
        # An input's gradient goes on through the model; a parameter's is used where it is.
        own = [None if g is None else g.clone() for g in self._of_inputs]
        return own + [None if g is None else g.detach() for g in self._of_parameters]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recorded: Recorded, run: _Pass, *tensors: torch.Tensor):
        ctx.recorded, ctx.run = recorded, run
        outputs = recorded.replay_forward(tensors[: len(recorded._inputs)])
        ctx.set_materialize_grads(False)  # logits, of which nobody wants any, would be many zeros
        ctx.mark_non_differentiable(*(y for y, has in zip(outputs, recorded.differentiable, strict=True) if not has))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *given: torch.Tensor):
        if ctx.run.done:
            raise RuntimeError(
                "cuda_graphs: a second backward pass through one forward pass, whose memory has been used again. Call "
                "backward once, or remove the speed-up"
            )
        recorded: Any = ctx.recorded
        wanted = [g for g, has in zip(given, recorded.differentiable, strict=True) if has]
        if any(g is not None for g in wanted[recorded.sources :]):
            raise RuntimeError(
                "cuda_graphs: with scope='model' only the model's own loss has gradients, and here those of its other "
                "outputs (logits, say) are asked for. Use scope='layers'"
            )
        gradients = recorded.replay_backward(wanted)
        # Whoever keeps a loss until the next one is there keeps no graph, and its memory, with it.
        ctx.run.done, ctx.recorded = True, None
        return None, None, *gradients
