"""What tests share: small real models from random configs, a Composer state, no network."""

from __future__ import annotations

import gc
import os
import signal
import sys
from functools import cache
from pathlib import Path

# Set before torch is imported: no test may reach a hub, and two cores are shared by pytest's workers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Inductor's compile workers would import PyTorch beside whatever a test starts. Tests of them set it themselves.
os.environ.setdefault("TORCH_WARM_POOL", "0")

import pytest
import torch
from packaging.version import Version
from small import BatchDataset, bert_config

from composer_speedups.compat import set_float32_precision
from composer_speedups.compilation import settle_compile_workers

gc.disable()  # until the tests are collected: they and what they import are a million objects, none of them garbage

HAS_CUDA = torch.cuda.is_available()
NEWER = Version(torch.__version__) >= Version("2.11")  # the modern stack, and the newest
_MINUTES = ("test_interpreted.py", "test_null_gpu.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on a GPU run where there is one, and by themselves: a process has one distributed backend, gloo or NCCL.

    Tests of minutes come first: begun last, one worker would still be at them when the others have nothing left.
    """
    items.sort(key=lambda item: item.path.name not in _MINUTES)
    if not NEWER and config.option.markexpr == "not slow":
        skip = pytest.mark.skip(reason="takes long: with the modern and the newest stack, or in make test-all")
        for item in items:
            if "elsewhere" in item.keywords:
                item.add_marker(skip)
    reason = "needs a CUDA device, this machine has none"
    if HAS_CUDA and config.option.markexpr != "gpu":
        reason = "on a GPU, in a process of its own: pytest -m gpu"
    for item in items:
        if "gpu" in item.keywords and (not HAS_CUDA or config.option.markexpr != "gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Tests that compile by themselves must not make the whole run wait for Inductor's workers at its end."""
    settle_compile_workers()
    gc.unfreeze()  # or the newest Triton prints what is frozen as leaked


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _alone_in_this_process(tmp_path_factory: pytest.TempPathFactory):
    """Measured runs in tests see those of other pytest processes, and of the machine's users, nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOSER_SPEEDUPS_PRESENCE", str(tmp_path_factory.mktemp("presence")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _composer_looks_for_its_commit_once():
    """It goes through all its installed files for that, for every Trainer and every checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        if "composer" in sys.modules:
            from composer.utils import collect_env

            patch.setattr(collect_env, "get_composer_commit_hash", cache(collect_env.get_composer_commit_hash))
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(17)


@pytest.fixture(autouse=True)
def _true_float32() -> None:
    """Composer's Trainer switches TF32 on for the whole process, and the next test may be about float32."""
    if HAS_CUDA:
        set_float32_precision("highest", True)


@pytest.fixture(autouse=True)
def _own_signals() -> None:
    """Composer's Trainer leaves handlers that end the process; a test that sends a signal means Python's own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def poisoned_memory():
    """`torch.empty` gives NaN: what a faulty kernel leaves out cannot be right by the memory's earlier use."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def tiny_bert() -> torch.nn.Module:
    """A BERT for sequence classification: 2 layers, width 32, 4 heads, vocabulary 128, no dropout."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(bert_config())


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


@pytest.fixture(scope="session")
def exchanged(tmp_path_factory) -> dict:
    """What two ranks found that exchanged gradients in one way and another."""
    from exchanges import worked

    return torch.load(worked(tmp_path_factory, "exchange_worker.py") / "results.pt")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a file in an empty working folder; return its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write
