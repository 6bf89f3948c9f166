"""Every test of the tasks has a cache of its own, and no network."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("COMPOSER_SPEEDUPS_CACHE", str(root))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return root
