"""Studies in tests see each other's runs only where a test asks for it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_SPEEDUPS_PRESENCE", str(tmp_path_factory.mktemp("presence")))
