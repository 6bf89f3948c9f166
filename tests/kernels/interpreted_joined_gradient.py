"""Sums with copies, and sums of partial sums, without a GPU: `test_interpreted.py` runs this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from mutants import triton_mutant

from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels import joined_gradient as module
from composer_speedups.kernels import joined_gradient_triton as cuda
from composer_speedups.kernels import partial_sums
from composer_speedups.kernels.launch import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

BF16 = torch.bfloat16


def check_sum(found: torch.Tensor, terms: torch.Tensor) -> None:
    """Of `terms` over the dimension before the last: a rounding of float32 for each row at most."""
    wide = terms.double()
    allowed = (wide.abs().sum(-2) * terms.shape[-2] * torch.finfo(torch.float32).eps / 2).clamp(min=1e-30)
    assert found.dtype == torch.float32 and ((found.double() - wide.sum(-2)).abs() <= allowed).all()


def check(join: Callable, parts: Sequence[torch.Tensor]) -> None:
    joined, sums = join(parts)
    wanted = torch.cat(list(parts), -1)
    assert joined.is_contiguous() and joined.equal(wanted)
    check_sum(sums, wanted.flatten(0, -2))


def parts_of(rows: int, width: int, dtype: torch.dtype = BF16, number: int = 3) -> list[torch.Tensor]:
    return [torch.randn(rows, width).to(dtype) for _ in range(number)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("width", [1, 64, 300, 768])
def test_matches_a_copy_and_float64(width: int, number: int, dtype: torch.dtype) -> None:
    check(module.joined_and_summed, parts_of(37, width, dtype, number))


@pytest.mark.parametrize("rows", [0, 1, 16, 33, 600])
def test_any_number_of_rows(rows: int) -> None:
    check(module.joined_and_summed, parts_of(rows, 40))


def test_any_strides() -> None:
    q, k, v = parts_of(24, 64)
    for same in (lambda x: x[:, ::2], lambda x: x[::2], lambda x: x.view(4, 6, 64).transpose(0, 1)):
        check(module.joined_and_summed, [same(x) for x in (q, k, v)])
    wide = torch.randn(24, 3 * 64).to(BF16)
    check(module.joined_and_summed, wide.split(64, -1))
    check(module.joined_and_summed, [q, wide[:, :64], v[:1].expand(24, 64)])


def test_parts_of_one_tensor_are_only_summed_up() -> None:
    whole = torch.randn(600, 3 * 40).to(BF16)
    joined, sums = module.joined_and_summed(whole.split(40, -1))
    assert joined.data_ptr() == whole.data_ptr() and joined.equal(whole)
    check_sum(sums, whole)
    for others in (whole.split(40, -1)[::-1], whole[:, 3:].split(39, -1), whole[::2].split(40, -1)):
        check(module.joined_and_summed, others)


def test_repeats_bit_for_bit() -> None:
    parts = parts_of(200, 48)
    assert all(a.equal(b) for a, b in zip(*(module.joined_and_summed(parts) for _ in "ab"), strict=True))


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 17), (511, 33), (1056, 64), (3, 700, 48), (2, 0, 16)])
def test_partial_sums(shape: tuple[int, ...]) -> None:
    partial = torch.randn(shape)
    check_sum(partial_sums.add_up(partial), partial)
    if len(shape) == 3 and shape[1] > 1:
        check_sum(partial_sums.add_up(partial[:, 1:]), partial[:, 1:])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("widths", [(32, 32, 32), (32, 32), (32, 16, 32)])
def test_layers_have_their_gradients(widths: tuple[int, ...], autocast: bool) -> None:
    """As near to float64 as the layers one by one, by the kernel where it serves."""
    torch.manual_seed(0)
    linear, x = [torch.nn.Linear(24, width) for width in widths], torch.randn(2, 50, 24, requires_grad=True)
    wanted = [x, *(p for m in linear for p in m.parameters())]
    gradients = [torch.randn(2, 50, width).to(BF16 if autocast else torch.float32) for width in widths]
    assert module.serves(x, widths) == (len(set(widths)) == 1)

    def of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [g.double() for g in torch.autograd.grad(outputs, wanted, gradients)]

    exact = of([torch.nn.functional.linear(x.double(), m.weight.double(), m.bias.double()) for m in linear])
    with torch.autocast("cpu", BF16, enabled=autocast):
        outputs, apart = joint_linear(linear, x), [m(x) for m in linear]
    assert all(y.equal(z) or not autocast for y, z in zip(outputs, apart, strict=True))
    for name, found, one, reference in zip("xwbwbwb", of(outputs), of(apart), exact, strict=False):
        worst = (one - reference).abs().max() + 1e-6 * reference.abs().max()
        assert (found - reference).abs().max() <= 1.5 * worst, name


def test_only_the_gradients_asked_for() -> None:
    linear, x = [torch.nn.Linear(8, 16) for _ in range(3)], torch.randn(5, 8)
    for m in linear:
        m.weight.requires_grad_(False)
    torch.cat(joint_linear(linear, x), -1).sum().backward()
    assert all(m.bias.grad.eq(5).all() and m.weight.grad is None for m in linear)
    with torch.no_grad():
        assert not joint_linear(linear, x)[0].requires_grad


@pytest.mark.parametrize("shape", [(5, 4), (4,), (2, 3, 4)])
def test_a_gradient_of_the_gradient(shape: tuple[int, ...]) -> None:
    linear, x = [torch.nn.Linear(4, 3) for _ in range(2)], torch.randn(shape, requires_grad=True)
    bias = linear[0].bias
    found = []
    for outputs in (joint_linear(linear, x), [m(x) for m in linear]):
        first = torch.autograd.grad(sum(y.pow(3).sum() for y in outputs), [x, bias], create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), [x, bias, linear[1].weight]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_many_gradients_at_once() -> None:
    linear, x = [torch.nn.Linear(8, 16) for _ in range(3)], torch.randn(5, 8, requires_grad=True)
    bias = linear[0].bias
    for outputs in (joint_linear(linear, x), [m(x) for m in linear]):
        sums = torch.cat(list(outputs), -1).sum(0)
        found = torch.autograd.grad(sums, [x, bias], torch.eye(48), is_grads_batched=True)
        weight = torch.cat([m.weight for m in linear])
        torch.testing.assert_close(found[0], weight[:, None].expand(48, 5, 8))
        assert found[1].equal(5 * torch.eye(48)[:, :16])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # PyTorch's own, of formulas for it
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_derivatives_forwards() -> None:
    linear, x = [torch.nn.Linear(8, 16) for _ in range(3)], torch.randn(5, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        for y, m in zip(joint_linear(linear, dual), linear, strict=True):
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, m.weight.sum(1).expand(5, 16))


def test_float64_is_left_to_pytorch() -> None:
    assert not module.serves(torch.ones(2, 3, dtype=torch.float64), [4, 4])


MUTANTS = {
    "none": ("total += ", "total  += "),
    "the second part twice": ("elif part == 2:", "elif part == 3:"),
    "rows skipped": ("tl.num_programs(0) * ROWS)", "tl.num_programs(0) * ROWS * 2)"),
    "last program's sums lost": ("add_up(partial)", "add_up(partial[:-4])"),
    "a sum of some rows": ("(ROWS // SUMS, SUMS, COLS)), 0)", "(ROWS // SUMS, SUMS, COLS)), 0) * (start == 0)"),
    "parts over each other": ("+ part * width + col[None, :], g,", "+ col[None, :], g,"),
    "one column of tiles only": ("number * triton.cdiv(width, _COLS)", "number * (width // _COLS)"),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", MUTANTS)
def test_check_finds_planted_faults(name: str, tmp_path: Path) -> None:
    mutant, parts = triton_mutant(cuda, *MUTANTS[name], tmp_path), parts_of(200, 300)
    if name == "none":
        return check(mutant.joined_and_summed, parts)
    with pytest.raises(AssertionError):
        check(mutant.joined_and_summed, parts)


SUM_MUTANTS = {
    "none": ("total += ", "total  += "),
    "later turns lost": ("range(0, rows, ROWS)", "range(0, ROWS, ROWS)"),
    "one group for all": ("partial_ptr + group * stride", "partial_ptr + 0 * group * stride"),
    "beyond the rows": ("mask = (row < rows)[:, None] &", "mask = (row < rows + 1)[:, None] &"),
    "last columns lost": ("triton.cdiv(width, _COLS)", "width // _COLS"),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", SUM_MUTANTS)
def test_check_of_sums_finds_planted_faults(name: str, tmp_path: Path) -> None:
    mutant = triton_mutant(partial_sums, *SUM_MUTANTS[name], tmp_path)
    partial = torch.randn(2, 600, 40)[:, :-1]
    if name == "none":
        return check_sum(mutant.add_up(partial), partial)
    with pytest.raises(AssertionError):
        check_sum(mutant.add_up(partial), partial)
