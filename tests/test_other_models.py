"""Beyond BERT: every speed-up on other families either works, or says in one line that it does not apply.

From small random configurations, in real Composer Trainers. Numerics are held to the contract's tolerance against the
same model in float64; what changes nothing must warn, and what cannot be must raise before anything was changed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache

import pytest
import torch
import transformers
from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning
from composer.models import HuggingFaceModel
from contract import USABLE, batch, case, forward_and_gradients, make

from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.speedup import SpeedUp, Stage

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT_LIKE = SIZES | TEXT | NO_DROPOUT
# family -> configuration; the names of model classes follow from the family's.
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "Roberta": lambda: transformers.RobertaConfig(**BERT_LIKE, type_vocab_size=1),
    "DistilBert": lambda: transformers.DistilBertConfig(
        **TEXT, dim=32, n_layers=2, n_heads=4, hidden_dim=64,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    ),
    "Electra": lambda: transformers.ElectraConfig(**BERT_LIKE, embedding_size=16, classifier_dropout=0.0),
    "DebertaV2": lambda: transformers.DebertaV2Config(
        **BERT_LIKE, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, pooler_dropout=0.0
    ),
    "Albert": lambda: transformers.AlbertConfig(**BERT_LIKE, embedding_size=16, classifier_dropout_prob=0.0),
    "MPNet": lambda: transformers.MPNetConfig(**BERT_LIKE),
    "Esm": lambda: transformers.EsmConfig(
        **BERT_LIKE, position_embedding_type="rotary", token_dropout=True, mask_token_id=4
    ),
    # A window of 13 to each side: stock eager ModernBERT gives NaN where a padded token sees none but padded ones.
    "ModernBert": lambda: transformers.ModernBertConfig(
        **SIZES, **TEXT, local_attention=26, global_attn_every_n_layers=2, reference_compile=False, **_MODERN
    ),
    "NomicBert": lambda: transformers.NomicBertConfig(**BERT_LIKE, head_dim=8),
    "EuroBert": lambda: transformers.EuroBertConfig(
        **SIZES, **TEXT, num_key_value_heads=2, head_dim=8, bos_token_id=1, eos_token_id=2, classifier_pooling="bos"
    ),
    "ViT": lambda: transformers.ViTConfig(**SIZES, **NO_DROPOUT, num_labels=3, image_size=16, patch_size=4),
    "GPT2": lambda: transformers.GPT2Config(
        vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, num_labels=3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.0,
    ),
}  # fmt: skip
FAMILIES = {family: config for family, config in FAMILIES.items() if hasattr(transformers, f"{family}Config")}
_MODERN = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}


def head_of(family: str, key: str) -> str:
    """The head that the speed-up is for, where the family has it."""
    return "mlm" if case(key).head == "mlm" and family not in ("ViT", "GPT2") else "classification"


@cache
def built(family: str, head: str) -> torch.nn.Module:
    task = {"mlm": "MaskedLM", "classification": "ImageClassification" if family == "ViT" else "SequenceClassification"}
    prefix = "GPT2" if family == "GPT2" else family
    cls = getattr(transformers, f"{prefix}For{task[head]}")
    torch.manual_seed(3)
    model = cls._from_config(FAMILIES[family](), attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():  # zeros, ones and small weights would hide faults: see contract.bert
            p.copy_(torch.randn_like(p) * 0.2 + (p if p.ndim == 1 else 0))
    return model


def data_of(family: str, head: str, rows: int = 6) -> dict[str, torch.Tensor]:
    if family == "ViT":
        random = torch.Generator().manual_seed(5)
        return {
            "pixel_values": torch.randn(rows, 3, 16, 16, generator=random),
            "labels": torch.randint(0, 3, (rows,), generator=random),
        }
    return batch(head, rows=rows)


def loader(family: str, head: str) -> torch.utils.data.DataLoader:
    data = data_of(family, head, rows=16)
    rows = [{name: column[i] for name, column in data.items()} for i in range(16)]
    return torch.utils.data.DataLoader(rows, batch_size=8)


@pytest.mark.parametrize("key", USABLE)
@pytest.mark.parametrize("family", FAMILIES)
def test_works_or_says_that_it_does_not_apply(family: str, key: str) -> None:
    head = head_of(family, key)
    stock = built(family, head)
    model = copy.deepcopy(stock)
    algorithm = make(key)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            measured, moved = train(model, algorithm, family, head)
        except SpeedUpUnavailable as error:
            print("OUTCOME", family, key, "refused:", error)
            assert "\n" not in str(error) and len(str(error)) < 400
            assert all(torch.equal(p, stock.get_parameter(n)) for n, p in model.named_parameters()), (
                "trained, then raised"
            )
            return
    warned = [str(w.message) for w in caught if issubclass(w.category, NoEffectWarning)]
    print("OUTCOME", family, key, f"does not apply: {warned[0]}" if warned else "works")
    assert bool(warned) == (algorithm.evidence["changed"] == 0), algorithm.evidence
    assert not any("\n" in text for text in warned)
    assert not (warned and algorithm.stage in (Stage.PRECISION, Stage.OPTIMIZER)), "these ask nothing of a model"
    expected_loss, expected = forward_and_gradients(copy.deepcopy(stock).double(), in_double(data_of(family, head)))
    loss, grads = measured
    bound = case(key).bound
    assert loss.item() == pytest.approx(expected_loss.item(), rel=bound)
    assert ((grads - expected).norm() / expected.norm()).item() <= bound
    assert len(moved) > 5 and all(p.isfinite().all() for p in model.parameters())


def train(model: torch.nn.Module, algorithm: SpeedUp, family: str, head: str):
    """Loss and gradients with the speed-up installed; then train a batch, and return which parameters moved, too."""
    trainer = Trainer(
        model=HuggingFaceModel(model, metrics=[], use_logits=True),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False),
        algorithms=[algorithm],
        train_dataloader=loader(family, head),
        max_duration="1ba",
        device="cpu",
        progress_bar=False,
        loggers=[],
    )
    try:
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        measured = forward_and_gradients(trainer.state.model, data_of(family, head))
        trainer.fit()
        return measured, [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    finally:
        trainer.close()


def in_double(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in data.items()}
