"""The kernels without a GPU, in Triton's interpreter and as compiled for one: `test_interpreted.py` runs this file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mutants import triton_mutant

from composer_speedups.kernels import embedding_gradient as module
from composer_speedups.kernels.embedding_gradient import embedding

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def check(read: Callable, ids: torch.Tensor, number: int, width: int, padding: int | None = None, dy=None) -> None:
    """Against float64; a sum in float32 is off by a rounding for each of its terms at most, of all their sizes."""
    weight = torch.randn(number, width, requires_grad=True)
    y = read(ids, weight, padding)
    assert y.equal(F.embedding(ids, weight))
    dy = torch.randn(y.shape) if dy is None else dy
    (found,) = torch.autograd.grad(y, weight, dy)
    wide, sizes = (weight.detach().double().requires_grad_() for _ in "ws")
    (wanted,) = torch.autograd.grad(F.embedding(ids, wide, padding), wide, dy.double())
    (size,) = torch.autograd.grad(F.embedding(ids, sizes, padding), sizes, dy.double().abs())
    assert found.dtype == torch.float32
    assert ((found.double() - wanted).abs() <= size * max(1, ids.numel()) * torch.finfo(torch.float32).eps / 2).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("number", [1, 2, 4, 5, 300])
@pytest.mark.parametrize("width", [1, 40, 300])
def test_matches_float64(width: int, number: int, dtype: torch.dtype) -> None:
    check(embedding, torch.randint(0, number, (3, 30), dtype=dtype), number, width)


@pytest.mark.parametrize("number", [2, 50])
@pytest.mark.parametrize("rows", [0, 1, 16, 200])
def test_any_number_of_rows(rows: int, number: int) -> None:
    check(embedding, torch.randint(0, number, (rows,)), number, 24)


@pytest.mark.parametrize("number", [3, 20])
def test_padding_gets_nothing(number: int) -> None:
    for padding in (0, number - 1):
        check(embedding, torch.randint(0, number, (60,)), number, 16, padding)
    check(embedding, torch.full((9,), 1), number, 16, 1)


@pytest.mark.parametrize("number", [3, 20])
def test_any_strides(number: int) -> None:
    ids = torch.randint(0, number, (6, 10))
    check(embedding, ids.t()[::2], number, 16, dy=torch.randn(5, 16, 6).transpose(1, 2))
    check(embedding, ids[:1].expand(4, 10), number, 16, dy=torch.randn(1, 1, 16).expand(4, 10, 16))


def test_a_gradient_of_the_gradient() -> None:
    ids, weight = torch.randint(0, 7, (12,)), torch.randn(7, 4, requires_grad=True)
    found = []
    for read in (embedding, lambda ids, weight: F.embedding(ids, weight)):
        (first,) = torch.autograd.grad(read(ids, weight).pow(3).sum(), weight, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_many_gradients_at_once() -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    y = embedding(torch.tensor([0, 2, 2]), weight).sum(0)
    (found,) = torch.autograd.grad(y, weight, torch.eye(2), is_grads_batched=True)
    assert found[:, :, 0].tolist() == [[1, 0, 2], [0, 0, 0]]


def test_a_frozen_table() -> None:
    assert not embedding(torch.tensor([1]), torch.ones(3, 2)).requires_grad


MUTANTS = {
    "none": ("total += ", "total  += "),
    "padding counted": ("(row < rows) & (ids != padding)", "(row < rows)"),
    "padding counted in a small table": ("(ids == own) & (ids != padding)", "(ids == own)"),
    "all to one row": ("ids[:, None] * width", "0 * ids[:, None] * width"),
    "all to each row of a small table": ("(ids == own)", "(ids >= 0)"),
    "rows skipped": ("tl.num_programs(0) * ROWS)", "tl.num_programs(0) * ROWS * 2)"),
    "tokens lost": ("(triton.cdiv(rows, _ROWS), columns)", "(rows // _ROWS, columns)"),
    "one column of tiles only": ("columns = triton.cdiv(width, _COLS)", "columns = width // _COLS"),
    "last programs' sums lost": ("add_up(partial)", "add_up(partial[:, :-4])"),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", MUTANTS)
def test_check_finds_planted_faults(name: str, tmp_path: Path) -> None:
    mutant = triton_mutant(module, *MUTANTS[name], tmp_path)

    def all_of_it() -> None:
        for number in (3, 20):
            check(mutant.embedding, torch.randint(0, number, (101,)), number, 300, 1)

    if name == "none":
        return all_of_it()
    with pytest.raises(AssertionError):
        all_of_it()
