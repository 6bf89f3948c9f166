"""Operators of PyTorch's CUDA backend that compute on the CPU, on the null GPU's memory.

The device's memory is the host's, so a CUDA tensor has a CPU tensor at the same address: an operator runs on those, and
what it returns is copied into new CUDA tensors, as its strides are. Views, allocations and the choice of an attention
kernel stay PyTorch's own. Operators without a kernel on the CPU, or with one that computes otherwise, are written out
here; attention in float64, with a mask of its own for dropout, which its backward pass draws again.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.null_gpu import graphs

__all__ = ["install"]

CPU = torch.device("cpu")
Tensor = torch.Tensor

# Without a kernel on the device: memory, views, decisions.
_KEEP = {
    "empty",
    "empty_strided",
    "new_empty",
    "set_",
    "resize_",
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "alias",
    "view_as_real",
    "view_as_complex",
    "_fused_sdp_choice",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "pin_memory",
    "_local_scalar_dense",
    "is_set_to",
    "_to_copy",
    "_resize_output_",
    "_efficientzerotensor",
    "set_data",
}
_SPECIAL: dict[str, Callable[..., Any]] = {}
_library: torch.library.Library | None = None


def install() -> int:
    """Replace the operators in this process; return how many."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    count = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of each operator: that it is replaced
        for full in torch._C._dispatch_get_all_op_names():
            space, _, name = full.partition("::")
            base, _, overload = name.partition(".")
            kernel = _SPECIAL.get(base) if not overload else None
            if space != "aten" or (kernel is None and (base in _KEEP or not _can(full, "CUDA"))):
                continue
            if kernel is None and not any(_can(full, key) for key in ("CPU", "CompositeExplicitAutograd")):
                continue
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            _library.impl(name, _recorded(base, kernel or _on_cpu(operator)), "CUDA", allow_override=True)
            count += 1
    return count


def _chooses(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


def _can(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


# Their results have a size that the host must wait for, which no graph can.
_WAITS = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}  # with masks among the indices, likewise


def _recorded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which the replays of a graph that is being captured call again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if graphs.capturing() and (name in _WAITS or (name in _INDEXED and any(map(_chooses, args[1])))):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        # Of all tensors only where they are: a graph's memory is given back while the graph lives.
        seen = tree_map(_same, (args, kwargs)) if graphs.capturing() else None
        out = kernel(*args, **kwargs)
        if seen is not None:
            results = tree_map(_same, out)

            def again() -> None:
                for old, new in zip(tree_leaves(results), tree_leaves(kernel(*seen[0], **seen[1])), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        _host(old).copy_(_host(new))

            graphs.record(again)
        return out

    return run


def _same(x: Any) -> Any:
    """Another tensor at the same place on the device, which does not own it."""
    if not isinstance(x, Tensor) or x.device.type != "cuda" or not x.untyped_storage().nbytes():
        return x
    storage = x.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), x.device, storage.nbytes())
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())


def _on_cpu(operator: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        given: dict[int, tuple[Tensor, Tensor]] = {}

        def down(x: Any) -> Any:
            if isinstance(x, Tensor) and x.device.type == "cuda":
                host = _host(x)
                given[id(host)] = (host, x)
                return host
            if isinstance(x, torch.Generator) and x.device.type == "cuda":
                return None
            return CPU if isinstance(x, torch.device) else x

        args, kwargs = tree_map(down, (args, kwargs))
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        out = operator(*args, **kwargs)
        owners = {host.untyped_storage().data_ptr(): x for host, x in given.values() if host.numel()}

        def up(y: Any) -> Any:
            if not isinstance(y, Tensor) or y.device.type != "cpu":
                return y
            if id(y) in given:  # changed in place, or written to as `out=`
                x = given[id(y)][1]
                return x if (x.shape, x.stride()) == (y.shape, y.stride()) else x.set_(_device(y))
            if (owner := owners.get(y.untyped_storage().data_ptr())) is not None:
                return owner.as_strided(y.shape, y.stride(), y.storage_offset())
            return _device(y)

        return tree_map(up, out)

    return run


def _host(x: Tensor | None) -> Tensor | None:
    """The CPU tensor at the address of `x`."""
    if x is None or x.device.type == "cpu":
        return x
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CPU)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return torch.empty(0, dtype=x.dtype, device=CPU).set_(memory, x.storage_offset(), x.shape, x.stride())


def _device(y: Tensor) -> Tensor:
    """A new CUDA tensor with the values and the strides of `y`."""
    out = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device="cuda")
    if y.numel():
        left = y.untyped_storage().nbytes() - y.storage_offset() * y.element_size()
        ctypes.memmove(out.data_ptr(), y.data_ptr(), min(left, out.untyped_storage().nbytes()))
    return out


def _special(function: Callable[..., Any]) -> Callable[..., Any]:
    _SPECIAL[function.__name__] = function
    return function


@_special
def copy_(self, source, non_blocking=False):
    _host(self).copy_(_host(source))
    return self


@_special
def native_layer_norm(x, shape, weight, bias, eps):  # mean and deviation are float32 on CUDA
    wide = [None if t is None else _host(t).float() for t in (x, weight, bias)]
    y, mean, rstd = torch.ops.aten.native_layer_norm.default(wide[0], shape, *wide[1:], eps)
    return _device(y.to(x.dtype)), _device(mean), _device(rstd)


@_special
def native_layer_norm_backward(gradient, x, shape, mean, rstd, weight, bias, wanted):
    wide = [None if t is None else _host(t).float() for t in (gradient, x, mean, rstd, weight, bias)]
    out = torch.ops.aten.native_layer_norm_backward.default(*wide[:2], shape, *wide[2:], wanted)
    pairs = zip(out, (x, weight, bias), strict=True)
    return tuple(None if g is None or like is None else _device(g.to(like.dtype)) for g, like in pairs)


# --- attention --------------------------------------------------------------------------------------------------------


def _draw() -> Tensor:
    return torch.randint(0, 1 << 62, (2,), device=CPU)


def _probabilities(q, k, bias, p: float, scale: float, seed: int):
    """Of `[..., length, width]` in float64: the probabilities, what dropout multiplies them with, log of the sums."""
    scores = q.double() @ k.double().mT * scale
    if bias is not None:
        scores = scores + bias.double()
    factor = torch.ones(())
    if p:
        factor = (torch.rand(scores.shape, generator=torch.Generator(CPU).manual_seed(seed), device=CPU) >= p) / (1 - p)
    nothing = scores.isneginf().all(-1, keepdim=True)  # since PyTorch 2.5 it gets zeros, and no NaN
    return scores.softmax(-1).masked_fill(nothing, 0), factor, scores.logsumexp(-1).float()


def _attend(q, k, v, bias, p, scale, seed):
    probabilities, factor, sums = _probabilities(q, k, bias, p, scale, seed)
    return ((probabilities * factor) @ v.double()).to(q.dtype), sums


def _gradients(gradient, q, k, v, bias, p, scale, seed):
    probabilities, factor, _ = _probabilities(q, k, bias, p, scale, seed)
    gradient = gradient.double()
    dv = (probabilities * factor).mT @ gradient
    through = gradient @ v.double().mT * factor
    ds = probabilities * (through - (through * probabilities).sum(-1, keepdim=True))
    return ds @ k.double() * scale, ds.mT @ q.double() * scale, dv, ds


def _spans(queries: Tensor, keys: Tensor, q: Tensor, k: Tensor, most_q: int, most_k: int) -> list[tuple[slice, slice]]:
    """Of each sequence that has queries; with the checks that flash attention makes, or leaves to its caller."""
    for ends in (queries, keys):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.is_cuda
    a, b = _host(queries).tolist(), _host(keys).tolist()
    spans = [(slice(*x), slice(*y)) for x, y in zip(pairwise(a), pairwise(b), strict=True)]
    assert (a[0], b[0], a[-1], b[-1]) == (0, 0, len(q), len(k)), "cumulative lengths must end with the tokens"
    assert all(x.stop - x.start <= most_q and y.stop - y.start <= most_k for x, y in spans), "a sequence is too long"
    return [(x, y) for x, y in spans if x.stop > x.start]


def _parts(ends_q, ends_k, q, k, most_q: int, most_k: int) -> list[tuple[Any, Any]]:
    """Where each sequence's queries and keys are: in rows of their own, or between cumulative lengths."""
    if ends_q is None:
        return [(i, i) for i in range(len(q))]
    return _spans(ends_q, ends_k, q, k, most_q, most_k)


def _near(q: torch.Tensor, k: torch.Tensor, sides: tuple[int | None, int | None]) -> torch.Tensor | None:
    """What is added to the scores of one sequence [heads, tokens, width] for windows; both end with the same token."""
    left, right = (-1 if side is None else side for side in sides)
    if left < 0 and right < 0:
        return None
    n, m = q.shape[1], k.shape[1]
    ahead = torch.arange(m, device=CPU) - (torch.arange(n, device=CPU)[:, None] + m - n)
    hidden = ((ahead < -left) if left >= 0 else False) | ((ahead > right) if right >= 0 else False)
    return torch.zeros(n, m, device=CPU).masked_fill(hidden, -torch.inf)


@_special
def _flash_attention_forward(
    q,
    k,
    v,
    ends_q,
    ends_k,
    most_q,
    most_k,
    p,
    causal,
    debug,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    **_,
):
    half = q.dtype in (torch.float16, torch.bfloat16)
    assert half and not causal and q.shape[-1] % 8 == 0 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    scale, seeds, out = scale or q.shape[-1] ** -0.5, _draw(), torch.empty(q.shape, dtype=q.dtype, device=CPU)
    hq, hk, hv = _host(q), _host(k), _host(v)
    sums = torch.zeros(*q.shape[:-1], device=CPU)  # [..., tokens, heads], as the queries; returned the other way round
    for i, (a, b) in enumerate(_parts(ends_q, ends_k, q, k, most_q, most_k)):
        tensors = [t.transpose(0, 1) for t in (hq[a], hk[b], hv[b])]
        bias = _near(*tensors[:2], (window_size_left, window_size_right))
        one, some = _attend(*tensors, bias, p, scale, int(seeds[0]) + i)
        out[a], sums[a] = one.transpose(0, 1), some.T
    rest = (seeds.view(torch.uint64), torch.zeros((), dtype=torch.uint64), torch.zeros(0, dtype=q.dtype))
    return tuple(_device(t) for t in (out, sums.mT.contiguous(), *rest))


@_special
def _flash_attention_backward(
    gradient,
    q,
    k,
    v,
    out,
    sums,
    ends_q,
    ends_k,
    most_q,
    most_k,
    p,
    causal,
    state,
    unused,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
):
    scale, seed = scale or q.shape[-1] ** -0.5, int(_host(state).view(torch.int64)[0])
    g, hq, hk, hv = (_host(t) for t in (gradient, q, k, v))
    found = [torch.zeros(t.shape, dtype=t.dtype, device=CPU) for t in (q, k, v)]
    for i, (a, b) in enumerate(_parts(ends_q, ends_k, q, k, most_q, most_k)):
        tensors = [t.transpose(0, 1) for t in (g[a], hq[a], hk[b], hv[b])]
        bias = _near(*tensors[1:3], (window_size_left, window_size_right))
        some = _gradients(*tensors, bias, p, scale, seed + i)[:3]
        for target, at, value in zip(found, (a, b, b), some, strict=True):
            target[at] = value.transpose(0, 1).to(target.dtype)
    return tuple(map(_device, found))


@_special
def _scaled_dot_product_flash_attention(q, k, v, p=0.0, causal=False, debug=False, *, scale=None):
    swapped = (t.transpose(1, 2) for t in (q, k, v))
    lengths = q.shape[2], k.shape[2]
    out, sums, *rest = _flash_attention_forward(*swapped, None, None, *lengths, p, causal, False, scale=scale)
    return out.transpose(1, 2), sums, None, None, *lengths, *rest


@_special
def _scaled_dot_product_flash_attention_backward(gradient, q, k, v, out, sums, a, b, *rest, scale=None):
    swapped = (t.transpose(1, 2) for t in (gradient, q, k, v))
    found = _flash_attention_backward(*swapped, out, sums, None, None, *rest, scale=scale)
    return tuple(t.transpose(1, 2) for t in found)


def _dense(q, k, v, bias, p, scale):
    seeds = _draw()
    out, sums = _attend(*map(_host, (q, k, v, bias)), p, scale or q.shape[-1] ** -0.5, int(seeds[0]))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return _device(out), _device(sums), *(_device(one.clone()) for one in seeds)


def _dense_backward(gradient, q, k, v, bias, p, scale, seed):
    tensors = map(_host, (gradient, q, k, v, bias))
    *found, ds = _gradients(*tensors, p, scale or q.shape[-1] ** -0.5, int(_host(seed)))
    found = [_device(torch.empty_like(_host(like)).copy_(g)) for g, like in zip(found, (q, k, v), strict=True)]
    return *found, None if bias is None else _device(ds.sum_to_size(bias.shape).to(bias.dtype))


@_special
def _softmax(x, dim, to_float):  # of float16 to float32, as autocast asks for it; the CPU's kernel does not
    host = _host(x)
    return _device((host.float() if to_float else host).softmax(dim))


@_special
def _softmax_backward_data(gradient, out, dim, dtype):
    gradient, out = _host(gradient), _host(out)
    return _device(torch._softmax_backward_data(gradient, out, dim, out.dtype).to(dtype))


@_special
def _scaled_dot_product_efficient_attention(q, k, v, bias, want_sums, p=0.0, causal=False, *, scale=None):
    assert not causal
    out, sums, *rest = _dense(q, k, v, bias, p, scale)
    wide = sums.new_zeros(*sums.shape[:-1], (sums.shape[-1] + 31) // 32 * 32)  # as its kernel needs them aligned
    wide[..., : sums.shape[-1]] = sums
    return out, wide if want_sums else wide[..., :0], *rest


@_special
def _scaled_dot_product_efficient_attention_backward(
    gradient, q, k, v, bias, out, sums, seed, offset, p, wanted, causal=False, *, scale=None
):
    assert sums.numel(), "forward was not told that backward would come: a device reads there what nobody has written"
    found = _dense_backward(gradient, q, k, v, bias, p, scale, seed)
    return (*found[:3], found[3] if wanted[3] else None)


@_special
def _scaled_dot_product_cudnn_attention(q, k, v, bias, want_sums, p=0.0, causal=False, debug=False, *, scale=None):
    assert not causal
    out, sums, seed, offset = _dense(q, k, v, bias, p, scale)
    return out, sums[..., None].clone(), None, None, q.shape[2], k.shape[2], seed, offset, None


@_special
def _scaled_dot_product_cudnn_attention_backward(
    gradient, q, k, v, out, sums, seed, offset, bias, a, b, most_q, most_k, p, causal, *, scale=None
):
    return _dense_backward(gradient, q, k, v, bias, p, scale, seed)[:3]
