"""The recipe that a search ends with loads as what was found, whatever was changed on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_speedups.errors import UserError
from composer_speedups.recipes import load_recipe
from composer_speedups.recipes.files import NOT_INHERITED
from composer_speedups.recipes.written import write_recipe


def written(out: Path, base: str, overrides: list[str], **options: bool) -> str:
    recipe = load_recipe(base, overrides, check_arguments=False)
    words = {"description": "found", "evidence": ["why"], "reasons": {"batch_size": "measured"}}
    write_recipe(out, recipe, load_recipe(base, check_arguments=False), base, **words, **options)
    loaded = load_recipe(out, check_arguments=False).to_dict()
    assert {k: v for k, v in loaded.items() if k not in NOT_INHERITED} == {
        k: v for k, v in recipe.to_dict().items() if k not in NOT_INHERITED
    }
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    text = out.read_text()
    assert text.startswith("# why\n") and "# measured" in text
    return text


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch_size=16"],
        ["model.config={}"],  # as the error for weights that do not fit the configuration recommends
        ["model.config.num_hidden_layers=2"],
        ["speedups.fused_adamw=null"],
        ["speedups={}"],
        ["loggers={}"],
    ],
)
def test_says_only_what_differs(tmp_path: Path, overrides: list[str]) -> None:
    assert "extends: cpu/fastest\n" in written(tmp_path / "mine.yaml", "cpu/fastest", overrides)


@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        ("cpu/fastest", ["model.config={}", "model.config.num_hidden_layers=2"]),
        ("finetune/compile", ["speedups.torch_compile=null", "speedups.torch_compile={}"]),
    ],
)
def test_says_all_where_extends_cannot_take_away(tmp_path: Path, base: str, overrides: list[str]) -> None:
    assert "extends" not in written(tmp_path / "mine.yaml", base, overrides)
    with pytest.raises(UserError, match="exists: add --overwrite"):
        written(tmp_path / "mine.yaml", base, overrides)
    written(tmp_path / "mine.yaml", base, overrides, overwrite=True)
