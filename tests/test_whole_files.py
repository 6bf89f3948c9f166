"""Files appear as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from composer_speedups.files import whole


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    target.write_text("old")
    with whole(target) as file:
        file.write_text("new")
        assert target.read_text() == "old" and file.suffix == ".json" and file.parent == tmp_path
    assert target.read_text() == "new" and os.listdir(tmp_path) == ["results.json"]


def test_it_has_the_rights_of_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with whole(tmp_path / "target"):
        pass
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1, "tempfile's are the user's alone"


def test_nothing_is_left_of_what_ends_with_an_error(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(KeyboardInterrupt), whole(target) as file:
        file.write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_another_ones_file_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(FileExistsError), whole(target, overwrite=False) as file:
        file.write_text("mine")
        target.write_text("somebody's, made meanwhile")
    assert target.read_text() == "somebody's, made meanwhile" and os.listdir(tmp_path) == ["target"]
