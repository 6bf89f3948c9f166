"""The store of a study: `runs.sqlite`, one SQLite file that survives being killed at any moment.

A run is claimed before it starts and its result, steps and log are written in one transaction, so a run
is either there as a whole or not at all. Claims end when their owner dies or stops renewing them, so two
processes can work on one study and neither waits for a dead one.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from composer_speedups.ablation.database import SEAL, Database, StoreError, dump, run_digest
from composer_speedups.ablation.owner import is_dead, lives_here, this_process
from composer_speedups.ablation.plan import PlannedRun
from composer_speedups.recipes.schema import changes
from composer_speedups.tasks.inputs import Mark

__all__ = ["BAD", "LEASE_SECONDS", "OPEN", "WAITING", "Run", "Store", "StoreError"]

LEASE_SECONDS = 60.0  # a claim that was not renewed for so long is void
WAITING = ("pending", "interrupted")  # for somebody to make them
OPEN = (*WAITING, "running")  # any other status, a later version's too, is how a run has ended
BAD = ("failed", "out_of_memory", "timeout")


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
        self.path, self.owner = Path(path), this_process()
        self._file = Database(self.path, create=create)
        self._db = self._file.connection

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write everything into the one file, so that it can be copied elsewhere, and let go of it."""
        self._file.close()

    # --- The study ---

    def begin(
        self,
        study: dict[str, Any],
        recipes: Sequence[tuple[str, dict[str, Any]]],
        inputs: Mapping[str, Mark] | None = None,
    ) -> None:
        """Record what is studied; if the store holds a study already, it must be the same one, on the same inputs.

        Args:
            study: facts such as `name` and `baseline`.
            recipes: name and resolved recipe, in the order of the table.
            inputs: what the recipes read from the disk, by path. A store made before these were kept has none.
        """
        now = dict(inputs or {})
        with self._file.write() as db:
            stored, known = self.recipes(), self.inputs()
            if not stored:
                rows = [(name, n, dump(recipe)) for n, (name, recipe) in enumerate(recipes)]
                db.executemany("INSERT INTO recipes VALUES (?, ?, ?)", rows)
                db.executemany("INSERT INTO study VALUES (?, ?)", [(k, dump(v)) for k, v in study.items()])
                self._keep(db, now)
                return
            difference = _difference(stored, {name: json.loads(dump(r)) for name, r in recipes})
            before = self.study().get("baseline")
            if not difference and before != study.get("baseline"):
                difference = f"its baseline is {before}"
            if other := [path for path, mark in now.items() if path in known and known[path].content != mark.content]:
                difference = difference or f"{other[0]} has changed since it began"
            if difference:
                raise StoreError(
                    f"{self.path.parent} holds another study: {difference}. Choose another --out, or remove that folder"
                )
            if now:
                self._keep(db, known | now)

    def study(self) -> dict[str, Any]:
        rows = self._db.execute("SELECT key, value FROM study WHERE key != ?", (SEAL,)).fetchall()
        return {key: json.loads(value) for key, value in rows}

    def inputs(self) -> dict[str, Mark]:
        """What the study's runs read from the disk, by path, as it is to stay."""
        stored = self.study().get("inputs", {})
        keys = [one.name for one in fields(Mark)]  # a later version may say more
        return {path: Mark(**{k: v for k, v in facts.items() if k in keys}) for path, facts in stored.items()}

    def note(self, **facts: Any) -> None:
        """Add facts to the study, or change them."""
        with self._file.write() as db:
            rows = [(key, dump(value)) for key, value in facts.items()]
            db.executemany("INSERT OR REPLACE INTO study VALUES (?, ?)", rows)
            self._file.seal()

    def recipes(self) -> dict[str, dict[str, Any]]:
        """Resolved recipes by name, in the order of the table."""
        rows = self._db.execute("SELECT name, resolved FROM recipes ORDER BY position").fetchall()
        return {name: json.loads(resolved) for name, resolved in rows}

    def add_environment(self, facts: dict[str, Any]) -> int:
        """Store an environment once; its number goes with the runs made in it."""
        with self._file.write() as db:
            db.execute("INSERT OR IGNORE INTO environments (facts) VALUES (?)", (dump(facts),))
            self._file.seal()
            return db.execute("SELECT id FROM environments WHERE facts = ?", (dump(facts),)).fetchone()[0]

    def environments(self) -> dict[int, dict[str, Any]]:
        rows = self._db.execute("SELECT id, facts FROM environments ORDER BY id").fetchall()
        return {number: json.loads(facts) for number, facts in rows}

    # --- Runs ---

    def plan(self, runs: Sequence[PlannedRun]) -> None:
        """Add the runs that are not there yet, after those that are."""
        with self._file.write() as db:
            first = db.execute("SELECT coalesce(max(position) + 1, 0) FROM runs").fetchone()[0]
            db.executemany(
                "INSERT OR IGNORE INTO runs (recipe, seed, position) VALUES (?, ?, ?)",
                [(run.recipe, run.seed, first + run.position) for run in runs],
            )

    def skip(self, recipe: str, reason: str) -> None:
        """Settle all open runs of `recipe` as skipped."""
        with self._file.write() as db:
            open_runs = db.execute(
                f"SELECT id, recipe, seed FROM runs WHERE recipe = ? AND status IN ({_marks(WAITING)})",
                (recipe, *WAITING),
            ).fetchall()
            for number, name, seed in open_runs:
                self._clear(db, number)  # what an interrupted run has left
                digest = run_digest(name, seed, "skipped", reason, None, [], "")
                db.execute(
                    "UPDATE runs SET status = 'skipped', reason = ?, finished = ?, digest = ? WHERE id = ?",
                    (reason, time.time(), digest, number),
                )

    def retry(
        self,
        seeds: Sequence[int] | None = None,
    ) -> int:
        """Forget how runs ended that were skipped or `BAD`, so that they are made again; return how many.

        Of those with one of `seeds`, if given.
        """
        statuses = (*BAD, "skipped")
        with self._file.write() as db:
            asked, wanted = _of_seeds(seeds)
            query = f"SELECT id FROM runs WHERE status IN ({_marks(statuses)}) AND {asked}"
            ids = [row[0] for row in db.execute(query, (*statuses, *wanted))]
            for number in ids:
                self._clear(db, number)
            return len(ids)

    def claim(self, environment: int | None = None, seeds: Sequence[int] | None = None) -> Run | None:
        """Take the next run that nobody has, of those with one of `seeds`, if given; None if none is left to take."""
        with self._file.write() as db:
            self._void_dead_claims(db)
            asked, wanted = _of_seeds(seeds)
            row = db.execute(
                f"SELECT id, recipe, seed, position, attempts FROM runs WHERE status IN ({_marks(WAITING)}) "
                f"AND {asked} ORDER BY position LIMIT 1",
                (*WAITING, *wanted),
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

    def shared(self) -> bool:
        """Whether another process of this machine is at a run of this study."""
        rows = self._db.execute("SELECT owner FROM runs WHERE status = 'running' AND owner != ?", (self.owner,))
        return any(lives_here(owner) for (owner,) in rows.fetchall())

    def renew(self, run: Run) -> bool:
        """Keep a claim; False if it was lost to another process."""
        with self._file.write() as db:
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
        text = dump(result) if result else None
        if status == "interrupted":  # of no use to anybody: it will be made again
            text, steps = None, []
        digest = run_digest(run.recipe, run.seed, status, reason, text, steps, log)
        with self._file.write() as db:
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

    def amend(self, run: Run, changes: dict[str, Any], log: str = "", *, warned: str) -> bool:
        """Put `changes` into the result of a run that has ended, and `log` behind its log; False if it has none.

        Their warnings come to those that there are, but for those that begin with `warned`.
        """
        with self._file.write() as db:
            row = db.execute("SELECT status, reason, result FROM runs WHERE id = ?", (run.id,)).fetchone()
            if row is None or row[2] is None:
                return False
            status, reason, text = row
            result = json.loads(text)
            kept = [w for w in result.get("warnings") or [] if not w.startswith(warned)]
            result |= changes | {"warnings": kept + changes.get("warnings", [])}
            text, log = dump(result), self._file.log(run.id) + log
            digest = run_digest(run.recipe, run.seed, status, reason, text, self._file.steps(run.id), log)
            db.execute("UPDATE runs SET result = ?, digest = ? WHERE id = ?", (text, digest, run.id))
            db.execute("INSERT OR REPLACE INTO logs VALUES (?, ?)", (run.id, log))
            return True

    def runs(self) -> list[Run]:
        """All runs in the order in which they are made."""
        rows = self._db.execute(
            "SELECT id, recipe, seed, position, status, reason, attempts, started, finished, environment, result "
            "FROM runs ORDER BY position, id"
        ).fetchall()
        runs = []
        for *values, text in rows:
            run = Run(*values)
            if text is not None:
                run.result = json.loads(text)
                steps = self._file.steps(run.id)
                # RunResult's own types: a loss that was not finite is None here.
                run.result |= {"losses": [s[1] for s in steps], "step_seconds": [s[2] for s in steps]}
            runs.append(run)
        return runs

    def counts(self, seeds: Sequence[int] | None = None) -> dict[str, int]:
        """How many runs, of those with one of `seeds`, if given, have each status; dead claims count as pending."""
        with self._file.write() as db:
            self._void_dead_claims(db)
            asked, wanted = _of_seeds(seeds)
            query = f"SELECT status, count(*) FROM runs WHERE {asked} GROUP BY status"
            return dict(db.execute(query, wanted).fetchall())

    def log(self, run: int) -> str:
        return self._file.log(run)

    # --- Inside ---

    def _keep(self, db: sqlite3.Connection, inputs: Mapping[str, Mark]) -> None:
        facts = {path: asdict(mark) for path, mark in inputs.items()}
        db.execute("INSERT OR REPLACE INTO study VALUES (?, ?)", ("inputs", dump(facts)))
        self._file.seal()

    def _void_dead_claims(self, db: sqlite3.Connection) -> None:
        query = "SELECT id, owner, claimed_until FROM runs WHERE status = 'running'"
        for number, owner, until in db.execute(query).fetchall():
            if until < time.time() or until > time.time() + 2 * LEASE_SECONDS or is_dead(owner):
                self._clear(db, number)

    def _clear(self, db: sqlite3.Connection, number: int) -> None:
        db.execute("DELETE FROM steps WHERE run = ?", (number,))
        db.execute("DELETE FROM logs WHERE run = ?", (number,))
        db.execute(
            "UPDATE runs SET status = 'pending', reason = '', owner = NULL, claimed_until = NULL, result = NULL, "
            "digest = NULL, environment = NULL, started = NULL, finished = NULL WHERE id = ?",
            (number,),
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
        for key, before, now in changes(recipe, asked[name]):
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
