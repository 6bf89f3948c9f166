"""What one training run measured. Plain data: it crosses processes and is stored as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = [
    "INSIDE", "MEMORY_KINDS", "MOST_SAMPLES", "NOT_TOLD", "NO_FUSED_KERNEL", "SHORT_RUN", "WARMUP_STEPS", "Progress",
    "RunResult", "loss_text",
]  # fmt: skip

WARMUP_STEPS = 3  # of a run, not counted in its speed: caches, allocator and thread pools settle
SHORT_RUN = (2 * WARMUP_STEPS, 60)  # steps, at least and at most, of a run that is there for its speed alone
MOST_SAMPLES = 16_384  # of a batch: no machine takes more of them at once to advantage

NO_FUSED_KERNEL = "no fused kernel"  # `as_it_ran["attention"]` where none of PyTorch's or of ours was seen

MEMORY_KINDS = ("weights", "gradients", "buckets", "optimizer", "activations")  # buckets: only of several ranks
NOT_TOLD = "where time and memory go cannot be told"  # how a run's warning of that begins
# What `inspection.py` finds, of `RunResult`.
INSIDE = ("as_it_ran", "step_profile", "step_profile_other", "memory", "memory_predicted")

Status = Literal["ok", "skipped", "failed", "out_of_memory", "timeout", "interrupted"]


def loss_text(loss: float, decimals: int) -> str:
    """With so many decimals; but squared errors may be of any size, and those have some digits instead.

    >>> loss_text(2.07, 3), loss_text(0.0123, 4), loss_text(0.0000123, 3), loss_text(1.5e9, 3)
    ('2.070', '0.0123', '1.2e-05', '1.5e+09')
    """
    if 10.0**-decimals * 50 <= abs(loss) < 1e6 or not loss:
        return f"{loss:.{decimals}f}"
    return f"{loss:.{decimals - 1}g}"


@dataclass
class Progress:
    """Where a run is: sent to whoever shows it."""

    phase: Literal["data", "train", "eval", "verify"]
    step: int = 0
    steps: int = 0
    loss: float | None = None
    accuracy: float | None = None
    samples_per_second: float | None = None
    seconds_left: float | None = None
    message: str = ""


@dataclass
class RunResult:
    """One recipe, one seed, one process.

    Speeds count steps after the warm-up only; `wallclock_seconds` counts all of `Trainer.fit`.
    """

    recipe: str
    seed: int
    status: Status = "ok"
    reason: str = ""
    batch_size: int = 0
    learning_rate: float = 0.0
    samples_per_second: float | None = None
    real_tokens_per_second: float | None = None
    model_flops_per_second: float | None = None  # of the real tokens, forward and backward
    wallclock_seconds: float | None = None
    train_seconds: float | None = None  # fit without evaluation
    compile_seconds: float = 0.0
    peak_memory_bytes: int | None = None  # the CUDA allocator's peak; the resident set's on CPU
    final_loss: float | None = None  # mean over the last tenth of the steps
    eval_loss: float | None = None
    eval_accuracy: float | None = None
    eval_majority: float | None = None  # the accuracy of always answering the most frequent class; not for MLM
    loss_unit: float = 1.0  # what losses are small or large against: of regression, the variance of the labels
    eval_r2: float | None = None  # of regression: the share of the labels' variance that is explained
    finite: bool = True  # every loss was finite
    gave_up: bool = False  # ended early, as the loss stayed NaN or infinite, or with such weights
    steps: int = 0
    warmup_steps: int = 0  # not counted in the speeds
    padding_share: float | None = None
    losses: list[float] = field(default_factory=list)  # one a step
    step_seconds: list[float] = field(default_factory=list)
    step_samples: list[int] = field(default_factory=list)  # empty where every step had `batch_size`
    evidence: dict[str, dict[str, Any]] = field(default_factory=dict)  # by speed-up: what it changed
    kernels: list[str] = field(default_factory=list)
    train_samples: int | None = None  # that there were
    data_notes: list[str] = field(default_factory=list)  # rows dropped, or left out
    classes: dict[str, float] = field(default_factory=dict)  # by name: its share of the texts that were trained on
    pretrained: bool | None = None
    warnings: list[str] = field(default_factory=list)
    overlapped: bool = False  # another run was measured on this machine at the same time
    waited: float | None = None  # of the time in which it wanted a core, the share that other work had it
    # `INSIDE`: of a few steps after the measured ones; empty where nobody asked for it.
    as_it_ran: dict[str, Any] = field(default_factory=dict)  # optimizer, attention kernel, dtype, whoever chose them
    step_profile: dict[str, float] = field(default_factory=dict)  # seconds of one step by kind of work
    step_profile_other: dict[str, float] = field(default_factory=dict)  # of `other`, the largest operators by name
    memory: dict[str, int] = field(default_factory=dict)  # bytes by kind, measured in a step
    memory_predicted: dict[str, int] = field(default_factory=dict)  # the same by arithmetic, and the `peak`
    numerics: dict[str, Any] = field(default_factory=dict)  # `Verification.summary`; empty where nobody asked for it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
