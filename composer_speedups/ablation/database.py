"""The file of a study: SQLite, opened, checked, and written in whole transactions.

A file that is damaged, of something else or of another version is refused, and left byte for byte as it is.
Each finished run carries a digest, and so does what the study is about: SQLite checks its pages' structure,
not that they say what was written. What has no digest, or comes from a later version, must at least be of the
shape that is read: whoever reads a store need not look again.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from composer_speedups.errors import UserError
from composer_speedups.measurement.results import RunResult

__all__ = ["SEAL", "Database", "StoreError", "dump", "run_digest"]

APPLICATION = 0x43535055  # "CSPU": SQLite's application_id of our files
VERSION = 1
_LEAST_FREE = 2**16  # bytes: with fewer SQLite makes no file beside the store
SEAL = "digest"  # the key, in the table of the study, of the digest of everything but the runs

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


class Database:
    """Open (or make) the file at `path`.

    Args:
        path: the SQLite file.
        create: make it if it is not there.

    Raises:
        StoreError: what is at `path` is no file of ours, or a damaged one. It is left as it is.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = Path(path)
        if not create and not self.path.is_file():
            raise StoreError(f"no study in {self.path.parent}: {self.path.name} is not there")
        _check_header(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # First a look that cannot write: a damaged file stays as it is, byte for byte.
            if self.path.exists() and self.path.stat().st_size:
                self._open(f"{self.path.absolute().as_uri()}?mode=ro")
                self.connection.close()
            self._open(f"{self.path.absolute().as_uri()}?mode=rwc", write=True)
        except (sqlite3.OperationalError, OSError) as error:
            raise StoreError(
                f"cannot open {self.path}: {self._why(error)}. Choose another folder; `report --no-write` looks at one "
                "that cannot be written to"
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        """Write everything into the one file, so that it can be copied elsewhere, and let go of it."""
        with suppress(sqlite3.Error):  # another process is at it: the last one to close does it
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.connection.close()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all that is done within is written, or nothing."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:  # SQLite has rolled back by itself where the disk was full
                self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise StoreError(
                    f"cannot write {self.path}: {self._why(error)}. What was stored is safe: mend that, and run the "
                    "same command"
                ) from error
            raise

    def _why(self, error: Exception) -> str:
        """What SQLite says; of a full disk it says "disk I/O error" where it was about to make a file."""
        with suppress(OSError):
            if isinstance(error, sqlite3.OperationalError) and shutil.disk_usage(self.path.parent).free < _LEAST_FREE:
                return "the disk is full"
        return str(error)

    def seal(self) -> None:
        """Keep a digest of all that is not a run: in the transaction that has changed it."""
        self.connection.execute("INSERT OR REPLACE INTO study VALUES (?, ?)", (SEAL, dump(self._facts_digest())))

    def steps(self, run: int) -> list[tuple[int, float | None, float | None]]:
        query = "SELECT step, loss, seconds FROM steps WHERE run = ? ORDER BY step"
        return self.connection.execute(query, (run,)).fetchall()

    def log(self, run: int) -> str:
        row = self.connection.execute("SELECT text FROM logs WHERE run = ?", (run,)).fetchone()
        return row[0] if row else ""

    def _open(self, uri: str, write: bool = False) -> None:
        self.connection = sqlite3.connect(uri, uri=True, timeout=60, isolation_level=None)
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
            self.connection.close()
            raise

    def _check(self) -> None:
        """Raise unless the file is empty, or an undamaged store of ours."""
        db = self.connection
        with self._read_together():
            tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
            if not tables:
                return
            application = db.execute("PRAGMA application_id").fetchone()[0]
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if application != APPLICATION:
                raise StoreError(f"{self.path} is a database of something else. Choose another folder")
            if version != VERSION:
                raise StoreError(
                    f"{self.path} was written by another version (layout {version}, this one reads {VERSION}). "
                    f"Choose another folder"
                )
            found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if found != "ok":
                raise self._damaged(found)
            query = "SELECT id, recipe, seed, status, reason, result, digest FROM runs WHERE digest IS NOT NULL"
            for number, recipe, seed, status, reason, text, digest in db.execute(query).fetchall():
                content = (status, reason, text, self.steps(number), self.log(number))
                if run_digest(recipe, seed, *content) != digest:
                    raise self._damaged(f"the record of {recipe}, seed {seed}, is not what was written")
            db.execute(  # a column whose name was damaged is missed now, and not in the middle of a study
                "SELECT position, owner, claimed_until, attempts, environment, started, finished FROM runs LIMIT 0"
            )
            seal = db.execute("SELECT value FROM study WHERE key = ?", (SEAL,)).fetchone()
            if seal is not None and seal[0] != dump(self._facts_digest()):
                raise self._damaged("the record of the study, its recipes and environments is not what was written")
            try:  # without a digest it is of an earlier version: what can be read is believed
                wrong = self._misshapen()
            except ValueError as error:
                raise self._damaged(error) from error
            if wrong:
                raise self._damaged(wrong, ", or of another version")

    def _misshapen(self) -> str:
        """What is not as this version reads it, in words: a reference to nothing, or a value of another type."""
        db = self.connection
        for table, _, missing, _ in db.execute("PRAGMA foreign_key_check"):
            return f"its {table} refer to {missing} that are not there"
        study = {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM study")}
        rows = db.execute("SELECT name, position, resolved FROM recipes").fetchall()
        recipes = {name: json.loads(text) for name, _, text in rows}
        baseline = study.get("baseline")
        if recipes and (not isinstance(baseline, str) or baseline not in recipes):
            return "its baseline is none of its recipes"
        facts = {str(number): json.loads(text) for number, text in db.execute("SELECT id, facts FROM environments")}
        tables = {"its": {key: study.get(key) or {} for key in ("inputs", "peaks")}}
        for what, known in (tables | {"recipe": recipes, "environment": facts}).items():
            for name, one in known.items():
                if not isinstance(one, dict):
                    return f"{what} {name} is {str(one)[:40]!r}"
        types = get_type_hints(RunResult)
        for recipe, seed, text in db.execute("SELECT recipe, seed, result FROM runs WHERE result IS NOT NULL"):
            result = json.loads(text)
            if not isinstance(result, dict):
                return f"the result of {recipe}, seed {seed}, is none"
            for key, hint in types.items():
                if not _fits(result.get(key), hint):
                    return f"{key} of {recipe}, seed {seed}, is {str(result[key])[:40]!r}"
        return ""

    def _prepare(self) -> None:
        db = self.connection
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA journal_mode = WAL")
        # FULL: what is committed outlives a power cut. A run takes seconds, a sync milliseconds.
        db.execute("PRAGMA synchronous = FULL")
        with self.write():
            if not db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    db.execute(statement)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {VERSION}")
            for table in ("study", "recipes", "environments"):
                # A process of an earlier version, at the same study, writes no digest: better none than a stale one.
                when = f"WHEN NEW.key != '{SEAL}'" if table == "study" else ""
                db.execute(
                    f"CREATE TRIGGER IF NOT EXISTS unsealed_by_{table} AFTER INSERT ON {table} {when} "
                    f"BEGIN DELETE FROM study WHERE key = '{SEAL}'; END"
                )

    def _facts_digest(self) -> str:
        content = [
            self.connection.execute("SELECT key, value FROM study WHERE key != ? ORDER BY key", (SEAL,)).fetchall(),
            self.connection.execute("SELECT name, position, resolved FROM recipes ORDER BY position").fetchall(),
            self.connection.execute("SELECT id, facts FROM environments ORDER BY id").fetchall(),
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @contextmanager
    def _read_together(self) -> Iterator[None]:
        """One view of the database for several reads, whatever another process writes meanwhile."""
        self.connection.execute("BEGIN")
        try:
            yield
        finally:
            self.connection.execute("ROLLBACK")

    def _damaged(self, what: object, or_else: str = "") -> StoreError:
        return StoreError(
            f"{self.path} is damaged{or_else} ({what}). It was left as it is: move it away, or choose another --out"
        )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that was JSON is of the type that a field of `RunResult` has, as far as it is data.

    >>> _fits([1, 2.5, None], list[float]), _fits("fast", float | None), _fits(math.inf, float), _fits(True, int)
    (True, False, False, False)
    """
    if value is None or hint is Any:  # a number that was not finite is null
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    if origin is Literal:
        return isinstance(value, str)
    if hint in (int, float):
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return isinstance(value, hint)


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


def dump(value: Any) -> str:
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


def run_digest(
    recipe: str, seed: int, status: str, reason: str, result: str | None, steps: Sequence[Any], log: str
) -> str:
    """The digest of how a run ended, to find a record that is not what was written."""
    content = json.dumps([recipe, seed, status, reason, result, [list(s) for s in steps], log])
    return hashlib.sha256(content.encode()).hexdigest()
