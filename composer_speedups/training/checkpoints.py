"""Checkpoints that outlive what happens to a training: kills, full disks, damaged files, two runs in one folder.

Composer writes a checkpoint straight into its final file, and removes the link to the latest before it makes the new
one. Here a file appears under its name only when it is whole, and what to resume from is found by looking, not by the
link. Files are read with `weights_only=True`, so nothing in them can run code; only then are they given to Composer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import composer
import torch
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger
from composer.utils import checkpoint, dist
from packaging.version import InvalidVersion, Version
from safetensors import SafetensorError

from composer_speedups import __version__, registry
from composer_speedups.batches.resumed import warn_of_other_batches
from composer_speedups.checkpoint_files import Damaged, Unsafe, read_file
from composer_speedups.errors import CheckpointError, UserError, first_line
from composer_speedups.files import open_locked
from composer_speedups.recipes.schema import changes
from composer_speedups.tasks.inputs import data_of, marks

if TYPE_CHECKING:
    from composer_speedups.recipes import Recipe

__all__ = ["Checkpoints", "Saver", "all_finite", "exclusive", "free_name", "read_checkpoint", "writing"]

log = logging.getLogger("composer_speedups")
T = TypeVar("T")

FORMAT = 1  # of what `Saver` adds; raise it when an older version of this package could not resume correctly
KEEP = 2
_NAME = re.compile(r"ep(\d+)-ba(\d+)-rank0\.pt")
# With another value of these, resuming would not go on with the same run: they decide weights, data or updates.
_SAME = ("model", "task", "batch_size", "learning_rate", "optimizer", "schedule", "seed")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a Composer checkpoint, read so that nothing in it can run code.

    Raises:
        CheckpointError: it cannot be opened, or asks for code to be run.
        Damaged: it is cut off, altered, or a file of another kind.
    """
    try:
        content = read_file(path)
    except Unsafe as error:
        raise CheckpointError(f"{error}: it was not. Remove it unless you know where it comes from") from error
    try:
        whole = isinstance(content["state"]["model"], dict) and "Timestamp" in content["state"]["timestamp"]
    except (KeyError, IndexError, TypeError):
        whole = False
    if not whole:
        raise Damaged(path, "it is not of Composer")
    return content


class Checkpoints:
    """The checkpoints of one run, under `save/checkpoints`.

    Use: `find`, then `check` with the model, then `begin`; nothing on disk changes before `begin`.
    """

    def __init__(self, save: Path, recipe: Recipe, seed: int) -> None:
        self.folder = save / "checkpoints"
        said = recipe.to_dict()
        self.facts = {key: value for key, value in said.items() if key in _SAME} | {"seed": seed}
        self.speedups = set(recipe.speedups)
        # Not of the model's folder: the weights are the checkpoint's, and their shapes are compared.
        self.data = _on_rank_zero(lambda: {path: mark.content for path, mark in marks(data_of(said)).items()})
        self.load_path: str | None = None
        self._damaged: list[tuple[Path, str]] = []
        self._shapes: dict[str, torch.Size] | None = None

    def find(self) -> None:
        """Choose the newest checkpoint that is whole, and see that it is of this run."""
        self.load_path = _on_rank_zero(self._find)

    def _find(self) -> str | None:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            names = []
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error.strerror or error}") from error
        found = sorted(((int(m[2]), m[0]) for m in map(_NAME.fullmatch, names) if m), reverse=True)
        for _, name in found:
            path = self.folder / name
            try:
                content = read_checkpoint(path)
            except Damaged as damage:
                self._damaged.append((path, damage.reason))
                continue
            self._check_origin(path, content["state"])
            self._check_batches(content["state"])
            self._shapes = {k: v.shape for k, v in content["state"]["model"].items() if isinstance(v, torch.Tensor)}
            return str(path.absolute())
        if self._damaged:
            path, reason = self._damaged[0]
            others = f", and so are the {len(self._damaged) - 1} before it" if len(self._damaged) > 1 else ""
            raise CheckpointError(
                f"the checkpoint {path} is damaged ({reason}){others}: nothing is left to resume from. "
                "Start anew without --resume"
            )
        log.warning("nothing to resume in %s: starting anew", self.folder)
        return None

    def _check_origin(self, path: Path, state: dict[str, Any]) -> None:
        written = state.get("callbacks", {}).get(Saver.__qualname__, {})
        if written.get("format", 0) > FORMAT:
            raise CheckpointError(
                f"the checkpoint {path} was written by composer_speedups {written.get('version')}, which is newer "
                f"than this {__version__}: upgrade, or start anew with another --save"
            )
        with contextlib.suppress(KeyError, InvalidVersion, TypeError):
            theirs = str(state["metadata"]["composer_env_info"]["composer_version"])
            if Version(theirs) > Version(composer.__version__):
                raise CheckpointError(
                    f"the checkpoint {path} was written by Composer {theirs}, which is newer than this "
                    f"{composer.__version__}: upgrade it, or start anew with another --save"
                )
        there = written.get("recipe", {})
        if there and (changed := changes(there, self.facts)):
            key, before, now = changed[0]
            others = ", ".join(key for key, *_ in changed[1:4])
            raise CheckpointError(
                f"the checkpoint {path} is of another run: {key} is {before!r} there and {now!r} here"
                + (f" (and {len(changed) - 1} more: {others})" if others else "")
                + ". Resume with the same values, or start anew with another --save"
            )
        before = written.get("data", {})  # not there in what older versions wrote
        if other := [name for name, content in self.data.items() if before.get(name, content) != content]:
            raise CheckpointError(
                f"the checkpoint {path} is of another run: {other[0]} has changed since it began. Resume with what was "
                "there, or start anew with another --save"
            )

    def _check_batches(self, state: dict[str, Any]) -> None:
        """Warn where a speed-up cut the epoch into batches that is not there any more, and no other: they see to it."""
        there, regrouping = dict(state.get("algorithms", ())), registry.regrouping()
        gone = [key for key in regrouping if registry.speedup_class(key).__name__ in there]
        if gone and not regrouping & self.speedups and (done := state["timestamp"]["Timestamp"])["batch_in_epoch"]:
            warn_of_other_batches(int(done["epoch"]), f"this recipe, without {gone[0]},")

    def check(self, model: torch.nn.Module) -> None:
        """See that the chosen checkpoint is of this model."""
        _on_rank_zero(lambda: self._check(model))

    def _check(self, model: torch.nn.Module) -> None:
        if self._shapes is None:
            return
        ours = {key: value.shape for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        for key in [*ours, *self._shapes]:
            if ours.get(key) != self._shapes.get(key):
                there, here = (tuple(s[key]) if key in s else "missing" for s in (self._shapes, ours))
                raise CheckpointError(
                    f"the checkpoint {self.load_path} is of another model: {key} is {there} there and {here} here. "
                    "Resume with the same model, or start anew with another --save"
                )

    def begin(self) -> None:
        """Make room: what is damaged, and what another run left when this one starts anew, is moved, never lost."""
        _on_rank_zero(self._begin)

    def _begin(self) -> None:
        with writing(self.folder):
            for path, reason in self._damaged:
                aside = free_name(path.with_name(f"{path.name}.damaged"))
                path.rename(aside)
                log.warning(
                    "the checkpoint %s is damaged (%s): kept as %s; going on from %s",
                    path,
                    reason,
                    aside.name,
                    Path(str(self.load_path)).name,
                )
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".partial-*"):
                leftover.unlink()  # of a run that was killed while it wrote, perhaps its first: nothing to keep
            if self.load_path is None and any(self.folder.iterdir()):
                aside = free_name(self.folder.with_name(f"{self.folder.name}-old"))
                self.folder.rename(aside)
                log.warning("the checkpoints of an earlier run are kept in %s", aside)
                self.folder.mkdir()

    def saver(self, interval: str) -> Saver:
        """The callback that writes them."""
        return Saver(self.folder, interval, self.facts, self.data)


class Saver(CheckpointSaver):
    """Composer's CheckpointSaver, but a checkpoint is whole or not there, and its failure is told in one line."""

    resumes_by_name = True  # whoever refuses a checkpoint asks: its user named a folder, and no file

    def __init__(self, folder: Path, interval: str, recipe: dict[str, Any], data: dict[str, str]) -> None:
        super().__init__(folder, save_interval=interval, remote_file_name=None, latest_remote_file_name=None)
        self._recipe, self._data = recipe, data

    def state_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": __version__, "recipe": self._recipe, "data": self._data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: what is there is seen in the folder."""

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        self.last_checkpoint_batch = state.timestamp.batch
        target = Path(self.filename.format(state))
        if not all_finite(state.model):
            warnings.warn(f"no checkpoint {target.name}: the weights are not finite; the one before is kept")
            return
        partial = target.with_name(f".partial-{target.name}")
        try:
            with writing(target, target.parent):
                checkpoint.save_checkpoint(state, str(partial))  # a collective call: every rank takes part
                if dist.get_global_rank() == 0:
                    _publish(partial, target)
        finally:
            partial.unlink(missing_ok=True)
        if dist.get_global_rank() == 0:
            self._rotate(target)

    def _rotate(self, newest: Path) -> None:
        """Keep the last `KEEP`; also those from before an interruption count."""
        found = sorted((int(m[2]), m[0]) for m in map(_NAME.fullmatch, os.listdir(newest.parent)) if m)
        self.saved_checkpoints = [str(newest.parent / name) for _, name in found[-KEEP:]]
        for _, name in found[:-KEEP]:
            (newest.parent / name).unlink()


def _publish(partial: Path, target: Path) -> None:
    """Give a written file its name, and the link `latest-rank0.pt` that Composer's users know."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, target)
    link = target.with_name(".partial-latest")
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    os.replace(link, target.with_name("latest-rank0.pt"))


@contextlib.contextmanager
def writing(path: Path, beside: Path | None = None, then: str = "") -> Iterator[None]:
    """Turn what a full or forbidden disk raises into one line about `path`.

    Args:
        path: that is written to.
        beside: holds a file's predecessors, if the folder `path` does not.
        then: what to do when that is mended.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch's writer loses the errno ("PytorchStreamWriter failed writing file", "unexpected pos"), but the file's
        # own error may be there as the one before.
        cause = next((e for e in (error, error.__context__) if isinstance(e, OSError) and e.errno), None)
        if isinstance(error, SafetensorError) and (number := re.search(r"\(os error (\d+)\)", str(error))):
            cause = OSError(int(number[1]), os.strerror(int(number[1])))
        if cause is None and not re.search(r"PytorchStreamWriter|unexpected pos|iostream|write failed", str(error)):
            raise
        reason = cause.strerror if cause is not None else first_line(error)
        full = cause is None or cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
        remedy = ("make room there" if full else "name another folder with --save") + then
        intact = ". What was saved before is intact" if _holds_something(beside or path) else ""
        raise CheckpointError(f"{path} cannot be written: {reason}{intact}: {remedy}") from error


def _holds_something(folder: Path) -> bool:
    """Whether there is more in it than what a run needs while it is at work."""
    try:
        return any(not name.startswith(".") for name in os.listdir(folder))
    except OSError:
        return False


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold `folder` for this run; the lock is the kernel's, and ends with the process however that ends."""
    _on_rank_zero(lambda: _lock(folder))
    try:
        yield
    finally:
        descriptor = _HELD.pop(folder, None)
        if descriptor is not None:
            (folder / _LOCK).unlink(missing_ok=True)
            os.close(descriptor)


_LOCK = ".lock"
_HELD: dict[Path, int] = {}  # by folder: the open lock file


def _close_in_child() -> None:
    # A data-loading worker that outlives a killed run by some seconds must not hold its lock.
    while _HELD:
        os.close(_HELD.popitem()[1])


os.register_at_fork(after_in_child=_close_in_child)


def _lock(folder: Path) -> None:
    path = folder / _LOCK
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, locked = open_locked(path)
    if not locked:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise CheckpointError(
            f"{folder} is in use by another run ({owner or 'which has just begun'}): wait for its end, or name "
            "another folder with --save"
        )
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _HELD[folder] = descriptor


def _on_rank_zero(work: Callable[[], T]) -> T:
    """What rank 0 found, or its error, on every rank."""
    outcome: list[tuple[Any, UserError | None]] = [(None, None)]
    if dist.get_global_rank() == 0:
        try:
            outcome = [(work(), None)]
        except UserError as error:
            outcome = [(None, error)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome)
    value, failure = outcome[0]
    if failure is not None:
        raise failure
    return value


def all_finite(model: torch.nn.Module) -> bool:
    """Whether no weight is NaN or infinite."""
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


def free_name(path: Path) -> Path:
    """`path`, or with a number if it is taken."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
