"""Rows of a study, for tests of what is said and drawn of them."""

from __future__ import annotations

from typing import Any

from composer_speedups.ablation.row import Row
from composer_speedups.ablation.rows import build_rows


def study_row(recipe: str, **known: Any) -> Row:
    """A row with every field: what is not `known` is what it is of a recipe of which nothing was measured."""
    unknown = known.keys() - Row.__annotations__.keys()
    assert not unknown, f"no fields of a row: {unknown}"
    ended_well = {"status": "ok", "reason": ""} if known.get("seeds") else {}
    return build_rows({recipe: {}, "another": {}}, [], "another")[0] | ended_well | known
