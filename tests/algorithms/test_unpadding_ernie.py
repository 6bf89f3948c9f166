"""ERNIE's types of tasks, between BERT's arguments."""

from __future__ import annotations

import copy

import pytest
import torch
from unpadded import batch, compare, make

from composer_speedups import apply_unpadding
from composer_speedups.packed import encoder as packed_encoder

HEAD = "ForSequenceClassification"


@pytest.mark.parametrize("given", [False, True])
def test_types_of_tasks(given: bool, caplog: pytest.LogCaptureFixture) -> None:
    """All zero unless given, and then not packed."""
    stock, inputs = make("Ernie", use_task_id=True, task_type_vocab_size=3), batch(HEAD)
    if given:
        inputs["task_type_ids"] = torch.arange(6 * 16).view(6, 16) % 3
    fast = copy.deepcopy(stock)
    assert apply_unpadding(fast) == 2
    packed_encoder._SAID.clear()
    compare(stock, fast, HEAD, inputs)
    assert ("task_type_ids asked for" in caplog.text) == given


def test_arguments_by_their_place() -> None:
    """Its fourth is not BERT's."""
    stock, inputs = make("Ernie").ernie, batch("Model")
    fast = copy.deepcopy(stock)
    apply_unpadding(fast)
    types, positions = (inputs["input_ids"] % 2, torch.arange(16).flip(0).expand(6, -1))
    mask = inputs["attention_mask"]
    expected, found = (
        m(inputs["input_ids"], mask, types, None, positions).last_hidden_state[mask.bool()] for m in (stock, fast)
    )
    torch.testing.assert_close(found, expected)
