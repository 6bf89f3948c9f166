"""Token budgets on two ranks: microbatches, going on with another number of ranks, and what is reported."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from budget_worker import MICROBATCH, ROWS, TOKENS, train
from exchanges import worked

from composer_speedups import TokenBudgetBatches
from composer_speedups.errors import ConflictError

TESTS = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.elsewhere,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:The tokenizer was not provided"),
    pytest.mark.filterwarnings("ignore:.*The current world size"),  # Composer's, of random states
]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of what two ranks did, and their results; pytest's workers share it."""
    folder = worked(tmp_path_factory, "budget_worker.py")
    return folder, torch.load(folder / "results.pt")


@pytest.mark.parametrize("strategy", ["multi", "fsdp2"])
def test_ranks_do_as_many_microbatches(strategy: str, two) -> None:
    """Else the rank with more waits for the others until the time is out."""
    found = two[1][strategy]
    assert "error" not in found, found
    parts = found["parts"]
    alone = [{-(-sum(split) // MICROBATCH) for split in step} for step in zip(*parts, strict=True)]
    assert any(len(counts) > 1 for counts in alone), "each by itself would have as many: nothing is shown"
    assert all(len(one) == len(other) > 1 for one, other in zip(*parts, strict=True))
    assert max(size for rank in parts for step in rank for size in step) <= MICROBATCH
    assert sorted(found["rows"]) == list(range(ROWS))
    whole = train(TokenBudgetBatches())
    # Adam's first steps are lr * sign(g): of gradients that are zero but for roundings, whole steps. Seen: 0.023.
    assert (found["weights"] - whole["weights"]).norm() < 0.06 * (whole["weights"] - whole["start"]).norm()


def test_the_default_budget_goes_on_with_another_number_of_ranks(two) -> None:
    folder, results = two
    rest = train(TokenBudgetBatches(), load_path=f"{folder}/default/ep0-ba4-rank0.pt")
    assert rest["steps"] == results["default"]["steps"] == 6
    assert sorted(results["default"]["rows"] + rest["rows"]) == list(range(ROWS))


def test_an_own_budget_on_another_number_of_ranks_is_refused_with_the_one_that_goes_on(two) -> None:
    folder, results = two
    path = f"{folder}/tokens/ep0-ba4-rank0.pt"
    steps = results["tokens"]["steps"]
    with pytest.raises(
        ConflictError, match=rf"epoch of {steps} batches on 2 ranks, and here an epoch has \d+ on 1"
    ) as e:
        train(TokenBudgetBatches(TOKENS), load_path=path)
    assert "\n" not in str(e.value)
    rest = train(TokenBudgetBatches(int(str(e.value).rpartition("tokens_per_batch=")[2])), load_path=path)
    assert rest["steps"] == steps
    assert sorted(results["tokens"]["rows"] + rest["rows"]) == list(range(ROWS))


def test_a_checkpoint_of_an_older_version_loads_and_other_batches_are_told(two, tmp_path, caplog) -> None:
    folder, _ = two
    for name, algorithm, told in (("default", TokenBudgetBatches(), 0), ("tokens", TokenBudgetBatches(TOKENS), 1)):
        content = torch.load(f"{folder}/{name}/ep0-ba4-rank0.pt", weights_only=False)
        content["state"]["algorithms"] = [(key, {"repr": s["repr"]}) for key, s in content["state"]["algorithms"]]
        path = tmp_path / f"{name}.pt"
        torch.save(content, path)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "composer_speedups"):
            train(algorithm, load_path=str(path))
        assert [r.getMessage() for r in caplog.records if "samples may come twice" in r.getMessage()][told:] == []
        assert caplog.text.count("in the middle of epoch 0 with other batches") == told


def test_samples_of_all_ranks_are_counted(two) -> None:
    found = two[1]["measured"]
    assert "error" not in found, found
    assert sum(found["samples"]) == found["of"] == 96
