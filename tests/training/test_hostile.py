"""Kills, damaged and foreign checkpoints, full disks, and shared folders."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import bert
from hostile import TINY, cli
from small_disk import small_disk
from transformers import BertConfig, BertForSequenceClassification

from composer_speedups.ablation.jobs import PRELOAD
from composer_speedups.checkpoint_files import Damaged
from composer_speedups.errors import CheckpointError
from composer_speedups.isolation.isolate import Isolation, Outcome
from composer_speedups.recipes import load_recipe, make_recipe
from composer_speedups.training.checkpoints import Checkpoints, Saver, exclusive, read_checkpoint
from composer_speedups.training.run import run
from composer_speedups.training.saved_model import save_model

STEPS = 32


@pytest.fixture(scope="module")
def isolation():
    """Fresh processes at the price of a fork."""
    with Isolation("hostile:train", PRELOAD, {"OMP_NUM_THREADS": "1"}) as started:
        yield started


def tiny(*overrides: str):
    return load_recipe("demo/fp32", [*TINY, *overrides])


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """As `hostile.train` has, whose losses are compared bit for bit: sums depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(isolation, tmp_path_factory) -> dict[str, Any]:
    """The run that nothing happens to: its losses, its model, its seconds."""
    folder = tmp_path_factory.mktemp("whole")
    outcome = isolation.run({"save": str(folder)}, timeout=120)
    assert outcome.status == "ok", outcome.log
    assert len(outcome.value["losses"]) == STEPS
    return outcome.value | {"model": (folder / "model.safetensors").read_bytes(), "folder": folder}


@pytest.fixture
def saved(whole, tmp_path) -> Path:
    """A folder as the whole run left it, to be damaged: batches 31 and 32 of 32."""
    folder = tmp_path / "saved"
    shutil.copytree(whole["folder"], folder, symlinks=True)
    (folder / "model.safetensors").unlink()
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def newest(folder: Path, back: int = 1) -> Path:
    return sorted(folder.glob("checkpoints/ep*.pt"), key=lambda p: int(p.name.split("ba")[1].split("-")[0]))[-back]


# ---- kill -9


def test_runs_are_forks_of_one_process(isolation, whole) -> None:
    """Nothing imported for runs, PEFT and bitsandbytes included, starts a thread: each would take 20 s more."""
    assert isolation.shared == (sys.platform == "linux"), isolation.note
    assert whole["processor_known"] == isolation.shared, "asked in each run, it takes a second"


def kills(isolation: Isolation, whole: dict[str, Any], folder: Path, count: int, seed: int) -> tuple[int, int, int]:
    """Kill `count` times, resuming in between. Returns kills, those in the middle of a write, and finished runs."""
    rng = random.Random(seed)
    training = whole["seconds"] - whole["setup"]
    killed = writing = finished = 0
    while killed < count:
        delay = rng.uniform(0, whole["setup"] + training * 2.5 / count)
        outcome = isolation.run({"save": str(folder), "resume": True, "kill_after": delay}, timeout=120)
        if outcome.status == "ok":
            finished += 1
            assert_same_as_whole(outcome, whole, folder)
            shutil.rmtree(folder)
            continue
        assert "killed by SIGKILL" in outcome.reason, outcome
        killed += 1
        writing += bool(list(folder.glob("checkpoints/.partial-*")))
    outcome = isolation.run({"save": str(folder), "resume": True}, timeout=120)
    assert_same_as_whole(outcome, whole, folder)
    return killed, writing, finished


def assert_same_as_whole(outcome: Outcome, whole: dict[str, Any], folder: Path) -> None:
    assert outcome.status == "ok", outcome.reason + outcome.log
    losses = outcome.value["losses"]
    assert losses == whole["losses"][STEPS - len(losses) :]  # bit for bit
    assert outcome.value["eval_loss"] == whole["eval_loss"]
    assert (folder / "model.safetensors").read_bytes() == whole["model"]
    assert not list(folder.rglob(".*")), "nothing half-written is left"
    assert len(list(folder.glob("checkpoints/ep*.pt"))) == 2


def test_killed_four_times_ends_as_if_never(isolation, whole, tmp_path) -> None:
    killed, _, _ = kills(isolation, whole, tmp_path / "out", 4, seed=1)
    assert killed == 4


@pytest.mark.slow
def test_killed_twenty_times_ends_as_if_never(isolation, whole, tmp_path) -> None:
    killed, writing, finished = kills(isolation, whole, tmp_path / "out", 20, seed=2)
    print(f"{killed} kills, {writing} of them while a checkpoint was written, {finished} runs ended before theirs")
    assert killed == 20


def test_finished_run_resumed_says_so_and_writes_the_model(isolation, whole, saved) -> None:
    """As after a kill between the last checkpoint and the model."""
    outcome = isolation.run({"save": str(saved), "resume": True}, timeout=60)
    assert_same_as_whole(outcome, whole, saved)
    assert outcome.value["losses"] == []


def test_killed_while_the_model_was_saved_leaves_nothing_of_it(isolation, whole, saved) -> None:
    half = saved / ".saving"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half of it")
    (half / "of_another_version.bin").write_bytes(b"")
    outcome = isolation.run({"save": str(saved), "resume": True}, timeout=60)
    assert_same_as_whole(outcome, whole, saved)
    assert not (saved / "of_another_version.bin").exists()


def test_finished_run_with_a_checkpoint_at_its_very_end_is_evaluated(tmp_path) -> None:
    """With the default interval the last checkpoint leaves nothing to fit, and Composer is asked to evaluate only."""
    first, model = run(tiny(), save=tmp_path), tmp_path / "model.safetensors"
    written = model.read_bytes()
    model.unlink()
    again = run(tiny(), save=tmp_path, resume=True)
    assert (again.status, again.losses, again.eval_loss) == ("ok", [], first.eval_loss)
    assert "at the end of the training already" in again.reason
    assert again.wallclock_seconds == again.train_seconds == 0
    assert model.read_bytes() == written


@pytest.mark.parametrize("interval", ["1ba", "1ep"])
def test_ctrl_c_and_resume_with_dropout_equals_uninterrupted(whole, tmp_path, interval: str) -> None:
    """Whoever stops a training does not wait for an evaluation, and dropout goes on as if nothing had been."""
    asked = []

    def interrupt(progress: Any) -> None:
        if progress.phase == "train" and not asked:
            asked.append(progress.step)
            os.kill(os.getpid(), signal.SIGTERM)

    first = run(tiny(), save=tmp_path, report=interrupt, checkpoint_interval=interval)
    assert first.status == "interrupted" and 0 < first.steps < STEPS
    assert first.eval_loss is None and first.reason == "stopped by Ctrl-C or SIGTERM"
    second = run(tiny(), save=tmp_path, resume=True, checkpoint_interval=interval)
    assert first.losses + second.losses == whole["losses"]  # bit for bit
    assert (tmp_path / "model.safetensors").read_bytes() == whole["model"]


# ---- damaged and foreign checkpoints


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in half": lambda data: data[: len(data) // 2],
    "one bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    "empty": lambda data: b"",
    "its beginning": lambda data: data[:100],
    "zeros": lambda data: bytes(len(data)),
    "rubbish": lambda data: random.Random(1).randbytes(len(data)),
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_seen(kind: str, saved) -> None:
    path = newest(saved)
    read_checkpoint(path)
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with pytest.raises(Damaged):
        read_checkpoint(path)


def test_damaged_newest_is_kept_aside_and_the_one_before_taken(isolation, whole, saved) -> None:
    path = newest(saved)
    path.write_bytes(path.read_bytes()[:1000])
    damaged = path.read_bytes()
    outcome = isolation.run({"save": str(saved), "resume": True}, timeout=60)
    assert outcome.status == "ok", outcome.log
    said = [line for line in outcome.log.splitlines() if "is damaged" in line]
    assert len(said) == 1 and path.name in said[0] and "going on from ep1-ba31-rank0.pt" in said[0]
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damaged
    assert outcome.value["losses"] == whole["losses"][-1:]
    assert (saved / "model.safetensors").read_bytes() == whole["model"]


@pytest.fixture
def refused(saved, capsys):
    """Resume with changes through the command line; it must end with one line and code 2, and change nothing."""

    def resume(*overrides: str) -> str:
        before = digests(saved)
        code, lines = cli(capsys, "train", "demo/fp32", *TINY, *overrides, "--save", str(saved), "--resume")
        errors = [line for line in lines if line.startswith("error: ")]
        assert code == 2 and len(errors) == 1 and lines[-1] == errors[0], lines
        assert digests(saved) == before, "nothing may be overwritten"
        return errors[0]

    return resume


def test_without_the_speed_up_that_made_the_batches_it_is_told(saved, caplog) -> None:
    recipe, path = make_recipe({"task": {"name": "dummy"}}), newest(saved)

    def edit(content: dict[str, Any], done: int) -> None:
        content["state"]["algorithms"] = [("TokenBudgetBatches", {"steps": 9, "ranks": 1})]
        content["state"]["callbacks"].pop("Saver", None)  # of another recipe
        content["state"]["timestamp"]["Timestamp"]["batch_in_epoch"] = done

    for done, speedups, told in ((3, {}, 1), (0, {}, 0), (3, {"length_grouped_batches": {}}, 0)):
        change(path, partial(edit, done=done))
        caplog.clear()
        Checkpoints(saved, recipe.model_copy(update={"speedups": speedups}), 1).find()
        assert caplog.text.count("other batches than this recipe, without token_budget_batches, has here") == told


def change(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = read_checkpoint(path)
    edit(content)
    torch.save(content, path)


def test_all_damaged(saved, refused) -> None:
    for path in saved.glob("checkpoints/ep*.pt"):
        path.write_bytes(path.read_bytes()[:5000])
    message = refused()
    assert "ep1-ba32-rank0.pt is damaged (" in message and "so are the 1 before it" in message
    assert "Start anew without --resume" in message


def test_from_another_model_or_run(refused) -> None:
    assert "of another run: model.config.hidden_size is 32 there and 64 here" in refused("model.config.hidden_size=64")
    assert "of another run: batch_size is 8 there and 16 here" in refused("batch_size=16")
    assert "of another run: learning_rate is " in refused("learning_rate=3e-3", "batch_size=8")
    assert "of another run: seed is 17 there and 18 here" in refused("seed=18")


def test_from_other_data(tmp_path, capsys) -> None:
    """The recipe has the same path, and the file there is another; one that is only newer is the same."""
    data, out = tmp_path / "mine.csv", tmp_path / "out"
    rows = [f"the text of {n},{'ab'[n % 2]}" for n in range(40)]
    data.write_text("\n".join(["text,label", *rows]))
    task = f"task={{name: text, path: {data}, max_length: 16}}"
    short = [task, *TINY[1:], "duration=2ba", "evaluate=false", "schedule.warmup=0ba"]
    command = ["train", "demo/fp32", *short, "--save", str(out), "--resume"]
    assert cli(capsys, *command)[0] == 0
    os.utime(data, (1, 1))
    assert cli(capsys, *command)[0] == 0
    data.write_text("\n".join(["text,label", *(row.translate({97: "b", 98: "a"}) for row in rows)]))
    before = digests(out)
    code, lines = cli(capsys, *command)
    assert code == 2 and lines[-1].startswith("error: the checkpoint ")
    assert f"is of another run: {data} has changed since it began. Resume with what was there" in lines[-1]
    assert digests(out) == before
    for path in out.glob("checkpoints/ep*.pt"):  # as they were written before data was looked at
        change(path, lambda content: content["state"]["callbacks"][Saver.__qualname__].pop("data"))
    assert cli(capsys, *command)[0] == 0


def test_from_another_model_that_composer_saved(saved, refused) -> None:
    for path in saved.glob("checkpoints/ep*.pt"):
        change(path, lambda content: content["state"]["callbacks"].pop(Saver.__qualname__))
    message = refused("model.config.hidden_size=64")
    assert "of another model: model.bert.embeddings.word_embeddings.weight is (256, 32) there and (256, 64)" in message
    assert "is of another model: model.bert.encoder.layer.1." in refused("model.config.num_hidden_layers=2")


def test_from_a_newer_version(saved, refused) -> None:
    def ours(content: dict[str, Any]) -> None:
        content["state"]["callbacks"][Saver.__qualname__] |= {"format": 2, "version": "9.1"}

    def composers(content: dict[str, Any]) -> None:
        content["state"]["metadata"]["composer_env_info"]["composer_version"] = "1.0.0"

    change(newest(saved), ours)
    assert "was written by composer_speedups 9.1, which is newer than this" in refused()
    change(newest(saved), lambda content: content["state"]["callbacks"].pop(Saver.__qualname__))
    change(newest(saved), composers)
    assert "was written by Composer 1.0.0, which is newer than this" in refused()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {os.environ['EVIL']}",))


def test_nothing_in_a_checkpoint_runs_code(saved, refused, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "pwned"))
    content = read_checkpoint(newest(saved))
    content["state"]["callbacks"]["x"] = Evil()
    torch.save(content, newest(saved))
    message = refused()
    assert "holds objects of posix.system, which may run code when loaded: it was not" in message
    assert not (tmp_path / "pwned").exists()
    torch.load(newest(saved), weights_only=False)
    assert (tmp_path / "pwned").exists(), "the test must be able to fail"


def test_starting_anew_keeps_what_was_there(saved, whole) -> None:
    before = digests(saved / "checkpoints")
    run(tiny("duration=1ba", "schedule.warmup=0ba"), save=saved)
    assert digests(saved / "checkpoints-old") == before
    assert [p.name for p in saved.glob("checkpoints/ep*.pt")] == ["ep0-ba1-rank0.pt"]
    run(tiny("duration=1ba", "schedule.warmup=0ba"), save=saved)
    assert digests(saved / "checkpoints-old") == before
    assert (saved / "checkpoints-old-2").is_dir()


def test_another_runs_model_is_kept(tmp_path, caplog) -> None:
    """Checkpoints are, and `tune` and `convert-checkpoint` ask before they replace anything."""
    short = ("duration=1ba", "schedule.warmup=0ba")
    (tmp_path / "precious.txt").write_text("not ours")
    run(tiny(*short), save=tmp_path)
    first = (tmp_path / "model.safetensors").read_bytes()
    run(tiny(*short), save=tmp_path, resume=True)
    assert not list(tmp_path.glob("model-old*")), "it is the same"
    run(tiny(*short, "learning_rate=3e-3"), save=tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() != first
    assert (tmp_path / "model-old" / "model.safetensors").read_bytes() == first
    assert {p.name for p in (tmp_path / "model-old").iterdir()} == {
        p.name for p in tmp_path.iterdir() if p.is_file() and p.name != "precious.txt"
    }
    assert f"is kept in {tmp_path / 'model-old'}" in caplog.text


def test_a_model_in_parts_is_not_hidden_by_one_that_was_there(tmp_path) -> None:
    """transformers looks for weights in one file first; beside those of a smaller model it would load them."""
    one, other = (
        BertForSequenceClassification(BertConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2))
        for _ in range(2)
    )
    task = SimpleNamespace(tokenizer=None)
    save_model(one, task, tmp_path)
    save_model(SimpleNamespace(save_pretrained=partial(other.save_pretrained, max_shard_size="3MB")), task, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() and (tmp_path / "model-old/model.safetensors").exists()
    loaded = BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.classifier.weight, other.classifier.weight)


@pytest.mark.parametrize("resume", [True, False])
def test_killed_in_its_first_checkpoint_leaves_nothing_to_keep(tmp_path, caplog, resume: bool) -> None:
    """What was half-written is no checkpoint of an earlier run, and is not told to be one."""
    half = tmp_path / "checkpoints" / ".partial-ep0-ba1-rank0.pt"
    half.parent.mkdir()
    half.write_bytes(b"half of it")
    assert run(tiny("duration=1ba", "schedule.warmup=0ba"), save=tmp_path, resume=resume).status == "ok"
    assert [p.name for p in half.parent.iterdir() if not p.is_symlink()] == ["ep0-ba1-rank0.pt"]
    assert not list(tmp_path.glob("checkpoints-old*"))
    assert "earlier run" not in caplog.text


def test_resume_where_nothing_is_starts_anew(tmp_path) -> None:
    result = run(tiny("duration=1ba", "schedule.warmup=0ba"), save=tmp_path / "new", resume=True)
    assert (result.steps, result.status) == (1, "ok")


def test_composer_itself_loads_our_checkpoints(whole) -> None:
    """They are Composer's own format: `Trainer(load_path=...)` without this package's part takes them."""
    from composer import Trainer
    from composer.models import HuggingFaceModel

    content = read_checkpoint(newest(whole["folder"]))
    result = run(tiny("duration=1ba", "schedule.warmup=0ba"))
    assert result.steps == 1
    from composer_speedups.tasks import build_task
    from composer_speedups.tasks.models import build_model

    recipe = tiny()
    task = build_task(recipe.task, recipe.model, seed=17)
    model = HuggingFaceModel(build_model(recipe.model, task, seed=3), tokenizer=task.tokenizer)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters()),
        load_path=str(newest(whole["folder"])),
        progress_bar=False,
        loggers=[],
        device="cpu",
    )
    trainer.close()
    assert int(trainer.state.timestamp.batch) == STEPS
    for name, value in content["state"]["model"].items():
        assert torch.equal(model.state_dict()[name], value)


# ---- full disk


def test_file_that_may_not_grow(isolation, whole, saved) -> None:
    """The checkpoint of the first step is refused half-way; those of the run before stay as they were."""
    before = digests(saved)
    size = newest(saved).stat().st_size
    payload = {"save": str(saved), "resume": True, "overrides": ["duration=3ep"], "file_size": size // 2}
    outcome = isolation.run(payload, timeout=60)
    assert outcome.status == "failed", outcome
    assert "ep2-ba33-rank0.pt cannot be written: " in outcome.reason and "make room there" in outcome.reason
    assert "What was saved before is intact" in outcome.reason
    assert digests(saved) == before


def test_full_disk(isolation, whole, tmp_path) -> None:
    size = newest(whole["folder"]).stat().st_size
    with small_disk(tmp_path / "disk", str(size * 5 // 2)) as disk:
        outcome = isolation.run({"save": str(disk / "out")}, timeout=60)
        assert outcome.status == "failed"
        assert "ep0-ba3-rank0.pt cannot be written: No space left on device" in outcome.reason
        kept = sorted(p.name for p in (disk / "out/checkpoints").iterdir())
        assert kept == ["ep0-ba1-rank0.pt", "ep0-ba2-rank0.pt", "latest-rank0.pt"]
        subprocess.run(["mount", "-o", f"remount,size={size * 8}", str(disk)], check=True)
        outcome = isolation.run({"save": str(disk / "out"), "resume": True}, timeout=60)
        assert_same_as_whole(outcome, whole, disk / "out")
        assert len(outcome.value["losses"]) == STEPS - 2


def test_full_disk_for_the_model_alone(tmp_path) -> None:
    """Whatever writes it has an error of its own, of no kind that Python knows."""
    model = bert("classification")
    size = sum(p.nbytes for p in model.parameters())
    with small_disk(tmp_path / "disk", str(size // 2)) as disk:
        (disk / "before").write_text("mine")
        said = (
            r"disk cannot be written: No space left on device\. What was saved before is intact: make room there\. The"
        )
        with pytest.raises(CheckpointError, match=f"{said} same command with --resume then writes the model"):
            save_model(model, SimpleNamespace(tokenizer=None), disk)
        assert [path.name for path in disk.iterdir()] == ["before"]
        subprocess.run(["mount", "-o", f"remount,size={size * 8}", str(disk)], check=True)
        save_model(model, SimpleNamespace(tokenizer=None), disk)
        assert (disk / "model.safetensors").stat().st_size > size


def test_folder_that_cannot_be_written(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file/below", Path("/proc/nowhere")):
        code, lines = cli(capsys, "train", "demo/fp32", *TINY, "--save", str(folder))
        assert code == 2 and "cannot be written: " in lines[-1], lines
    assert (tmp_path / "file").read_text() == "mine"


# ---- two runs in one folder


def test_second_run_in_one_folder_is_refused_and_a_killed_one_does_not_block(isolation, whole, tmp_path, capsys):
    out, refusals = tmp_path / "out", []

    def second(progress: dict[str, Any]) -> None:
        if progress["phase"] == "train" and not refusals:
            refusals.append(cli(capsys, "train", "demo/fp32", *TINY, "--save", str(out), "--resume"))

    outcome = isolation.run({"save": str(out)}, timeout=120, report=second)
    assert_same_as_whole(outcome, whole, out)
    (code, lines) = refusals[0]
    assert code == 2 and sum(line.startswith("error: ") for line in lines) == 1
    assert f"{out} is in use by another run (process " in lines[-1]

    out = tmp_path / "killed"
    outcome = isolation.run({"save": str(out), "kill_after_step": 1}, timeout=120)
    assert "killed by SIGKILL" in outcome.reason, outcome
    assert (out / ".lock").exists(), "the killed run left its lock file"
    outcome = isolation.run({"save": str(out), "resume": True}, timeout=120)
    assert_same_as_whole(outcome, whole, out)


def test_the_lock_ends_with_the_run_and_is_not_inherited(tmp_path) -> None:
    with exclusive(tmp_path):
        with pytest.raises(CheckpointError, match="in use"), exclusive(tmp_path):
            pass
        child = os.fork()
        if child == 0:  # as a data-loading worker
            time.sleep(60)
            os._exit(0)
    try:
        with exclusive(tmp_path):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert os.listdir(tmp_path) == []
