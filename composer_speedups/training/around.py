"""What is around a training: Ctrl-C that loses nothing, warnings that are kept, and lack of memory in one line."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning
from composer.utils import dist

from composer_speedups.errors import OutOfMemory, is_out_of_memory
from composer_speedups.measurement.measure import Measurement
from composer_speedups.recipes import Recipe
from composer_speedups.termination import put_back

__all__ = [
    "close_trainer",
    "collected_warnings",
    "explained_out_of_memory",
    "stop_on_interrupt",
    "without_what_is_normal",
]


@contextlib.contextmanager
def explained_out_of_memory(recipe: Recipe, measurement: Measurement | None = None) -> Iterator[None]:
    """Say in one line what did not fit; without `measurement`, the model was being built."""
    try:
        yield
    except OutOfMemory:  # it has been said in one line already
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"allocate ([\d.]+ [KMG]iB)|allocate (\d+) bytes", str(error))
        amount = f" (it asked for {asked[1] or f'{int(asked[2]) / 2**20:,.0f} MiB'})" if asked else ""
        if measurement is None:
            raise OutOfMemory(
                f"{recipe.name} ran out of memory before its first batch: the model {recipe.model.name} and "
                f"its optimizer do not fit{amount}; try a smaller model"
            ) from error
        evaluating, ranks = measurement.evaluating, dist.get_world_size()
        # Batches are of all ranks together, a microbatch is one rank's.
        size = ((evaluating and recipe.eval_batch_size) or recipe.batch_size) // ranks
        if not evaluating:
            size = min(recipe.microbatch_size or size, size)
        smaller = max(1, size // 2 // 8 * 8 or size // 2)
        advice = f"try microbatch_size={smaller}, which keeps the batch at {recipe.batch_size}"
        if evaluating:
            advice = f"try eval_batch_size={smaller * ranks}"
        if size == 1:
            advice = "one sample does not fit: try a shorter task.max_length or a smaller model"
        what = "an evaluation pass" if evaluating else "a forward pass"
        raise OutOfMemory(f"{recipe.name} ran out of memory with {size} samples {what}: {advice}{amount}") from error


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C ends the training after its batch, so that what is done is kept; the second ends it now.

    SIGTERM counts as a first one: a cluster sends it before it takes the machine away, and the `composer` launcher
    after a Ctrl-C, which the ranks may have heard already.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        put_back(before)


@contextlib.contextmanager
def without_what_is_normal() -> Iterator[None]:
    """Show no warning of Composer's about a last batch that is smaller, nor that few steps have no warm-up."""
    with warnings.catch_warnings():
        for start in ("Cannot split tensor of length", "The warmup duration is 0"):
            warnings.filterwarnings("ignore", message=start, category=UserWarning)
        yield


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Keep the texts of all warnings, and show them as always; a speed-up's without a line, as nobody's is to blame."""
    texts: list[str] = []
    show, layout = warnings.showwarning, warnings.formatwarning

    def showwarning(message: Any, category: Any, *args: Any, **kwargs: Any) -> None:
        texts.append(f"{category.__name__}: {message}")
        show(message, category, *args, **kwargs)

    def formatwarning(message: Any, category: Any, *args: Any, **kwargs: Any) -> str:
        if issubclass(category, NoEffectWarning):
            return f"{category.__name__}: {message}\n"
        return layout(message, category, *args, **kwargs)

    warnings.showwarning, warnings.formatwarning = showwarning, formatwarning
    try:
        yield texts
    finally:
        warnings.showwarning, warnings.formatwarning = show, layout


def close_trainer(trainer: Trainer, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Composer's `close` waits for all ranks: one that failed would wait for those that wait for its gradients."""
    if error is not None and dist.get_world_size() > 1:
        trainer.engine.close()
    else:
        trainer.close()
