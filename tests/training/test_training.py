"""`run`: a recipe really trains, measures, saves, resumes, and explains what goes wrong."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from tiny_recipe import TINY, tiny
from torch.utils.data import DataLoader

from composer_speedups.errors import ConflictError, OutOfMemory, RecipeError, SpeedUpUnavailable, TaskError
from composer_speedups.measurement import measure
from composer_speedups.recipes import load_recipe
from composer_speedups.training import checkpoints
from composer_speedups.training import run as training
from composer_speedups.training.run import run


def test_measures_what_it_says() -> None:
    seen = []
    result = run(tiny(), report=seen.append)
    assert (result.status, result.steps, result.finite) == ("ok", 8, True)
    assert len(result.losses) == len(result.step_seconds) == 8
    assert result.final_loss == pytest.approx(result.losses[-1])
    counted = slice(result.warmup_steps, None)
    assert result.samples_per_second == pytest.approx(8 * 5 / sum(result.step_seconds[counted]))
    assert 0 < result.padding_share < 1
    assert result.real_tokens_per_second < result.samples_per_second * 32 * (1 - result.padding_share) * 1.5
    assert 0 <= result.eval_accuracy <= 1 and result.eval_loss > 0
    assert result.peak_memory_bytes > 50 * 2**20
    assert result.wallclock_seconds > result.train_seconds > sum(result.step_seconds) * 0.9
    assert {p.phase for p in seen} >= {"train", "eval"}
    last = [p for p in seen if p.phase == "train"][-1]
    assert (last.step, last.steps, last.seconds_left) == (8, 8, 0)
    json.dumps(result.as_dict())


def test_steps_include_loading_and_no_checkpoints(tmp_path, monkeypatch) -> None:
    starting, loading, writing = 0.2, 0.05, 0.4  # seconds; sleep is never shorter than asked for

    def slow(seconds, function):
        def later(*args, **kwargs):
            time.sleep(seconds)
            return function(*args, **kwargs)

        return later

    def make_loader(*args, make=training.build_loader, **kwargs):
        loader = make(*args, **kwargs)
        loader.collate_fn = slow(loading, loader.collate_fn)
        return loader

    monkeypatch.setattr(training, "build_loader", make_loader)
    monkeypatch.setattr(DataLoader, "__iter__", slow(starting, DataLoader.__iter__))
    monkeypatch.setattr(
        checkpoints.checkpoint, "save_checkpoint", slow(writing, checkpoints.checkpoint.save_checkpoint)
    )
    result = run(tiny(), save=tmp_path, checkpoint_interval="1ba")
    assert len(result.step_seconds) == 8 and min(result.step_seconds) >= loading
    assert result.step_seconds[0] >= starting + loading, "an epoch's first batch waits for its loader to start"
    outside = result.wallclock_seconds - sum(result.step_seconds)
    assert outside >= 8 * writing, "checkpoints are no part of a step"


def test_one_process_makes_no_process_group(monkeypatch) -> None:
    """Every step would ask Gloo or NCCL for the sums over one rank."""

    def asked(device: str) -> None:
        raise ConnectionError("a process group was asked for")

    monkeypatch.setattr(training.dist, "initialize_dist", asked)
    assert run(tiny()).status == "ok"
    monkeypatch.setattr(training.dist, "get_world_size", lambda: 2)
    with pytest.raises(ConnectionError):
        run(tiny())


def test_the_most_frequent_class_is_a_reference(tmp_path) -> None:
    """Of sixteen texts to evaluate on, four are of the other class; MLM has no classes."""
    for part, count in (("train", 32), ("test", 16)):
        rows = [f"text number {n} to {part},{'rare' if n % 4 == 3 else 'often'}" for n in range(count)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["text,label", *rows]))
    task = f"task={{name: text, path: {tmp_path}, max_length: 16}}"
    recipe = load_recipe("demo/fp32", [task, *TINY[1:], "duration=1ba", "schedule.warmup=0ba"])
    assert run(recipe).eval_majority == 0.75
    assert run(tiny("task.objective=mlm", "duration=1ba", "schedule.warmup=0ba")).eval_majority is None


def test_same_seed_same_losses_and_another_seed_others() -> None:
    first, again, other = run(tiny()), run(tiny()), run(tiny(), seed=99)
    assert first.losses == again.losses
    assert first.eval_loss == again.eval_loss
    assert first.losses != other.losses


def test_the_speed_ups_of_the_recipe_are_used() -> None:
    result = run(tiny("speedups={mixed_precision: {dtype: bf16}, fused_adamw: {}, low_precision_norm: {}}"))
    assert result.evidence["fused_adamw"]["optimizer"] == "torch AdamW (fused)"
    assert result.evidence["low_precision_norm"]["changed"] == 5
    assert set(result.evidence) == {"matmul_precision", "mixed_precision", "fused_adamw", "low_precision_norm"}


def test_microbatches_do_the_same_update() -> None:
    whole, parts = run(tiny()), run(tiny("microbatch_size=2"))
    # The loss of a batch is the mean over its samples either way; float32 sums in another order.
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    assert whole.losses[0] != whole.losses[-1]


@pytest.mark.parametrize("objective", ["token_classification", "mlm"])
def test_microbatches_weigh_labelled_tokens_alike(objective: str, monkeypatch) -> None:
    """The loss of a batch is the mean over its labels; Composer weighs parts of it by their texts."""
    words = (f"task.objective={objective}", "evaluate=false")
    whole, parts = run(tiny(*words)), run(tiny(*words, "microbatch_size=2"))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    monkeypatch.setattr(training, "weighs_tokens", lambda recipe: False)
    by_texts = run(tiny(*words, "microbatch_size=2"))
    assert by_texts.losses != pytest.approx(whole.losses, rel=1e-4)


def test_two_ranks_weigh_labelled_tokens_alike(exchanged) -> None:
    """Of one order of samples each has every second, so that batches have the same ones."""
    whole = run(tiny("task.objective=token_classification", "evaluate=false"))
    for losses in exchanged["labelled tokens"]:
        assert losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
def test_schedules(name: str) -> None:
    result = run(tiny(f"schedule.name={name}", "evaluate=false"))
    assert result.finite and result.eval_loss is None


def test_how_many_samples_a_step_held_is_kept_where_it_varies() -> None:
    assert run(tiny()).step_samples == []
    result = run(tiny("speedups={token_budget_batches: {tokens_per_batch: 128}}", "task.padding=longest"))
    assert len(result.step_samples) == result.steps and len(set(result.step_samples)) > 1
    assert sum(result.step_samples) == 64, "one epoch of the task's samples"
    counted = slice(result.warmup_steps, None)
    speed = sum(result.step_samples[counted]) / sum(result.step_seconds[counted])
    assert result.samples_per_second == pytest.approx(speed)


def test_mlm() -> None:
    result = run(tiny("task.objective=mlm"))
    assert result.finite
    # An untrained model that predicts 256 ids evenly has the loss ln 256.
    assert result.losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert 0 <= result.eval_accuracy <= 1


def test_saves_a_folder_that_transformers_loads(tmp_path) -> None:
    from transformers import AutoModelForSequenceClassification

    result = run(tiny("speedups={fused_adamw: {}, low_precision_norm: {}}"), save=tmp_path / "model")
    assert result.status == "ok"
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert type(model).__name__ == "BertForSequenceClassification"
    assert not [f for f in os.listdir(tmp_path / "model") if f.startswith(".")]


@pytest.mark.parametrize("at", [2, 7], ids=["in an epoch", "at its end"])
def test_interrupted_and_resumed_equals_uninterrupted(at: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(measure, "_REPORT_EVERY", 0.0)
    whole = run(tiny("duration=2ep"))
    reports = []

    def interrupt(progress) -> None:
        reports.append(progress)
        if progress.phase == "train" and progress.step >= at and len(signalled) == 0:
            signalled.append(progress.step)
            os.kill(os.getpid(), signal.SIGINT)

    signalled: list[int] = []
    first = run(tiny("duration=2ep"), save=tmp_path, report=interrupt, checkpoint_interval="1ba")
    assert first.status == "interrupted" and first.steps == at + 1
    second = run(tiny("duration=2ep"), save=tmp_path, resume=True, checkpoint_interval="1ba")
    assert second.status == "ok"
    assert first.losses + second.losses == whole.losses  # bit for bit
    assert second.eval_loss == whole.eval_loss


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict")  # Composer's own word
def test_resumed_with_another_optimizer_what_is_named_can_be_done(tmp_path) -> None:
    """It finds its checkpoint by itself: neither another file nor the Trainer's `load_weights_only` would reach it."""
    run(tiny(), save=tmp_path, checkpoint_interval="1ba")
    for key, told in {
        "adafactor": "Go on with that optimizer, or begin anew with another folder for --save.",
        "adamw_8bit": "--overwrite`; or use that optimizer's speed-up; or begin anew with another folder for",
    }.items():
        with pytest.raises(ConflictError, match="holds no state of") as refused:
            run(tiny("duration=2ep", f"speedups={{{key}: {{}}}}"), save=tmp_path, resume=True)
        assert told in str(refused.value) and "load_weights_only" not in str(refused.value)


def test_after_ctrl_c_the_handler_is_the_old_one() -> None:
    before = signal.getsignal(signal.SIGINT)
    run(tiny("duration=1ba", "schedule.warmup=0ba"))
    assert signal.getsignal(signal.SIGINT) is before


def test_works_outside_the_main_thread() -> None:
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tiny("duration=1ba", "schedule.warmup=0ba"))))
    thread.start()
    thread.join()
    assert results[0].steps == 1


def test_loss_that_stays_nan_ends_the_run() -> None:
    result = run(tiny("learning_rate=1e30", "duration=50ep", "schedule.warmup=0ba"))
    assert not result.finite
    assert result.steps < 400
    assert "unstable" in result.reason
    assert result.train_seconds == result.wallclock_seconds, "Composer evaluated after the end of the fit"


def test_what_the_machine_lacks_is_said_before_training() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(SpeedUpUnavailable, match="fp16"):
        run(tiny("speedups.mixed_precision={dtype: fp16}"))


def test_batch_larger_than_the_data() -> None:
    with pytest.raises(TaskError, match="batch_size 128 exceeds the 64 training samples"):
        run(tiny("batch_size=128"))


def test_out_of_memory_names_the_size_and_the_remedy(monkeypatch) -> None:
    from composer import Trainer

    def fit(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Trainer, "fit", fit)
    with pytest.raises(OutOfMemory, match=r"with 8 samples a forward pass: try microbatch_size=4, .* batch at 8"):
        run(tiny())


@pytest.mark.parametrize(
    ("evaluating", "words"),
    [(False, "with 4 samples a forward pass: try microbatch_size=2,"), (True, "pass: try eval_batch_size=4")],
)
def test_out_of_memory_on_two_ranks(monkeypatch, evaluating: bool, words: str) -> None:
    """Of a batch of 8 a rank has 4: half of that is a microbatch of 2, or an evaluation batch of 4 of both together."""
    measurement = measure.Measurement()
    measurement.evaluating = evaluating
    monkeypatch.setattr(training.dist, "get_world_size", lambda: 2)
    with pytest.raises(OutOfMemory, match=words), training.explained_out_of_memory(tiny(), measurement):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_ranks_vote_on_the_host_where_they_can(monkeypatch) -> None:
    """On a GPU the vote of a step would be read when all its kernels are done."""
    state = SimpleNamespace(device=SimpleNamespace(_device=torch.device("meta")))
    asked: list[str] = []

    def reduce(tensor: torch.Tensor, reduce_operation: str) -> None:
        asked.append(tensor.device.type)
        if tensor.device.type == "meta":
            raise LookupError("read on the device")
        tensor[1] = 1  # the other rank's

    monkeypatch.setattr(measure.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(measure.dist, "all_reduce", reduce)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(LookupError):
        measure._on_any_rank([True, False], state)
    reduce.takes_host_tensors = True  # by SyncFreeLoop
    assert measure._on_any_rank([True, False], state) == [True, True]
    del reduce.takes_host_tensors
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    assert measure._on_any_rank([False, False], state) == [False, True]
    assert asked == ["meta", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("duration", "warmup", "speedups", "batches"),
    [
        ("2ep", "16ba", "{}", 8),
        ("16ba", "2ep", "{}", 8),
        ("1ep", "4ba", "{token_budget_batches: {tokens_per_batch: 256}}", 4),
    ],
)
def test_a_warmup_that_outlasts_the_training_is_refused(duration, warmup, speedups, batches) -> None:
    """The rate that was asked for would never be reached; how many batches there are the recipe does not tell."""
    settings = (f"duration={duration}", f"schedule.warmup={warmup}", f"speedups={speedups}", "evaluate=false")
    message = f"schedule.warmup {warmup} leaves nothing of duration {duration} (an epoch is {batches} batches of 8)"
    with pytest.raises(RecipeError, match=re.escape(message)):
        run(tiny(*settings))


@pytest.mark.parametrize(("duration", "warmup"), [("2ep", "15ba"), ("9ba", "1ep"), ("2ep", "1ep")])
def test_a_warmup_that_leaves_a_batch_is_a_warmup(duration, warmup) -> None:
    assert run(tiny(f"duration={duration}", f"schedule.warmup={warmup}", "evaluate=false")).status == "ok"


def test_tensorboard_logger_from_the_recipe(tmp_path) -> None:
    run(tiny(f"loggers={{TensorboardLogger: {{log_dir: {tmp_path}}}}}", "duration=2ba", "schedule.warmup=0ba"))
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_what_was_left_out_of_the_data_is_told(tmp_path) -> None:
    """By the result, and so under a study's table; and a default that leaves texts out is no secret."""
    path = tmp_path / "texts.csv"
    rows = [f"word{i % 7} other{i % 5} number {i},{i % 2}" for i in range(200)] + ["no label here,"]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    task = f"task={{name: text, path: {path}, max_length: 32, train_samples: 64, vocabulary: 256}}"
    result = run(load_recipe("demo/fp32", [task, *TINY[1:], "duration=2ba", "schedule.warmup=0ba"]))
    assert result.train_samples == 64
    assert result.data_notes == [
        f"1 of 201 rows of {path} dropped: no label",
        "64 of 180 texts to train on are used: task.train_samples=null takes all",
    ]
    assert not [text for text in result.warnings if "warmup duration is 0" in text or "Cannot split" in text]


def test_a_last_batch_that_is_smaller_is_nothing_to_warn_of() -> None:
    result = run(tiny("duration=1ba", "schedule.warmup=0.06dur", "task.eval_samples=13"))
    assert result.eval_loss is not None and result.warnings == []
