"""The store of a study: `runs.sqlite`, one SQLite file that survives being killed at any moment.

A run is claimed before it starts and its result, steps and log are written in one transaction, so a run
is either there as a whole or not at all. Claims end when their owner dies or stops renewing them, so two
processes can work on one study and neither waits for a dead one. Each finished run carries a digest, and so
does what the study is about: a damaged file is refused instead of being believed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_speedups.ablation.plan import PlannedRun
from composer_speedups.errors import UserError

__all__ = ["DONE", "LEASE_SECONDS", "Run", "Store", "StoreError"]

APPLICATION = 0x43535055  # "CSPU": SQLite's application_id of our files
VERSION = 1
LEASE_SECONDS = 60.0  # a claim that was not renewed for so long is void
_SEAL = "digest"  # the key, in the table of the study, of the digest of everything but the runs
DONE = ("ok", "skipped", "failed", "out_of_memory", "timeout")  # not repeated by a resumed study

_SCHEMA = """
CREATE TABLE study (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE environments (id INTEGER PRIMARY KEY, facts TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE recipes (
    name TEXT PRIMARY KEY, position INTEGER NOT NULL, resolved TEXT NOT NULL
) STRICT;
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    recipe TEXT NOT NULL REFERENCES recipes(name),
    seed INTEGER NOT NULL,
    position INTEGER NOT NULL,
    status TEXT NOT NULL DEFAULT 'pending',
    reason TEXT NOT NULL DEFAULT '',
    owner TEXT,
    claimed_until REAL,
    attempts INTEGER NOT NULL DEFAULT 0,
    environment INTEGER REFERENCES environments(id),
    started REAL,
    finished REAL,
    result TEXT,
    digest TEXT,
    UNIQUE (recipe, seed)
) STRICT;
CREATE TABLE steps (
    run INTEGER NOT NULL REFERENCES runs(id), step INTEGER NOT NULL, loss REAL, seconds REAL,
    PRIMARY KEY (run, step)
) STRICT, WITHOUT ROWID;
CREATE TABLE logs (run INTEGER PRIMARY KEY REFERENCES runs(id), text TEXT NOT NULL) STRICT;
"""


class StoreError(UserError):
    """The store cannot be used: damaged, of another study, or of another version."""


@dataclass
class Run:
    """A run as the store knows it. `result` has the fields of `RunResult`, with losses and step times."""

    id: int
    recipe: str
    seed: int
    position: int
    status: str
    reason: str = ""
    attempts: int = 0
    started: float | None = None
    finished: float | None = None
    environment: int | None = None
    result: dict[str, Any] = field(default_factory=dict)


class Store:
    """Open (or make) the store at `path`.

    Args:
        path: the SQLite file.
        create: make it if it is not there.

    Raises:
        StoreError: what is at `path` is no store of ours, or a damaged one. It is left as it is.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = Path(path)
        self.owner = f"{_machine()}:{os.getpid()}:{_birth(os.getpid())}"
        if not create and not self.path.is_file():
            raise StoreError(f"no study in {self.path.parent}: {self.path.name} is not there")
        _check_header(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # First a look that cannot write: a damaged file stays as it is, byte for byte.
            if self.path.exists() and self.path.stat().st_size:
                self._open(f"{self.path.absolute().as_uri()}?mode=ro")
                self._db.close()
            self._open(f"{self.path.absolute().as_uri()}?mode=rwc", write=True)
        except (sqlite3.OperationalError, OSError) as error:
            raise StoreError(
                f"cannot open {self.path}: {error}. Choose another folder; `report --no-write` looks at one that "
                f"cannot be written to"
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write everything into the one file, so that it can be copied elsewhere, and let go of it."""
        with suppress(sqlite3.Error):  # another process is at it: the last one to close does it
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    # --- The study ---

    def begin(self, study: dict[str, Any], recipes: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Record what is studied; if the store holds a study already, it must be the same one.

        Args:
            study: facts such as `name` and `baseline`.
            recipes: name and resolved recipe, in the order of the table.
        """
        with self._write() as db:
            stored = self.recipes()
            if not stored:
                rows = [(name, n, _dump(recipe)) for n, (name, recipe) in enumerate(recipes)]
                db.executemany("INSERT INTO recipes VALUES (?, ?, ?)", rows)
                db.executemany("INSERT INTO study VALUES (?, ?)", [(k, _dump(v)) for k, v in study.items()])
                self._seal(db)
                return
            difference = _difference(stored, {name: json.loads(_dump(r)) for name, r in recipes})
            before = self.study().get("baseline")
            if not difference and before != study.get("baseline"):
                difference = f"its baseline is {before}"
            if difference:
                raise StoreError(
                    f"{self.path.parent} holds another study: {difference}. Choose another --out, or remove that folder"
                )

    def study(self) -> dict[str, Any]:
        rows = self._db.execute("SELECT key, value FROM study WHERE key != ?", (_SEAL,)).fetchall()
        return {key: json.loads(value) for key, value in rows}

    def note(self, **facts: Any) -> None:
        """Add facts to the study, or change them."""
        with self._write() as db:
            rows = [(key, _dump(value)) for key, value in facts.items()]
            db.executemany("INSERT OR REPLACE INTO study VALUES (?, ?)", rows)
            self._seal(db)

    def recipes(self) -> dict[str, dict[str, Any]]:
        """Resolved recipes by name, in the order of the table."""
        rows = self._db.execute("SELECT name, resolved FROM recipes ORDER BY position").fetchall()
        return {name: json.loads(resolved) for name, resolved in rows}

    def add_environment(self, facts: dict[str, Any]) -> int:
        """Store an environment once; its number goes with the runs made in it."""
        with self._write() as db:
            db.execute("INSERT OR IGNORE INTO environments (facts) VALUES (?)", (_dump(facts),))
            self._seal(db)
            return db.execute("SELECT id FROM environments WHERE facts = ?", (_dump(facts),)).fetchone()[0]

    def environments(self) -> dict[int, dict[str, Any]]:
        rows = self._db.execute("SELECT id, facts FROM environments ORDER BY id").fetchall()
        return {number: json.loads(facts) for number, facts in rows}

    # --- Runs ---

    def plan(self, runs: Sequence[PlannedRun]) -> None:
        """Add the runs that are not there yet, after those that are."""
        with self._write() as db:
            first = db.execute("SELECT coalesce(max(position) + 1, 0) FROM runs").fetchone()[0]
            db.executemany(
                "INSERT OR IGNORE INTO runs (recipe, seed, position) VALUES (?, ?, ?)",
                [(run.recipe, run.seed, first + run.position) for run in runs],
            )

    def skip(self, recipe: str, reason: str) -> None:
        """Settle all open runs of `recipe` as skipped."""
        with self._write() as db:
            open_runs = db.execute(
                "SELECT id, recipe, seed FROM runs WHERE recipe = ? AND status IN ('pending', 'interrupted')",
                (recipe,),
            ).fetchall()
            for number, name, seed in open_runs:
                self._clear(db, number)  # what an interrupted run has left
                digest = _digest(name, seed, "skipped", reason, None, [], "")
                db.execute(
                    "UPDATE runs SET status = 'skipped', reason = ?, finished = ?, digest = ? WHERE id = ?",
                    (reason, time.time(), digest, number),
                )

    def retry(
        self,
        statuses: Sequence[str] = ("failed", "out_of_memory", "timeout", "skipped"),
        seeds: Sequence[int] | None = None,
    ) -> int:
        """Forget how runs with one of `statuses` ended, so that they are made again; return how many.

        Of those with one of `seeds`, if given.
        """
        with self._write() as db:
            asked, wanted = _of_seeds(seeds)
            query = f"SELECT id FROM runs WHERE status IN ({_marks(statuses)}) AND {asked}"
            ids = [row[0] for row in db.execute(query, (*statuses, *wanted))]
            for number in ids:
                self._clear(db, number)
            return len(ids)

    def claim(self, environment: int | None = None, seeds: Sequence[int] | None = None) -> Run | None:
        """Take the next run that nobody has, of those with one of `seeds`, if given; None if none is left to take."""
        with self._write() as db:
            self._void_dead_claims(db)
            asked, wanted = _of_seeds(seeds)
            row = db.execute(
                "SELECT id, recipe, seed, position, attempts FROM runs WHERE status IN ('pending', 'interrupted') "
                f"AND {asked} ORDER BY position LIMIT 1",
                wanted,
            ).fetchone()
            if row is None:
                return None
            number, recipe, seed, position, attempts = row
            now = time.time()
            db.execute(
                "UPDATE runs SET status = 'running', reason = '', owner = ?, claimed_until = ?, attempts = ?, "
                "environment = ?, started = ?, finished = NULL, result = NULL, digest = NULL WHERE id = ?",
                (self.owner, now + LEASE_SECONDS, attempts + 1, environment, now, number),
            )
            return Run(number, recipe, seed, position, "running", "", attempts + 1, now, None, environment)

    def renew(self, run: Run) -> bool:
        """Keep a claim; False if it was lost to another process."""
        with self._write() as db:
            changed = db.execute(
                "UPDATE runs SET claimed_until = ? WHERE id = ? AND status = 'running' AND owner = ?",
                (time.time() + LEASE_SECONDS, run.id, self.owner),
            )
            return changed.rowcount == 1

    def finish(self, run: Run, status: str, reason: str, result: dict[str, Any] | None, log: str) -> bool:
        """Write how a run ended, all of it or nothing; False if another process has taken it over meanwhile."""
        result = dict(result or {})
        losses, seconds = result.pop("losses", []), result.pop("step_seconds", [])
        width = max(len(losses), len(seconds))
        steps = [(n, _number(losses, n), _number(seconds, n)) for n in range(width)]
        text = _dump(result) if result else None
        if status == "interrupted":  # of no use to anybody: it will be made again
            text, steps = None, []
        digest = _digest(run.recipe, run.seed, status, reason, text, steps, log)
        with self._write() as db:
            changed = db.execute(
                "UPDATE runs SET status = ?, reason = ?, result = ?, digest = ?, finished = ?, owner = NULL, "
                "claimed_until = NULL WHERE id = ? AND status = 'running' AND owner = ?",
                (status, reason, text, digest, time.time(), run.id, self.owner),
            )
            if changed.rowcount != 1:
                return False
            db.execute("DELETE FROM steps WHERE run = ?", (run.id,))
            db.executemany("INSERT INTO steps VALUES (?, ?, ?, ?)", [(run.id, *step) for step in steps])
            db.execute("INSERT OR REPLACE INTO logs VALUES (?, ?)", (run.id, log))
            return True

    def runs(self) -> list[Run]:
        """All runs in the order in which they are made."""
        rows = self._db.execute(
            "SELECT id, recipe, seed, position, status, reason, attempts, started, finished, environment, result "
            "FROM runs ORDER BY position, id"
        ).fetchall()
        runs = []
        for *fields, text in rows:
            run = Run(*fields)
            if text is not None:
                run.result = json.loads(text)
                steps = self._steps(run.id)
                # RunResult's own types: a loss that was not finite is None here.
                run.result |= {"losses": [s[1] for s in steps], "step_seconds": [s[2] for s in steps]}
            runs.append(run)
        return runs

    def counts(self, seeds: Sequence[int] | None = None) -> dict[str, int]:
        """How many runs, of those with one of `seeds`, if given, have each status; dead claims count as pending."""
        with self._write() as db:
            self._void_dead_claims(db)
            asked, wanted = _of_seeds(seeds)
            query = f"SELECT status, count(*) FROM runs WHERE {asked} GROUP BY status"
            return dict(db.execute(query, wanted).fetchall())

    def log(self, run: int) -> str:
        row = self._db.execute("SELECT text FROM logs WHERE run = ?", (run,)).fetchone()
        return row[0] if row else ""

    # --- Inside ---

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:  # SQLite has rolled back by itself where the disk was full
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise StoreError(
                    f"cannot write {self.path}: {error}. What was stored is safe: mend that, and run the same command"
                ) from error
            raise

    def _open(self, uri: str, write: bool = False) -> None:
        self._db = sqlite3.connect(uri, uri=True, timeout=60, isolation_level=None)
        try:
            for attempt in range(100):
                try:
                    self._check()
                    if write:
                        self._prepare()
                    return
                except sqlite3.OperationalError as error:
                    code = getattr(error, "sqlite_errorcode", None)
                    if code is None:  # Python's own: what should be text is none
                        raise self._damaged(error) from error
                    # SQLite does not wait when two processes switch a new file to WAL at once.
                    if code & 0xFF != sqlite3.SQLITE_BUSY or attempt == 99:
                        raise
                    time.sleep(0.05)
        except BaseException:
            self._db.close()
            raise

    def _check(self) -> None:
        """Raise unless the file is empty, or an undamaged store of ours."""
        with self._read_together():
            tables = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            if not tables:
                return
            application = self._db.execute("PRAGMA application_id").fetchone()[0]
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if application != APPLICATION:
                raise StoreError(f"{self.path} is a database of something else. Choose another folder")
            if version != VERSION:
                raise StoreError(
                    f"{self.path} was written by another version (layout {version}, this one reads {VERSION}). "
                    f"Choose another folder"
                )
            found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if found != "ok":
                raise self._damaged(found)
            query = "SELECT id, recipe, seed, status, reason, result, digest FROM runs WHERE digest IS NOT NULL"
            for number, recipe, seed, status, reason, text, digest in self._db.execute(query).fetchall():
                content = (status, reason, text, self._steps(number), self.log(number))
                if _digest(recipe, seed, *content) != digest:
                    raise self._damaged(f"the record of {recipe}, seed {seed}, is not what was written")
            self._db.execute(  # a column whose name was damaged is missed now, and not in the middle of a study
                "SELECT position, owner, claimed_until, attempts, environment, started, finished FROM runs LIMIT 0"
            )
            seal = self._db.execute("SELECT value FROM study WHERE key = ?", (_SEAL,)).fetchone()
            if seal is not None:
                if seal[0] != _dump(self._facts_digest()):
                    raise self._damaged("the record of the study, its recipes and environments is not what was written")
                return
            try:  # written by an earlier version, without a digest: what can be read is believed
                self.study(), self.recipes(), self.environments()
            except ValueError as error:
                raise self._damaged(error) from error

    def _prepare(self) -> None:
        db = self._db
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA journal_mode = WAL")
        # FULL: what is committed outlives a power cut. A run takes seconds, a sync milliseconds.
        db.execute("PRAGMA synchronous = FULL")
        with self._write():
            if not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {VERSION}")
            for table in ("study", "recipes", "environments"):
                # A process of an earlier version, at the same study, writes no digest: better none than a stale one.
                when = f"WHEN NEW.key != '{_SEAL}'" if table == "study" else ""
                db.execute(
                    f"CREATE TRIGGER IF NOT EXISTS unsealed_by_{table} AFTER INSERT ON {table} {when} "
                    f"BEGIN DELETE FROM study WHERE key = '{_SEAL}'; END"
                )

    def _seal(self, db: sqlite3.Connection) -> None:
        """Keep a digest of all that is not a run: in the transaction that has changed it."""
        db.execute("INSERT OR REPLACE INTO study VALUES (?, ?)", (_SEAL, _dump(self._facts_digest())))

    def _facts_digest(self) -> str:
        content = [
            self._db.execute("SELECT key, value FROM study WHERE key != ? ORDER BY key", (_SEAL,)).fetchall(),
            self._db.execute("SELECT name, position, resolved FROM recipes ORDER BY position").fetchall(),
            self._db.execute("SELECT id, facts FROM environments ORDER BY id").fetchall(),
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @contextmanager
    def _read_together(self) -> Iterator[None]:
        """One view of the database for several reads, whatever another process writes meanwhile."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def _steps(self, run: int) -> list[tuple[int, float | None, float | None]]:
        query = "SELECT step, loss, seconds FROM steps WHERE run = ? ORDER BY step"
        return self._db.execute(query, (run,)).fetchall()

    def _void_dead_claims(self, db: sqlite3.Connection) -> None:
        query = "SELECT id, owner, claimed_until FROM runs WHERE status = 'running'"
        for number, owner, until in db.execute(query).fetchall():
            if until < time.time() or until > time.time() + 2 * LEASE_SECONDS or _is_dead(owner):
                self._clear(db, number)

    def _clear(self, db: sqlite3.Connection, number: int) -> None:
        db.execute("DELETE FROM steps WHERE run = ?", (number,))
        db.execute("DELETE FROM logs WHERE run = ?", (number,))
        db.execute(
            "UPDATE runs SET status = 'pending', reason = '', owner = NULL, claimed_until = NULL, result = NULL, "
            "digest = NULL, environment = NULL, started = NULL, finished = NULL WHERE id = ?",
            (number,),
        )

    def _damaged(self, what: object) -> StoreError:
        return StoreError(
            f"{self.path} is damaged ({what}). It was left as it is: move it away, or choose another --out"
        )


def _check_header(path: Path) -> None:
    """Refuse what is no SQLite file before SQLite touches it."""
    if not path.exists():
        return
    if not path.is_file():
        raise StoreError(f"{path} is not a file. Choose another folder")
    try:
        with path.open("rb") as file:
            header = file.read(16)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}. Choose another folder") from error
    # An empty file is what a kill leaves in the instant between making the file and its first page.
    if header and header != b"SQLite format 3\0":
        raise StoreError(
            f"{path} is damaged (it is not a SQLite file). It was left as it is: move it away, or choose another --out"
        )


def _difference(stored: dict[str, Any], asked: dict[str, Any]) -> str:
    """The first thing in which two studies differ, in words; empty if they are the same."""
    if list(stored) != list(asked):
        extra = [name for name in stored if name not in asked]
        missing = [name for name in asked if name not in stored]
        if extra or missing:
            parts = [f"it has {', '.join(extra)}"] * bool(extra) + [f"it lacks {', '.join(missing)}"] * bool(missing)
            return " and ".join(parts)
        return f"its recipes are in another order ({', '.join(stored)})"
    for name, recipe in stored.items():
        for key in sorted(recipe.keys() | asked[name].keys()):
            before, now = recipe.get(key), asked[name].get(key)
            if before != now:
                return f"{name} has {key} {json.dumps(before)}, not {json.dumps(now)}"
    return ""


def _number(values: Sequence[Any], index: int) -> float | None:
    value = values[index] if index < len(values) else None
    return float(value) if value is not None and math.isfinite(value) else None


def _of_seeds(seeds: Sequence[int] | None) -> tuple[str, tuple[int, ...]]:
    """SQL's condition for runs with one of `seeds`, any if None, and its values."""
    return ("true", ()) if seeds is None else (f"seed IN ({_marks(seeds)})", tuple(seeds))


def _marks(values: Sequence[Any]) -> str:
    """SQL's placeholders for `values`."""
    return ", ".join("?" * len(values))


def _dump(value: Any) -> str:
    """JSON with sorted keys and no NaN, so that equal things are equal text and every reader can read it."""
    return json.dumps(_plain(value), sort_keys=True, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (str, int)) or value is None:
        return value
    return str(value)


def _digest(
    recipe: str, seed: int, status: str, reason: str, result: str | None, steps: Sequence[Any], log: str
) -> str:
    content = json.dumps([recipe, seed, status, reason, result, [list(s) for s in steps], log])
    return hashlib.sha256(content.encode()).hexdigest()


def _machine() -> str:
    """What tells whether a process number means anything here: host, boot, and container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid').replace(':', '')}"
    except OSError:
        return socket.gethostname()


def _birth(pid: int) -> str:
    """When a process was started, in the kernel's ticks: tells it from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _is_dead(owner: str) -> bool:
    """True if `owner` was a process of this machine and is no more; of another machine's, nothing is known."""
    host, pid, birth = owner.rsplit(":", 2)
    if host != _machine():
        return False
    if birth:
        return _birth(int(pid)) != birth
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
