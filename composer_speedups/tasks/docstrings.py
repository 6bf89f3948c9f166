"""The embedded corpus: docstrings of the packages that are installed anyway; the label is the package.

Real English text of a realistic length distribution, in ten classes, with no download. The texts depend on nothing but
the versions of the packages and the numbers asked for: files are read in parallel, but used in one fixed order.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from composer_speedups.errors import TaskError
from composer_speedups.installed import version
from composer_speedups.tasks import harvest
from composer_speedups.tasks.texts import Texts, split_sizes

__all__ = ["PACKAGES", "collect", "versions"]

STANDARD_LIBRARY = "python"
# Ten that every installation has: dependencies of torch, transformers, datasets and mosaicml, or ours.
PACKAGES = (
    "matplotlib", "networkx", "numpy", "pandas", STANDARD_LIBRARY,
    "scipy", "sympy", "torch", "torchmetrics", "transformers",
)  # fmt: skip
_SKIPPED_FOLDERS = {"tests", "test", "site-packages", "dist-packages", "__pycache__"}
_FILES_PER_JOB = 24  # some 0.2 s of parsing, against 0.03 s to start a process
_KEY_WORDS = 12


def versions() -> dict[str, str]:
    """Version by package, of those of `PACKAGES` that are installed: what the corpus depends on."""
    found = {}
    for name in PACKAGES:
        if name == STANDARD_LIBRARY:
            found[name] = platform.python_version()
        elif _folder(name) is not None:
            found[name] = version(name) or "unknown"
    return found


def collect(
    train: int | None,
    evaluation: int | None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    workers: int | None = None,
) -> Texts:
    """Collect texts until there are as many as asked for (None: all there are), classes as equal as they can be.

    Texts that begin alike are near-copies (models in transformers, metrics in torchmetrics): of those
    with the same first twelve words only one is kept, so none is both trained and evaluated on.
    """
    names = list(versions())
    if len(names) < 2:
        raise TaskError(
            "task docstrings found fewer than two of its packages "
            f"({', '.join(PACKAGES)}): install them, or use task text with a file of your own"
        )
    wanted = None if train is None or evaluation is None else train + evaluation
    workers = workers or min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    taken: dict[str, list[tuple[str, str]]] = {name: [] for name in names}
    seen: set[str] = set()
    pool = ThreadPoolExecutor(workers)  # threads only wait: each job is a process of its own
    try:
        feeds = {name: _Feed(pool, _files(name, seed), workers) for name in names}
        for feed in feeds.values():
            feed.ahead(1)
        open_feeds = dict(feeds)
        while open_feeds and (wanted is None or sum(map(len, taken.values())) < wanted):
            # A small package runs dry; what it lacks is shared by the others in the next round.
            missing = None if wanted is None else wanted - sum(map(len, taken.values()))
            share = None if missing is None else -(-missing // len(open_feeds))
            for name, feed in list(open_feeds.items()):
                room = share if missing is None else min(share, wanted - sum(map(len, taken.values())))
                if not _take(feed, room, taken[name], seen):
                    del open_feeds[name]
                if progress is not None:
                    count = sum(map(len, taken.values()))
                    progress(f"docstrings: {count:,} of {wanted or 'all'} texts, {name} read")
    finally:
        pool.shutdown(cancel_futures=True)
    return _split(taken, train, evaluation, seed)


def _take(feed: _Feed, room: int | None, into: list[tuple[str, str]], seen: set[str]) -> bool:
    """Move up to `room` new texts from `feed`; False when it ran dry."""
    count = 0
    while room is None or count < room:
        text = feed.next(None if room is None else room - count)
        if text is None:
            return False
        key = _dedup_key(text)
        if key and key not in seen:
            seen.add(key)
            into.append((key, text))
            count += 1
    return True


def _split(taken: dict[str, list[tuple[str, str]]], train: int | None, evaluation: int | None, seed: int) -> Texts:
    names = [name for name in taken if taken[name]]
    total = sum(len(taken[name]) for name in names)
    n_train, n_eval = split_sizes(total, train, evaluation)
    rows: dict[str, list[tuple[bytes, str, int]]] = {"train": [], "evaluation": []}
    given, before = 0, 0
    for label, name in enumerate(names):
        # The split is by hash within each class, and near-copies were dropped: no text is on both sides.
        ordered = sorted((_hash(seed, key), text, label) for key, text in taken[name])
        before += len(ordered)
        due = n_eval * before // total  # running share: the parts add up to n_eval exactly
        rows["evaluation"] += ordered[: due - given]
        rows["train"] += ordered[due - given :]
        given = due
    # Ordered by a second hash (the first decided the side): classes are mixed, any beginning is a fair sample.
    train_rows, eval_rows = (sorted(part, key=lambda r: _hash(seed + 1, r[1])) for part in rows.values())
    notes = []
    asked = (train or 0) + (evaluation or 0)
    if train is not None and evaluation is not None and total < asked:
        notes.append(f"{asked:,} docstrings asked for, {total:,} found: {n_train:,} to train, {n_eval:,} to evaluate")
    return Texts(
        train=[t for _, t, _ in train_rows], train_labels=[n for _, _, n in train_rows],
        evaluation=[t for _, t, _ in eval_rows], evaluation_labels=[n for _, _, n in eval_rows],
        label_names=names, notes=notes,
    )  # fmt: skip


class _Feed:
    """The texts of one package, file by file in a fixed order, parsed ahead by the pool."""

    def __init__(self, pool: ThreadPoolExecutor, files: list[str], workers: int) -> None:
        jobs = [files[i : i + _FILES_PER_JOB] for i in range(0, len(files), _FILES_PER_JOB)]
        self._pool, self._workers = pool, workers
        self._jobs: Iterator[list[str]] = iter(jobs)
        self._running: deque[Future[list[str]]] = deque()
        self._texts: deque[str] = deque()
        self._jobs_done = self._texts_seen = 0

    def ahead(self, jobs: int) -> None:
        while len(self._running) < jobs and (job := next(self._jobs, None)) is not None:
            self._running.append(self._pool.submit(_harvest, job))

    def next(self, needed: int | None) -> str | None:
        while not self._texts:
            # Parse no further ahead than it looks to be of use, at the yield seen so far.
            per_job = max(1, self._texts_seen // max(1, self._jobs_done))
            self.ahead(self._workers if needed is None else max(1, min(self._workers, needed // per_job)))
            if not self._running:
                return None
            found = self._running.popleft().result()
            self._jobs_done += 1
            self._texts_seen += len(found)
            self._texts.extend(found)
        return self._texts.popleft()


def _harvest(paths: list[str]) -> list[str]:
    command = [sys.executable, "-I", "-S", "-W", "ignore", harvest.__file__]
    done = subprocess.run(command, input=json.dumps(paths).encode(), capture_output=True)
    if done.returncode != 0:
        raise RuntimeError(f"reading docstrings failed: {done.stderr.decode(errors='replace')[-500:]}")
    return [text for texts in json.loads(done.stdout) for text in texts]


def _folder(name: str) -> Path | None:
    if name == STANDARD_LIBRARY:
        return Path(sysconfig.get_path("stdlib"))
    spec = importlib.util.find_spec(name)  # of a top-level name: finds it without importing it
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _files(name: str, seed: int) -> list[str]:
    """The package's Python files, in an order that depends on their names and `seed` only."""
    root, found = _folder(name), []
    assert root is not None
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS]
        found += [os.path.join(folder, f) for f in files if f.endswith(".py")]
    return sorted(found, key=lambda path: _hash(seed, os.path.relpath(path, root).replace(os.sep, "/")))


def _dedup_key(text: str) -> str:
    return " ".join(re.sub(r"[\W\d_]+", " ", text.lower()).split()[:_KEY_WORDS])


def _hash(seed: int, text: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{text}".encode("utf-8", "replace"), digest_size=12).digest()
