"""The kernels without a GPU, in Triton's interpreter and as compiled for one: `test_interpreted.py` runs this file."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rounding import rounding

import composer_speedups.kernels.cross_entropy as module
from composer_speedups.kernels.cross_entropy import cross_entropy, reference_cross_entropy
from composer_speedups.kernels.launch import DTYPES

# Triton 3.3's interpreter turns arrays of one element into scalars in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def case(rows: int = 5, vocabulary: int = 37, dtype: torch.dtype = torch.float32):
    logits = (torch.randn(rows, vocabulary) * 4).to(dtype)
    labels = torch.randint(0, vocabulary, (rows,))
    labels[1::3] = -100
    return logits, labels


def check(logits, labels, **options) -> None:
    """Loss and gradient against float64 of the same logits."""
    x = logits.clone().requires_grad_()
    wide = logits.double().requires_grad_()
    reuse = options.pop("reuse_logits", False)
    expected = reference_cross_entropy(wide, labels, **options)
    (want,) = torch.autograd.grad(expected * 3, wide)
    loss = cross_entropy(x * 1, labels, reuse_logits=reuse, **options)
    (got,) = torch.autograd.grad(loss * 3, x)
    # float32 sums over a few thousand terms, of values below 40: 1e-5. The gradient is rounded once to its dtype; its
    # softmax is exp of a difference known to 40 * 2^-24, and exp itself is off by 2^-22 on a GPU.
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    smallest = 2.0**-24 if logits.dtype == torch.float16 else 1e-8  # the spacing of float16's subnormals
    softmax = wide.detach().softmax(-1) * 3 / (labels != options.get("ignore_index", -100)).sum()
    error = (rounding(logits.dtype) + 2.0**-22) * want.abs() + 1e-5 * softmax + smallest
    assert ((got.double() - want).abs() <= error).all(), ((got.double() - want).abs() / error).max()
    assert loss.dtype == torch.float32 and got.dtype == logits.dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 37, 4096, 9001])  # one value; a whole block; blocks and a ragged tail
def test_matches_float64(vocabulary: int, dtype: torch.dtype) -> None:
    check(*case(5, vocabulary, dtype))


@pytest.mark.parametrize("reuse", [False, True])
def test_reuse(reuse: bool) -> None:
    check(*case(6, 5000), reuse_logits=reuse)
    logits, labels = case()
    x = logits.clone().requires_grad_()
    middle = x * 1
    cross_entropy(middle, labels, reuse_logits=reuse).backward()
    assert torch.equal(middle, logits) is not reuse  # given up, or left as it was
    torch.testing.assert_close(cross_entropy(logits, labels), F.cross_entropy(logits, labels))


def test_strides_and_ignore_index() -> None:
    logits, labels = case(8, 33)
    labels[labels == -100] = 7
    for view in (logits.t().contiguous().t(), torch.randn(8, 2, 33)[:, 1], torch.randn(8, 40)[:, 3:36]):
        check(view, labels, ignore_index=7)


@pytest.mark.parametrize("vocabulary", [16, 48, 4128])
def test_aligned_rows(vocabulary: int) -> None:
    check(*case(8, vocabulary))


def test_extreme_logits() -> None:
    logits, labels = torch.full((4, 5000), -1e4), torch.tensor([0, 4999, 4096, 1])
    logits[:, 4999] = 1e4
    check(logits, labels)
    logits = torch.zeros(2, 5000)
    logits[:, :4096] = -torch.inf  # a whole block of words that cannot be
    check(logits, torch.tensor([4500, 4999]))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # in the interpreter, by NumPy
def test_what_cannot_be_is_nan() -> None:
    logits, labels = case()
    for wrong in (-1, 37, 10**12):
        labels[0] = wrong
        assert cross_entropy(logits, labels).isnan()
    labels[0], x = 2**32 + 3, logits.clone().requires_grad_()
    cross_entropy(x, labels).backward()
    assert (x.grad[0] > 0).all(), "the label's 32 lower bits are no label"
    assert cross_entropy(logits, torch.full((5,), -100)).isnan()
    assert cross_entropy(logits[:0], labels[:0]).isnan()
    logits[2, 3] = torch.nan
    assert cross_entropy(logits, torch.zeros(5, dtype=torch.long)).isnan()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("fault", ["one-hot", "scale", "ignored", "maximum"])
def test_the_check_finds_a_planted_fault(fault: str, monkeypatch) -> None:
    forward, backward = module._forward_kernel, module._backward_kernel

    class Wrong:
        def __init__(self, kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                args = list(args)
                if self.kernel is forward:
                    if fault == "maximum":
                        kwargs["COLS"] = 16  # and as many words only
                        args[5] = 16
                elif fault == "one-hot":
                    args[1] = args[1].where(args[1] < 0, 0)
                elif fault == "scale":
                    args[3] = args[3] * 1.01
                elif fault == "ignored":
                    args[8] = -101
                    args[1] = args[1].clamp(min=0)
                self.kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(module, "_forward_kernel", Wrong(forward))
    monkeypatch.setattr(module, "_backward_kernel", Wrong(backward))
    with pytest.raises(AssertionError):
        check(*case())


def test_bad_arguments() -> None:
    logits, labels = case()
    for arguments, message in (
        ((logits[0], labels), "rows, vocabulary"),
        ((logits, labels[:2]), "rows, vocabulary"),
        ((logits.double(), labels), "float64"),
        ((logits, labels.int()), "int32"),
    ):
        with pytest.raises(ValueError, match=message):
            cross_entropy(*arguments)
