"""Token budgets on as many ranks as there are; started by torchrun, and imported for one rank.

`python -m torch.distributed.run --nproc-per-node 2 tests/budget_worker.py FOLDER` writes FOLDER/results.pt, and
checkpoints in mid-epoch.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from small import BatchDataset, bert_config
from together import end_together, sharded
from torch.utils.data import DataLoader, DistributedSampler

from composer_speedups import TokenBudgetBatches

ROWS, GLOBAL_BATCH = 96, 16
MICROBATCH = 4
TOKENS = 260  # on two ranks: as many batches as the default budget has would hide what it is about


class Rows(BatchDataset):
    """Rows of 5 to 60 tokens; the first tells which row it is."""

    def __init__(self) -> None:
        super().__init__(ROWS, 64)
        self.data["input_ids"][:, 0] = torch.arange(ROWS) + 5


def train(
    algorithm: TokenBudgetBatches, duration: str | None = None, strategy: str = "ddp", **options: Any
) -> dict[str, Any]:
    """Train for `duration` of an epoch: which rows were seen, of all ranks, in how many microbatches, the weights."""
    from composer import Callback, Trainer
    from composer.models import HuggingFaceModel
    from composer.utils import dist
    from transformers import BertForSequenceClassification

    ranks, seen, parts = dist.get_world_size(), [], []

    class Seen(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            seen.extend((state.batch["input_ids"][:, 0] - 5).tolist())
            parts.append([])

        def before_forward(self, state: Any, logger: Any) -> None:
            parts[-1].append(len(state.batch["labels"]))

    torch.manual_seed(1)
    model = HuggingFaceModel(BertForSequenceClassification(bert_config()), metrics=[], use_logits=True)
    start = torch.cat([p.detach().flatten().clone() for p in model.model.parameters()])
    if strategy == "fsdp2":
        model.model.fsdp_wrap_fn = lambda module: type(module).__name__ == "BertLayer"
        options |= sharded()
    elif strategy == "multi":
        options["ddp_sync_strategy"] = "multi_auto_sync"
    rows = Rows()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        algorithms=[algorithm],
        callbacks=[Seen()],
        train_dataloader=DataLoader(
            rows, batch_size=GLOBAL_BATCH // ranks, sampler=DistributedSampler(rows, ranks, dist.get_global_rank())
        ),
        max_duration="1ep",
        device="cpu",
        precision="fp32",
        seed=7,
        dist_timeout=30,
        progress_bar=False,
        loggers=[],
        **options,
    )
    try:
        trainer.fit(duration=duration)
        full = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.model.parameters())
        weights = torch.cat([p.detach().flatten() for p in full])
    finally:
        trainer.close()
    everywhere = dist.all_gather_object((seen, parts)) if ranks > 1 else [(seen, parts)]
    return {
        "rows": [row for there, _ in everywhere for row in there],
        "parts": [there for _, there in everywhere],
        "start": start,
        "weights": weights,
        "steps": algorithm.evidence["changed"],
    }


def main(folder: str) -> None:
    from composer.utils import dist

    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    cases: dict[str, Any] = {
        "default": (TokenBudgetBatches(), "4ba", {"save_folder": f"{folder}/default", "save_interval": "4ba"}),
        "tokens": (TokenBudgetBatches(TOKENS), "4ba", {"save_folder": f"{folder}/tokens", "save_interval": "4ba"}),
        "measured": None,
        # Last, as these once waited for each other until the time was out.
        "multi": (TokenBudgetBatches(), None, {"strategy": "multi", "device_train_microbatch_size": MICROBATCH}),
        "fsdp2": (TokenBudgetBatches(), None, {"strategy": "fsdp2", "device_train_microbatch_size": MICROBATCH}),
    }
    for name, case in cases.items():
        try:
            if case is None:
                results[name] = measured()
            else:
                algorithm, duration, options = case
                results[name] = train(algorithm, duration, **options)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        if dist.get_global_rank() == 0:
            torch.save(results, f"{folder}/results.pt")


def measured() -> dict[str, Any]:
    """A recipe's run: what it reports of samples."""
    from composer_speedups.measurement.results import Progress
    from composer_speedups.recipes import load_recipe
    from composer_speedups.training.run import run

    said: list[Progress] = []
    result = run(load_recipe("demo/fp32", SMALL), report=said.append)
    return {"samples": result.step_samples, "of": result.train_samples, "rate": result.samples_per_second}


SMALL = (
    "task={name: dummy, max_length: 32, mean_length: 16, length_std: 6, vocabulary: 256, train_samples: 96, "
    "eval_samples: 16}",
    "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64}",
    "batch_size=16", "duration=1ep", "evaluate=false", "speedups={token_budget_batches: {}}",
)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
    end_together()
