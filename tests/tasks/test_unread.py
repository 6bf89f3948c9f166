"""Parameters that nothing reads are not trained: DDP would wait for them, and no checkpoint could be loaded."""

from __future__ import annotations

import pytest
import torch
import transformers
from small import bert_config, config_of
from unpadded import FAMILIES, HEADS, make, tiny_config

from composer_speedups.tasks.unread import freeze_unread


def frozen(model: torch.nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if not p.requires_grad]


@pytest.mark.parametrize("head", [head for head in HEADS if head not in ("Model", "ForQuestionAnswering")])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_has_a_gradient_stays_and_no_more(family: str, head: str) -> None:
    model = make(family, head).float().train()
    state, random = {n: b.clone() for n, b in model.state_dict().items()}, torch.get_rng_state()
    freeze_unread(model)
    assert model.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(b, state[n]) for n, b in model.state_dict().items())
    assert frozen(model) == [n for n, _ in model.named_parameters() if "contact_head" in n]
    ids = torch.randint(5, 64, (3, 12))
    model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.square().sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_what_is_frozen_and_what_is_tied_stays_so() -> None:
    model = transformers.BertForMaskedLM(bert_config())
    model.bert.encoder.layer[0].requires_grad_(False)
    before = frozen(model)
    assert freeze_unread(model) == 0 and frozen(model) == before
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert freeze_unread(model) == 0


def test_what_a_model_notes_of_its_device_is_not_of_this_one() -> None:
    """ModernBERT of transformers 4.53 would never compile itself on a GPU, once it has run on a CPU."""
    model = transformers.ModernBertForSequenceClassification(tiny_config("ModernBert", reference_compile=None))
    before = dict(vars(model.config))
    freeze_unread(model)
    assert vars(model.config) == before


def test_entities_that_no_text_has() -> None:
    config = transformers.LukeConfig(
        vocab_size=64, entity_vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, entity_emb_size=16, pad_token_id=1, use_entity_aware_attention=False,
    )  # fmt: skip
    model = transformers.LukeForSequenceClassification(config)
    freeze_unread(model)
    assert frozen(model) and all("entity" in name for name in frozen(model))


def test_a_model_that_cannot_be_tried_stays_as_it_is() -> None:
    config = config_of("Bert", **bert_config().to_diff_dict())
    model = transformers.BertForSequenceClassification(config)
    model.classifier = torch.nn.Linear(7, 3)
    assert freeze_unread(model) == 0 and frozen(model) == []
