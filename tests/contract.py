"""What the contract tests need to know about a speed-up beyond its name: an example of its use on a CPU.

A new speed-up is held to the contract with the first of its `choices`; it needs a line here only if a CPU needs
others, if it does nothing to the default model or to one with adapters in all linear layers, has another dtype, or
promises less (see `Case`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from composer_speedups import registry
from composer_speedups.speedup import SpeedUp


@dataclass(frozen=True)
class Case:
    """`kwargs` for the speed-up, the `head` of the BERT it is tried on, and of which layers PEFT's adapters may be.

    And what it promises less than others: an approximation is off by `approximates` in all gradients together, as its
    card counts; an optimizer may have moments that no other's can become (`own_moments`), or none of sharded parameters
    (`shards=False`: then it refuses FSDP and names `fused_adamw`), and after thirty steps be further from AdamW's loss
    than the share `ends_within` of what that gained.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    head: str = "classification"
    dtype: torch.dtype = torch.float32  # that it computes in
    adapters: tuple[str, ...] = ("query", "key", "value", "dense")
    approximates: float = 0.0
    own_moments: bool = False
    shards: bool = True
    ends_within: float = 0.05

    @property
    def bound(self) -> float:
        """Relative error of all gradients together."""
        return tolerance(self.dtype) + self.approximates


CASES = {
    "matmul_precision": Case({"precision": "highest"}),
    "mixed_precision": Case({"dtype": "bf16"}, dtype=torch.bfloat16),
    "torch_compile": Case({"scope": "block", "backend": "aot_eager"}),
    # bitsandbytes' kernels know no sharded parameters, and Adafactor needs whole rows and columns.
    "bnb_adamw": Case(own_moments=True, shards=False),
    "adamw_8bit": Case(own_moments=True, shards=False),
    "adafactor": Case(own_moments=True, shards=False),
    "gradient_release": Case(shards=False),
    "masked_token_head": Case(head="mlm"),
    "fused_cross_entropy": Case(head="mlm"),
    # Of a layer with an adapter the bias is not what is added last.
    "fused_bias_gelu": Case(adapters=("query", "key", "value")),
}


def case(key: str) -> Case:
    """Of `key`, or of no speed-up at all: the plain training beside which others are seen."""
    first = registry.speedup_class(key).choices[0] if key in ALL else {}
    return CASES.get(key, Case(first))


def make(key: str) -> SpeedUp:
    return registry.build(key, **case(key).kwargs)


def here() -> torch.device:
    return torch.device("cpu")


def usable(key: str) -> bool:
    """Whether this machine's CPU can use the speed-up; the others are held to their clear error."""
    return make(key).unavailable(here()) is None


def at_once(key: str) -> bool:
    """Whether `key` is for one process that takes the batch at once; DDP, FSDP and microbatches are refused then."""
    return key in ALL and registry.speedup_class(key).at_once


ALL = registry.keys()
USABLE = [key for key in ALL if usable(key)]
OPTIMIZERS = [key for key in USABLE if registry.speedup_class(key).slot == "optimizer"]
UNUSABLE = [key for key in ALL if key not in USABLE]


def bert(head: str = "classification", **changes: Any) -> torch.nn.Module:
    """A small BERT with eager attention and random (not zero) biases and norms, as plain as it gets."""
    import transformers
    from small import bert_config

    cls = {
        "classification": transformers.BertForSequenceClassification,
        "mlm": transformers.BertForMaskedLM,
        "tokens": transformers.BertForTokenClassification,
    }[head]
    torch.manual_seed(3)
    # Weights ten times as large as BERT begins with: attention that is nearly uniform would hide its faults.
    config = bert_config(**{"initializer_range": 0.2, **changes})
    model = cls._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # zeros and ones would hide a dropped bias or scale
                p.add_(torch.randn_like(p) * 0.2)
    return model


def batch(head: str = "classification", padded: bool = True, rows: int = 6, seed: int = 5) -> dict[str, torch.Tensor]:
    from small import padded_batch

    data = padded_batch(rows, seed=seed)
    if not padded:
        data["attention_mask"] = torch.ones_like(data["attention_mask"])
        data["input_ids"] = data["input_ids"].clamp_min(5)
    if head != "classification":
        random = torch.Generator().manual_seed(seed + 1)
        high = 128 if head == "mlm" else 3
        labels = torch.randint(0, high, data["input_ids"].shape, generator=random)
        chosen = torch.rand(labels.shape, generator=random) < 0.3
        data["labels"] = torch.where(chosen & data["attention_mask"].bool(), labels, -100)
    return data


class Dataset(torch.utils.data.Dataset):
    """Rows of `batch`, the same whenever it is made."""

    def __init__(self, head: str, rows: int) -> None:
        self.data = batch(head, rows=rows)

    def __len__(self) -> int:
        return len(self.data["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.data.items()}


def loader(head: str = "classification", rows: int = 32, size: int = 8) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Dataset(head, rows), batch_size=size)


def forward_and_gradients(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and all gradients end to end (a zero for a parameter without one), in float64."""
    model.zero_grad(set_to_none=True)
    outputs = model(dict(data)) if hasattr(model, "eval_forward") else model(**data)
    loss = outputs["loss"]
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return loss.detach().double(), torch.cat([g.detach().double().flatten() for g in grads])


def tolerance(dtype: torch.dtype) -> float:
    """Relative error of all gradients together.

    Two layers of about 12 roundings each, forward and backward, and the head: 60 in a row. Each is off by half an ulp
    at most, independently: sqrt(60) * eps / 2 in the mean; four times that bounds the tail. Of float32's matrix
    products the inner sums add as much again.
    """
    return 4 * 60**0.5 * torch.finfo(dtype).eps / 2 * (2 if dtype == torch.float32 else 1)
