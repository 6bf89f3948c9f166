"""Moments read from and written in the format of every AdamW: exact but for 8 bits, and never shared."""

from __future__ import annotations

import pytest
import torch

from composer_speedups.optim.states import BLOCK_SIZE, Moments, layout_of, read_moments, write_moments

SHAPES = [(), (1,), (255,), (256,), (257,), (64, 65), (3, 5, 7)]
EXACT = ["torch", "bnb32", "apex"]
# Half the widest gap between neighbouring codes, next to the block's maximum: 7 binary digits of fraction, one of
# them for the sign in the signed code book. Relative to the maximum of the block. bitsandbytes' CPU kernel finds codes
# through a table and misses the nearest by 0.4 % of that at most (seen over a million values), hence 1 % more.
SIGNED, UNSIGNED = 1.01 * 0.9 / 64 / 2, 1.01 * 0.9 / 128 / 2


def qmaps() -> tuple[torch.Tensor, torch.Tensor]:
    import bitsandbytes.functional as bnb

    return bnb.create_dynamic_map(signed=True), bnb.create_dynamic_map(signed=False)


def moments(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Moments:
    random = torch.Generator().manual_seed(len(shape) + sum(shape))
    mean = torch.randn(shape, generator=random) * 10.0 ** torch.randint(-6, 2, shape, generator=random)
    return Moments(7, mean.to(dtype), mean.square().to(dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", EXACT)
def test_what_is_written_is_read_bit_for_bit(layout, shape) -> None:
    wanted = moments(shape)
    state = write_moments(wanted, layout, torch.empty(shape))
    assert layout_of(state) == layout
    found = read_moments(state, {"step": 7})
    assert found.step == 7
    assert torch.equal(found.exp_avg, wanted.exp_avg) and torch.equal(found.exp_avg_sq, wanted.exp_avg_sq)
    assert found.exp_avg.shape == torch.Size(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_8_bits_are_within_half_a_gap_of_the_block_maximum(shape) -> None:
    wanted = moments(shape)
    state = write_moments(wanted, "bnb8", torch.empty(shape), qmaps=qmaps())
    assert layout_of(state) == "bnb8"
    assert state["state1"].shape == torch.Size(shape) and state["state1"].dtype == torch.uint8
    found = read_moments(state)
    for old, new, bound in (
        (wanted.exp_avg, found.exp_avg, SIGNED),
        (wanted.exp_avg_sq, found.exp_avg_sq, UNSIGNED),
    ):
        for a, b in zip(old.flatten().split(BLOCK_SIZE), new.flatten().split(BLOCK_SIZE), strict=True):
            assert (a - b).abs().max() <= a.abs().max() * bound


def test_the_bound_of_8_bits_is_reached_within_a_factor_of_two() -> None:
    """A bound far too wide would let a wrong code book through."""
    wanted = torch.linspace(-1, 1, 4096)
    found = read_moments(write_moments(Moments(1, wanted, wanted.abs()), "bnb8", wanted, qmaps=qmaps()))
    assert (wanted - found.exp_avg).abs().max() > SIGNED / 2
    assert (wanted.abs() - found.exp_avg_sq).abs().max() > UNSIGNED / 2


@pytest.mark.parametrize("layout", ["bnb32", "bnb8"])
def test_what_bitsandbytes_itself_wrote_is_read(layout) -> None:
    """Not only what this module wrote: after one step m = (1 - beta1) g and v = (1 - beta2) g^2."""
    import bitsandbytes.optim as bnb

    p = torch.nn.Parameter(torch.zeros(64, 70))
    p.grad = torch.randn(64, 70, generator=torch.Generator().manual_seed(1))
    optimizer = (bnb.AdamW if layout == "bnb32" else bnb.AdamW8bit)([p], lr=1e-3)
    optimizer.step()
    assert layout_of(optimizer.state[p]) == layout
    found = read_moments(optimizer.state[p])
    assert found.step == 1
    mean, square = 0.1 * p.grad, 0.001 * p.grad**2
    # 32 bits: two roundings. 8 bits: bitsandbytes rounds to the nearest code by another route than we, a gap at most.
    for old, new, bound in ((mean, found.exp_avg, 2 * SIGNED), (square, found.exp_avg_sq, 2 * UNSIGNED)):
        error = (old - new).abs().max() / old.abs().max()
        assert error <= (bound if layout == "bnb8" else 2 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("layout", [*EXACT, "bnb8"])
def test_nothing_is_shared_with_what_was_read(layout) -> None:
    source = write_moments(moments((300,)), layout, torch.empty(300), qmaps=qmaps())
    copied = write_moments(read_moments(source, {"step": 7}), layout, torch.empty(300), qmaps=qmaps())
    own = {t.data_ptr() for name, t in source.items() if isinstance(t, torch.Tensor) and "qmap" not in name}
    assert own and not own & {t.data_ptr() for t in copied.values() if isinstance(t, torch.Tensor)}


def test_torch_moments_have_the_parameters_dtype_and_bitsandbytes_32_bits() -> None:
    parameter = torch.empty(8, dtype=torch.bfloat16)
    wanted = moments((8,), torch.bfloat16)
    assert write_moments(wanted, "torch", parameter)["exp_avg"].dtype == torch.bfloat16
    assert write_moments(wanted, "bnb32", parameter)["state1"].dtype == torch.float32


def test_steps_are_where_each_optimizer_looks_for_them() -> None:
    parameter = torch.empty(2)
    step = write_moments(moments((2,)), "torch", parameter)["step"]
    assert (step.dtype, step.shape, step.device.type, step.item()) == (torch.float32, (), "cpu", 7)
    assert write_moments(moments((2,)), "bnb32", parameter)["step"] == 7
    apex = write_moments(moments((2,)), "apex", parameter)
    assert "step" not in apex and read_moments(apex, {"step": 9}).step == 9 and read_moments(apex).step == 0


def test_amsgrad_maximum_comes_along() -> None:
    wanted = moments((4,))
    wanted.max_exp_avg_sq = wanted.exp_avg_sq * 2
    found = read_moments(write_moments(wanted, "torch", torch.empty(4)))
    assert torch.equal(found.max_exp_avg_sq, wanted.max_exp_avg_sq)


@pytest.mark.parametrize("state", [{}, {"momentum_buffer": torch.zeros(2)}, {"step": 1}])
def test_other_states_are_refused(state) -> None:
    with pytest.raises(ValueError, match="no AdamW state known here has the entries"):
        layout_of(state)


@pytest.mark.parametrize(("name", "size"), [("absmax1", 1), ("absmax2", 3), ("qmap1", 16)])
def test_8_bit_state_with_too_few_scales_is_refused_before_the_kernel_reads_it(name, size) -> None:
    state = write_moments(moments((300,)), "bnb8", torch.empty(300), qmaps=qmaps())
    state[name] = state[name].new_ones(size)
    with pytest.raises(ValueError, match="300 elements in 8 bits need 2 scales and 256 codes"):
        read_moments(state)
