"""A copy of a study's store: whole, also while another process writes, and nothing in the folder is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_speedups.ablation.aside import STORE, copied_aside
from composer_speedups.ablation.plan import PlannedRun
from composer_speedups.ablation.store import Store, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    folder = tmp_path / "a study"
    folder.mkdir()
    store = Store(folder / STORE)
    store.begin({"name": "x", "baseline": "base"}, [("base", {"batch_size": 8})])
    return store


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def runs_in_copy(folder: Path) -> int:
    with copied_aside(folder) as aside, Store(aside / STORE, create=False) as copy:
        copy.plan([PlannedRun("base", 99, 0)])  # a copy may be written to
        return len(copy.runs()) - 1


def test_what_is_copied_stays_as_it_is(store: Store) -> None:
    store.plan([PlannedRun("base", 1, 0)])
    store.close()
    folder = store.path.parent
    before = contents(folder)
    assert list(before) == [STORE]
    assert runs_in_copy(folder) == 1
    assert contents(folder) == before


def test_runs_of_a_process_that_is_at_it_are_there(store: Store) -> None:
    folder = store.path.parent
    store.plan([PlannedRun("base", 1, 0), PlannedRun("base", 2, 1)])
    assert f"{STORE}-wal" in contents(folder)  # so not all is in the one file
    assert runs_in_copy(folder) == 2
    store.plan([PlannedRun("base", 3, 2)])  # which goes on undisturbed
    assert runs_in_copy(folder) == 3
    store.close()


def test_nothing_is_left_beside_a_file_that_nobody_uses(store: Store) -> None:
    store.plan([PlannedRun("base", 1, 0)])
    store.close()
    folder = store.path.parent
    (folder / f"{STORE}-wal").write_bytes(b"garbage" * 1000)
    before = contents(folder)
    assert runs_in_copy(folder) == 1
    assert contents(folder) == before


def test_no_study_gives_an_empty_folder(tmp_path: Path) -> None:
    with copied_aside(tmp_path / "none") as aside:
        assert not list(aside.iterdir())
    assert not aside.exists()


@pytest.mark.parametrize("beside", [(), ("-wal",), ("-wal", "-shm")], ids=["at rest", "a file left", "in use"])
def test_what_is_damaged_is_copied_for_the_store_to_judge(tmp_path: Path, beside: tuple[str, ...]) -> None:
    (tmp_path / STORE).write_bytes(b"SQLite format 3\0" + b"?" * 4096)
    for end in beside:
        (tmp_path / (STORE + end)).write_bytes(b"?")
    before = contents(tmp_path)
    with copied_aside(tmp_path) as aside:
        assert contents(aside)[STORE] == before[STORE]
        with pytest.raises(StoreError):
            Store(aside / STORE, create=False)
    assert contents(tmp_path)[STORE] == before[STORE]
