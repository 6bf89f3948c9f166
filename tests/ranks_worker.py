"""Trains with every speed-up on as many ranks as there are; started by torchrun, and imported for one rank.

`python -m torch.distributed.run --nproc-per-node 2 tests/ranks_worker.py FOLDER [KEY...]` (a speed-up's, or one of
`TOGETHER`) writes FOLDER/ddp and FOLDER/fsdp2, as JSON: key -> losses of the steps, whether the ranks' weights agree,
and so on, or the error; and FOLDER/ddp.pt and FOLDER/fsdp2.pt: key -> the trained weights.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from contract import batch, bert, case, make
from together import end_together, sharded
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from composer_speedups import build
from composer_speedups.errors import UserError

ROWS, GLOBAL_BATCH = 32, 8
PLAIN = "none"  # no speed-up at all: what the ranks do by themselves
BLOCKS = {"scope": "block", "backend": "aot_eager"}
# What one speed-up alone does not show: the other heads, another family, and what works on what another has changed.
TOGETHER: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "unpadding mlm": ("mlm", {"unpadding": {}, "masked_token_head": {}}),
    "unpadding tokens": ("tokens", {"unpadding": {}}),
    "unpadding answers": ("answers", {"unpadding": {}}),
    "unpadding roberta": ("roberta", {"unpadding": {}, "last_layer_subset": {}}),
    "unpadding compiled": ("classification", {"unpadding": {}, "torch_compile": BLOCKS}),
    "unpadding checkpointed": ("classification", {"unpadding": {}, "gradient_checkpointing": {}}),
    "unpadding all": (
        "roberta",
        {"unpadding": {}, "gradient_checkpointing": {}, "torch_compile": BLOCKS, "fused_adamw": {}},
    ),
}


class Samples(Dataset):
    """Rows whose losses can be averaged over ranks: in the token tasks each has two labels, as a mean over tokens
    is the mean over ranks only if the ranks have equally many."""

    def __init__(self, head: str) -> None:
        self.data = batch("mlm" if head == "mlm" else "classification", rows=ROWS)
        if head == "answers":
            last = self.data["attention_mask"].sum(1) - 1
            del self.data["labels"]
            self.data |= {"start_positions": last // 2, "end_positions": last}
        elif head in ("tokens", "mlm"):
            labels = torch.full_like(self.data["input_ids"], -100)
            labels[:, :2] = torch.randint(0, 3, (ROWS, 2), generator=torch.Generator().manual_seed(1))
            self.data["labels"] = labels

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.data.items()}


def model_of(head: str) -> torch.nn.Module:
    import transformers

    if head not in ("answers", "roberta"):
        return bert(head)
    # The same weights by name, but for the head's and those of BERT's pooler.
    plain = bert(**({"num_labels": 2} if head == "answers" else {"pad_token_id": 0}))
    classes = {"answers": "BertForQuestionAnswering", "roberta": "RobertaForSequenceClassification"}
    kind = transformers.RobertaConfig if head == "roberta" else transformers.BertConfig
    torch.manual_seed(4)
    config = kind(**plain.config.to_dict())
    model = getattr(transformers, classes[head])._from_config(config, attn_implementation="eager")
    model.base_model.load_state_dict(plain.bert.state_dict(), strict=False)
    return model


def train(key: str, strategy: str = "ddp") -> dict[str, Any]:
    """Four steps with the speed-up `key`, each on the same eight rows whatever the number of ranks."""
    from composer import Callback, Trainer
    from composer.models import HuggingFaceModel
    from composer.utils import dist

    losses: list[float] = []

    class Losses(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            losses.append(state.total_loss_dict["loss/train/total"])

    ranks = dist.get_world_size()
    head, speedups = TOGETHER.get(key, (case(key).head, {}))
    model = HuggingFaceModel(model_of(head), metrics=[], use_logits=head != "answers")
    algorithms = [build(name, **arguments) for name, arguments in speedups.items()]
    if key not in (PLAIN, *TOGETHER):
        algorithms.append(make(key))
    before = torch.cat([p.detach().flatten().clone() for p in model.model.parameters()])
    parallelism: dict[str, Any] = {}
    if strategy == "fsdp2":
        # Each block a unit of its own, as a user of FSDP2 would have it.
        model.model.fsdp_wrap_fn = lambda module: type(module).__name__ in ("BertLayer", "RobertaLayer")
        parallelism = sharded()
    samples = Samples(head)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, foreach=False),
        algorithms=algorithms,
        callbacks=[Losses()],
        train_dataloader=DataLoader(
            samples,
            batch_size=GLOBAL_BATCH // ranks,
            sampler=DistributedSampler(samples, ranks, dist.get_global_rank()),
        ),
        max_duration="4ba",
        device="cpu",
        precision="fp32",
        seed=7,
        dist_timeout=60,
        progress_bar=False,
        loggers=[],
        **parallelism,
    )
    try:
        trainer.fit()
        full = []
        for p in model.model.parameters():
            value = p.full_tensor() if hasattr(p, "full_tensor") else p
            full.append(value.detach().flatten().float())
        weights = torch.cat(full)
    finally:
        trainer.close()
    everywhere = dist.all_gather_object(weights) if ranks > 1 else [weights]
    return {
        "losses": losses,
        "agree": all(torch.equal(weights, other) for other in everywhere),
        "weights": weights,
        "moved": float((weights - before).norm()),
        "sharded": any(hasattr(p, "full_tensor") for p in model.model.parameters()),
    }


def main(out: str, strategy: str, keys: list[str]) -> None:
    from composer.utils import dist

    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for key in keys:
        try:
            results[key] = train(key, strategy)
        except Exception as error:
            results[key] = {"error": str(error), "type": type(error).__name__, "clear": isinstance(error, UserError)}
    if dist.get_global_rank() == 0:
        torch.save({k: v.pop("weights") for k, v in results.items() if "weights" in v}, f"{out}.pt")
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    for chosen in ("ddp", "fsdp2"):
        main(f"{sys.argv[1]}/{chosen}", chosen, sys.argv[2:])
    end_together()
