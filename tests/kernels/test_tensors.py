"""Parts of one tensor are put together without a copy, and all others as `torch.cat` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from composer_speedups.kernels.tensors import beside, empty_beside


def whole(rows: int = 5) -> torch.Tensor:
    return torch.arange(rows * 12.0).view(rows, 12)


@pytest.mark.parametrize("shape", [(5, 12), (1, 5, 12), (5, 1, 12), (2, 5, 12)], ids=str)
@pytest.mark.parametrize("widths", [(4, 4, 4), (3, 8, 1), (5, 7)], ids=str)
def test_all_parts_in_their_order_are_the_whole(shape: tuple[int, ...], widths: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = beside(x.split(widths, -1))
    assert torch.equal(found, x) and found.data_ptr() == x.data_ptr() and found.is_contiguous()


COPIED: dict[str, Callable[[], list[torch.Tensor]]] = {
    "another order": lambda: list(whole().chunk(3, -1))[::-1],
    "one is missing between": lambda: list(whole().chunk(3, -1))[::2],
    "the last one is missing": lambda: list(whole().chunk(3, -1))[:2],
    "the first one is missing": lambda: list(whole().chunk(3, -1))[1:],
    "one twice": lambda: [whole()[:, :6], whole()[:, :6]],
    "one is a copy": lambda: [(a := whole().chunk(2, -1))[0], a[1].clone()],
    "two tensors in one storage": lambda: list(torch.arange(120.0).view(2, 5, 12)),
    "one below the other": lambda: [(x := whole())[:2, :6], x[2:4, 6:]],
    "of a part of the rows": lambda: list(whole(8)[::2].chunk(2, -1)),
    "columns are apart": lambda: list(torch.arange(120.0).view(5, 24)[:, ::2].chunk(2, -1)),
    "turned": lambda: list(torch.arange(60.0).view(12, 5).t().chunk(2, -1)),
    "one number for all": lambda: [torch.ones(1).expand(5, 6), torch.ones(1).expand(5, 6)],
    "of two tensors": lambda: [whole()[:, :6], whole()[:, 6:]],
    "one is conjugated": lambda: [(x := torch.randn(5, 12, dtype=torch.complex64))[:, :6].conj(), x[:, 6:]],
    "one is negated": lambda: [torch._neg_view((x := whole())[:, :6]), x[:, 6:]],
    "separate": lambda: [torch.ones(5, 6), torch.zeros(5, 6)],
}


@pytest.mark.parametrize("name", COPIED)
def test_what_is_no_whole_is_copied(name: str) -> None:
    parts = COPIED[name]()
    found = beside(parts)
    assert torch.equal(found, torch.cat(parts, -1))
    assert found.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr()


def heads(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    return [y.unflatten(-1, (-1, 2)) for y in x.chunk(parts, -1)]


def shared(tensors: list[torch.Tensor]) -> list[int]:
    """For each the number of the storage that it is in, in their order."""
    seen: list[int] = []
    for x in tensors:
        if x.untyped_storage()._cdata not in seen:
            seen.append(x.untyped_storage()._cdata)
    return [seen.index(x.untyped_storage()._cdata) for x in tensors]


def test_gradients_lie_as_what_they_are_of() -> None:
    q, k, v = heads(whole(), 3)
    alone = torch.ones(3, 2, 2)
    for given, expected in (
        ((q, k, v), [0, 0, 0]),
        ((alone, k, v), [0, 1, 1]),
        ((q.clone(), k.clone(), v.clone()), [0, 1, 2]),
        ((q, v, k), [0, 1, 2]),
        ((q, heads(whole(), 3)[1], v), [0, 1, 2]),
        ((q, k, v.transpose(0, 1).contiguous().transpose(0, 1)), [0, 0, 1]),
    ):
        found = empty_beside(*given)
        assert shared(found) == expected
        assert [x.shape for x in found] == [x.shape for x in given]
        for i, x in enumerate(found):
            x.fill_(i)
        assert all((x == i).all() for i, x in enumerate(found))  # none lies over another


def test_shapes_without_numbers() -> None:
    with FakeTensorMode():
        found = empty_beside(*heads(torch.empty(5, 12), 3))
        assert shared(found) == [0, 0, 0]
        joined = beside([x.flatten(1) for x in found])
        assert joined.shape == (5, 12) and shared([joined, *found]) == [0] * 4
        assert beside([torch.empty(5, 2), torch.empty(5, 3)]).shape == (5, 5)
