"""Small models of all families without padding and with it, batches for them, and what must be equal."""

from __future__ import annotations

import pytest
import torch
import transformers
from small import config_of

ROWS, LENGTH = 6, 16

FAMILIES = {  # those that the installed transformers has, and their padding ids
    "Bert": 0,
    "Roberta": 1,
    "XLMRoberta": 1,
    "Camembert": 1,
    "Electra": 0,
    "DistilBert": 0,
    "ModernBert": 0,
    "MPNet": 1,
    "DebertaV2": 0,
    "Esm": 1,
    "Albert": 0,
    "Data2VecText": 1,
    "Ernie": 0,
    "NomicBert": 0,
    "JinaEmbeddingsV3": 1,
    "Gte": 1,
    "EuroBert": 0,
}
FAMILIES = {family: padding for family, padding in FAMILIES.items() if hasattr(transformers, f"{family}Config")}
EAGER_ONLY = [family for family in FAMILIES if not getattr(transformers, f"{family}Model")._supports_sdpa]
HEADS = ["ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForQuestionAnswering", "Model"]

# Each head once, and what families differ in: positions that count padding ids, embeddings of another width.
KINDS = [
    ("Bert", "ForSequenceClassification"),
    ("Roberta", "ForMaskedLM"),
    ("Electra", "ForTokenClassification"),
    ("XLMRoberta", "ForQuestionAnswering"),
    ("DistilBert", "ForSequenceClassification"),
    ("DistilBert", "ForMaskedLM"),
    ("ModernBert", "ForSequenceClassification"),
    ("ModernBert", "ForMaskedLM"),
    ("MPNet", "ForSequenceClassification"),
    ("MPNet", "ForMaskedLM"),
    ("DebertaV2", "ForSequenceClassification"),
    ("DebertaV2", "ForTokenClassification"),
    ("Esm", "ForSequenceClassification"),
    ("Esm", "ForMaskedLM"),
    ("Albert", "ForSequenceClassification"),
    ("Albert", "ForMaskedLM"),
    ("Ernie", "ForSequenceClassification"),
    ("Ernie", "ForMaskedLM"),
    ("NomicBert", "ForSequenceClassification"),
    ("JinaEmbeddingsV3", "ForMaskedLM"),
    ("Gte", "ForSequenceClassification"),
    ("EuroBert", "ForSequenceClassification"),
    ("EuroBert", "ForMaskedLM"),
]
KINDS = [(family, head) for family, head in KINDS if family in FAMILIES]


def tiny_config(family: str, **changes: object):
    """Of two layers, without dropout: what is computed twice is the same."""
    values: dict[str, object] = dict(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        num_labels=2,
        pad_token_id=FAMILIES[family],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return config_of(family, **(values | changes))


def with_random_weights(model: torch.nn.Module) -> torch.nn.Module:
    """`model` with no zero bias and no row of zeros for the padding id: they hide faults."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def make(family: str = "Bert", head: str = "ForSequenceClassification", **changes: object) -> torch.nn.Module:
    own = {"embedding_size": 16} if family in ("Electra", "Albert") else {}
    if not hasattr(transformers, family + head):
        pytest.skip(f"transformers has no {family}{head}")
    return with_random_weights(getattr(transformers, family + head)(tiny_config(family, **(own | changes))).double())


def batch(head: str, padding_id: int = 0, kind: str = "right") -> dict[str, torch.Tensor]:
    lengths = torch.tensor([16, 3, 9, 1, 12, 7])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    if kind == "holes":
        mask[0, 3:5] = mask[2, 1] = 0
    elif kind == "full":
        mask = torch.ones_like(mask)
    ids = torch.where(mask.bool(), torch.randint(5, 64, mask.shape), padding_id)
    if kind == "left":
        ids, mask = ids.flip(1), mask.flip(1)
    out = {"input_ids": ids, "attention_mask": mask}
    if head == "ForSequenceClassification":
        out["labels"] = torch.arange(ROWS) % 2
    elif head in ("ForTokenClassification", "ForMaskedLM"):
        out["labels"] = torch.where(mask.bool(), ids % 2, -100)
    return out


def with_answers(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A question answering batch with labels, on real tokens."""
    last = inputs["attention_mask"].sum(1) - 1
    return inputs | {"start_positions": last // 2, "end_positions": last}


def labelled(family: str, head: str) -> dict[str, torch.Tensor]:
    inputs = batch(head, FAMILIES[family])
    return with_answers(inputs) if head == "ForQuestionAnswering" else inputs


def visible(out, head: str, mask: torch.Tensor) -> torch.Tensor:
    """What the model says of real tokens."""
    if head == "ForSequenceClassification":
        return out.logits
    name = {"ForQuestionAnswering": "start_logits", "Model": "last_hidden_state"}.get(head, "logits")
    return getattr(out, name)[mask.bool()]


def compare(
    stock: torch.nn.Module,
    fast: torch.nn.Module,
    head: str,
    inputs: dict[str, torch.Tensor],
    rtol: float = 1e-10,  # float64 on both sides: some hundred sums in another order
    atol: float = 1e-10,
) -> None:
    expected, out = stock(**inputs), fast(**inputs)
    mask, close = inputs["attention_mask"], dict(rtol=rtol, atol=atol)
    torch.testing.assert_close(visible(out, head, mask), visible(expected, head, mask), **close)
    for result in (expected, out):
        (visible(result, head, mask).sin().sum() + (result.loss if "labels" in inputs else 0)).backward()
    for (name, p), q in zip(stock.named_parameters(), fast.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, **close, msg=lambda text, name=name: f"{name}: {text}")


def draws(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> bool:
    with torch.no_grad():
        return not torch.equal(model(**inputs).logits, model(**inputs).logits)


def set_dropouts(model: torch.nn.Module, training: bool) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.train(training)
