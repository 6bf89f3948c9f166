"""Ranks that exchange gradients in 16 bits: against float64, and in Composer's Trainer on two ranks."""

from __future__ import annotations

import pytest
import torch
from exchange_worker import data_of, loss_of
from exchanges import RANKS

from composer_speedups import GradientCompression, apply_gradient_compression
from composer_speedups.errors import SpeedUpUnavailable

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rank_gradient(rank: int) -> torch.Tensor:
    """In float64."""
    model, rows = data_of(rank)
    loss_of(model.double(), rank, rows.double()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def off(found: torch.Tensor) -> torch.Tensor:
    """By element, from the mean over the ranks in float64, relative to the mean of what they put in."""
    each = torch.stack([rank_gradient(rank) for rank in range(RANKS)])
    return (found.double() - each.mean(0)).abs() / each.abs().mean(0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_the_mean_in_float64_to_two_roundings(exchanged, dtype) -> None:
    """Each rank's is rounded once, and the sum of two once; half an ulp each, and float32's own."""
    (found, counts), (other, _) = exchanged[dtype]
    assert counts == [4, 0], "twice is once"
    assert torch.equal(found, other), "ranks differ"
    assert torch.equal(found, found.to(DTYPES[dtype]).float()), "what travelled had 16 bits"
    eps = torch.finfo(DTYPES[dtype]).eps
    assert off(found).max() < 2 * eps / 2 * 1.01
    assert off(found).max() > eps / 4, "float32 would be far below: nothing was compressed"


def test_a_plain_exchange_is_told_from_it(exchanged) -> None:
    found, _ = exchanged["float32"][0]
    assert off(found).max() < 1e-5
    assert not torch.equal(found, found.bfloat16().float())


def test_microbatches_are_summed_in_float32_and_sent_once(exchanged) -> None:
    found, _ = exchanged["bf16 in parts"][0]
    assert torch.equal(found, found.bfloat16().float())
    assert off(found).max() < torch.finfo(torch.bfloat16).eps * 1.01  # a rounding for each part would be twice that


def test_what_fp16_cannot_hold_is_infinite_where_a_scaler_sees_it(exchanged) -> None:
    assert not exchanged["fp16 too large"][0][0].isfinite().all()


@pytest.mark.parametrize("name", ["trainer", "trainer in parts"])
def test_in_composers_trainer(exchanged, name) -> None:
    one, two = exchanged[name]
    plain = exchanged["plain trainer"][0]
    assert torch.equal(one["weights"], two["weights"]), "ranks differ"
    assert len(one["losses"]) == 4 and one["warned"] == []
    count = one["evidence"][0]["changed"]
    assert count > 30
    assert one["losses"] == pytest.approx(plain["losses"], rel=2**-8)
    assert one["losses"][1:] != plain["losses"][1:], "the same bits: nothing was compressed"


def test_fsdp_is_refused_with_the_remedy(exchanged) -> None:
    assert exchanged["fsdp2"].startswith("SpeedUpUnavailable: GradientCompression(dtype='bf16') cannot be used under")
    assert "Set reduce_dtype" in exchanged["fsdp2"]


def test_beside_another_hook_it_says_whose(exchanged) -> None:
    assert exchanged["another hook"].startswith("ConflictError: ") and " own_hook already" in exchanged["another hook"]


def test_a_built_in_hook_is_another_one(exchanged) -> None:
    said = exchanged["a built-in hook, compression"]
    assert said.startswith("ConflictError: ") and "FP16_COMPRESS already, and takes one" in said


def test_only_the_ranks_of_its_own_group_are_averaged(exchanged) -> None:
    for plain, compressed in exchanged["a group of its own"]:
        assert compressed == pytest.approx(plain, rel=2**-8)
    assert exchanged["a group of its own"][0][0] != pytest.approx(exchanged["a group of its own"][1][0], rel=0.1)


@pytest.mark.parametrize("key", ["compression", "views"])
def test_the_model_can_be_copied_as_composers_swa_does(exchanged, key: str) -> None:
    assert exchanged[f"{key}, swa"] == [None] * RANKS


@pytest.mark.parametrize("key", ["compression", "views"])
def test_a_trainer_that_exchanges_itself_is_refused(exchanged, key: str) -> None:
    said = exchanged[f"{key}, forced_sync"]
    assert said.startswith("ConflictError: gradient_") and "Take 'single_auto_sync' or 'multi_auto_sync'" in said


def test_one_process_has_nothing_to_exchange(make_trainer) -> None:
    with pytest.raises(
        SpeedUpUnavailable, match=r"one process exchanges no gradients: start several, as by ablate --ranks 2"
    ):
        make_trainer([GradientCompression()])
    assert apply_gradient_compression(torch.nn.Linear(2, 2)) == 0
    with pytest.raises(ValueError, match=r"dtype='fp8' is unknown\. Use one of: bf16, fp16"):
        GradientCompression("fp8")
