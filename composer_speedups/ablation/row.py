"""A row of a study, one recipe with all its seeds: what `results.json` holds, and every table, plot and sentence reads.

Speeds count steps after the warm-up, without those that compiled. A figure that has several seeds is their median;
what nobody measured is None.
"""

from typing import Any, NotRequired, TypedDict

__all__ = ["Row", "RowRun"]


class RowRun(TypedDict):
    """One seed of a row."""

    seed: int
    status: str  # of `results.Status`, or pending or running
    reason: str
    samples_per_second: float | None
    real_tokens_per_second: float | None  # padding left out
    wallclock_seconds: float | None  # all of `Trainer.fit`
    final_loss: float | None  # mean over the last tenth of the steps
    eval_accuracy: float | None  # from 0 to 1
    eval_r2: float | None
    peak_memory_bytes: int | None


class Row(TypedDict):
    """One recipe of a study."""

    # --- which
    recipe: str  # its name
    description: str
    baseline: bool  # the others are compared with it
    precision: str  # of its matmuls: fp32, tf32, fp16 or bf16
    batch_size: int | None
    learning_rate: float | None
    published: dict[str, Any] | None  # what the recipe's source had measured

    # --- whether it ran
    status: str  # ok, failed or skipped
    reason: str
    seeds: list[int]  # that ended well
    failed: list[int]  # seeds that did not
    runs: list[RowRun]
    warnings: list[str]
    overlapped: list[int]  # seeds that shared the machine with another run, or waited for a core
    waited: dict[int, float]  # by seed: the share of its time that other work kept it from a core
    apart: list[int]  # seeds whose run was made long before or after the baseline's, and is not compared with it

    # --- how fast
    samples_per_second: float | None
    real_tokens_per_second: float | None
    mfu: float | None  # the model's FLOPs for real tokens over the matmul peak measured in `precision`
    wallclock_seconds: float | None  # all of `Trainer.fit`
    train_seconds: float | None  # the same without evaluation
    speedup: float | None  # over the baseline, over the seeds that both have
    speedup_interval: list[float] | None  # 99 %
    speed_verdict: str  # baseline, faster, slower, no difference shown, or not judged
    speed_note: str
    speed_seeds_needed: int | None  # to tell a difference of this size
    alike: list[str]  # recipes that gained less, and that the seeds do not tell from this one
    steps: int | None
    warmup_steps: int | None  # not counted in the speeds
    samples_per_step: float | None  # the mean, where batches are made by a budget of tokens
    padding_share: float | None  # of all tokens, from 0 to 1
    intervals: dict[str, list[float]]  # by the name of a figure: 95 %; lowest and highest for up to five seeds

    # --- what compiling cost
    compile_seconds: float | None  # with an empty cache, where a seed found it so
    compile_seconds_warm: float | None
    compile_cached: bool  # no seed found the cache empty
    break_even_steps: int | None  # after which the gain has paid for compiling
    break_even_samples: int | None
    break_even_against: str | None  # the recipe that the gain is over
    break_even_verdict: str  # on that gain, by the words of `speed_verdict`

    # --- how good
    final_loss: float | None
    eval_loss: float | None
    eval_accuracy: float | None
    eval_r2: float | None  # of regression, in place of the accuracy: the share of the labels' variance explained
    stable: bool | None  # its losses were finite, and quality was not shown to be lost
    quality_verdict: str  # baseline, quality holds, quality not shown to hold, unstable, or not judged
    quality_note: str
    worse_by: dict[str, dict[str, float | None]]  # by figure: value, high (its bound at 95 %), and margin

    # --- how much memory
    peak_memory_bytes: int | None  # the CUDA allocator's peak; the resident set's on CPU
    memory: dict[str, int]  # bytes by kind, measured in a step
    memory_predicted: dict[str, int]  # the same by arithmetic, and the `peak`

    # --- what it was seen to do
    kernels: list[str]
    evidence: dict[str, dict[str, Any]]  # by speed-up: what it changed
    no_effect: list[str]  # speed-ups that changed nothing
    as_it_ran: dict[str, Any]  # optimizer, attention kernel and dtype, whoever chose them
    step_profile: dict[str, float]  # seconds of one step by kind of work
    step_profile_other: dict[str, float]  # of its `other`, the largest operators by name
    numerics: dict[str, Any]  # `Verification.summary`: its gradients against float64
    pretrained: bool | None
    train_samples: int | None  # that there were
    data_notes: list[str]  # rows dropped, or left out
    interaction: NotRequired[dict[str, Any]]  # of a pair of speed-ups: whether they bring what both bring alone
