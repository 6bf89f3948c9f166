"""What tests share: small real models from random configs, a Composer state, no network."""

from __future__ import annotations

import os

# Set before torch is imported: no test may reach a hub, and two cores are shared by pytest's workers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, this machine has none"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(17)


def bert_config(**changes: object):
    from transformers import BertConfig

    values: dict[str, object] = dict(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertConfig(**(values | changes))


@pytest.fixture
def tiny_bert() -> torch.nn.Module:
    """A BERT for sequence classification: 2 layers, width 32, 4 heads, vocabulary 128, no dropout."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(bert_config())


def padded_batch(
    rows: int = 6, length: int = 16, vocabulary: int = 128, labels: int = 3, seed: int = 5
) -> dict[str, torch.Tensor]:
    """Token ids with a padding mask (rows of different lengths) and labels; the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows,), generator=random)
    mask = (torch.arange(length)[None] < lengths[:, None]).long()
    ids = torch.randint(5, vocabulary, (rows, length), generator=random) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.randint(0, labels, (rows,), generator=random),
    }


class BatchDataset(torch.utils.data.Dataset):
    """`rows` examples of `padded_batch`, one dict each; the same examples whenever it is made."""

    def __init__(self, rows: int = 32, length: int = 16) -> None:
        self.data = padded_batch(rows, length)

    def __len__(self) -> int:
        return len(self.data["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.data.items()}


@pytest.fixture
def make_trainer(tiny_bert):
    """Make a real Composer Trainer around `tiny_bert` (or `model=`), on CPU, with AdamW and 4 batches of 8."""
    from composer import Trainer
    from composer.models import HuggingFaceModel

    trainers = []

    def make(algorithms=(), model=None, optimizer=None, rows: int = 32, **kwargs):
        model = tiny_bert if model is None else model
        composer_model = model if hasattr(model, "eval_forward") else HuggingFaceModel(model)
        optimizer = optimizer or torch.optim.AdamW(composer_model.parameters(), lr=1e-3, weight_decay=0.01)
        loader = torch.utils.data.DataLoader(BatchDataset(rows), batch_size=8)
        kwargs = {
            "train_dataloader": loader,
            "max_duration": "1ep",
            "device": "cpu",
            "seed": 7,
            "progress_bar": False,
            "loggers": [],
        } | kwargs
        trainer = Trainer(
            model=composer_model,
            optimizers=optimizer,
            algorithms=list(algorithms),
            **kwargs,
        )
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()
