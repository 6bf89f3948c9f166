from __future__ import annotations

import weakref

import torch

from composer_speedups.read_twice import as_residual, given_out_twice, read_twice, reading_twice


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.ones(3, requires_grad=True) * 1
    return first, first.detach()


def test_only_inside_and_where_gradients_are() -> None:
    assert not read_twice()
    with reading_twice():
        assert read_twice()
        with torch.no_grad():
            assert not read_twice()
        with reading_twice():
            first, second = pair()
            assert given_out_twice(first, second) is first and as_residual(first) is second
        assert read_twice() and as_residual(first) is first
    assert not read_twice() and given_out_twice(first, second) is first and as_residual(first) is first


def test_another_tensor_is_itself() -> None:
    with reading_twice():
        first, second = pair()
        given_out_twice(first, second)
        other = torch.ones(3)
        assert as_residual(other) is other and as_residual(second) is second


def test_what_has_no_gradient_is_not_kept() -> None:
    """Of frozen layers: all their hidden states would stay until the end."""
    with reading_twice():
        first = torch.ones(3)
        alive = weakref.ref(given_out_twice(first, first.detach()))
        assert as_residual(first) is first
        del first
        assert alive() is None


def test_what_was_changed_in_place_is_itself() -> None:
    """Its gradient goes through the change."""
    with reading_twice():
        first, second = pair()
        given_out_twice(first, second)
        first.mul_(2)
        assert as_residual(first) is first


def test_compiled_code_knows_nothing_of_it() -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return as_residual(x) + read_twice()

    with reading_twice():
        first, second = pair()
        given_out_twice(first, second.add(1))
        compiled = torch.compile(reads, backend="eager", fullgraph=True)
        assert compiled(first).eq(1).all() and reads(first).eq(3).all()


def test_tensors_of_inference_mode_are_themselves() -> None:
    """They have no version to look at."""
    with torch.inference_mode():
        x = torch.ones(2)
        assert as_residual(x) is x
        with reading_twice():
            assert as_residual(given_out_twice(x, x + 1)) is x
