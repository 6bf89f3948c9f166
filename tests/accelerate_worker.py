"""Makes batches under Accelerate on several ranks; started by torchrun in tests/batches/test_plans_of_epochs.py.

`python -m torch.distributed.run --nproc-per-node 2 tests/accelerate_worker.py FOLDER` writes FOLDER/seen.json:
name of a loader -> epoch -> rank -> batches, as lists of samples.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from together import end_together
from torch.utils.data import DataLoader

from composer_speedups import apply_length_grouped_batches, apply_token_budget_batches

EPOCHS, ROWS, SIZE = 2, 96, 8
FUNCTIONS = {"budget": apply_token_budget_batches, "grouped": apply_length_grouped_batches}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "row": torch.tensor([s["row"] for s in samples])}


def loaders() -> dict[str, DataLoader]:
    samples = [{"input_ids": [1] * (4 + i % 9), "row": i} for i in range(ROWS)]
    plain = DataLoader(samples, batch_size=SIZE, collate_fn=collate, shuffle=True)
    return {name: apply(plain) for name, apply in FUNCTIONS.items()}


def read(loader: Any, chooses: Any = None) -> list[list[list[int]]]:
    """The batches of some epochs; `chooses` is the sampler whose user says which epoch it is."""
    epochs = []
    for epoch in range(EPOCHS):
        if chooses is not None:
            chooses.set_epoch(epoch)
        epochs.append([batch["row"].tolist() for batch in loader])
    return epochs


def trained(name: str, folder: Path) -> list[list[list[int]]]:
    """What the Hugging Face Trainer shows to a model of this loader."""
    from transformers import Trainer, TrainingArguments

    seen: list[list[int]] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, input_ids, attention_mask, row):
            seen.append(row.tolist())
            return {"loss": (self.weight * input_ids).sum()}

    class Ours(Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(loaders()[name])

    arguments = TrainingArguments(
        str(folder / name), num_train_epochs=EPOCHS, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    Ours(Model(), arguments, train_dataset=[0]).train()
    steps = len(seen) // EPOCHS
    return [seen[epoch * steps : (epoch + 1) * steps] for epoch in range(EPOCHS)]


def main(folder: Path) -> None:
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    warnings.simplefilter("ignore")
    before = loaders()  # while nobody knows of several ranks
    torch.distributed.init_process_group("gloo")
    bare = {f"bare {name}": (loader, chooser(loader)) for name, loader in loaders().items()}
    accelerator = Accelerator(cpu=True)
    prepared = {f"made before {name}": (accelerator.prepare(loader), None) for name, loader in before.items()}
    prepared |= {f"made after {name}": (accelerator.prepare(loader), None) for name, loader in loaders().items()}
    seen = {name: read(*both) for name, both in (bare | prepared).items()}
    seen |= {f"trainer {name}": trained(name, folder) for name in FUNCTIONS}
    everywhere = gather_object([seen])
    if accelerator.is_main_process:
        together = {n: [[rank[n][epoch] for rank in everywhere] for epoch in range(EPOCHS)] for n in seen}
        (folder / "seen.json").write_text(json.dumps(together))
    end_together()


def chooser(loader: DataLoader) -> Any:
    return loader.batch_sampler if loader.batch_size is None else loader.sampler


if __name__ == "__main__":
    main(Path(sys.argv[1]))
