"""The command in a report and in a recipe's comments does what the one that was typed had done."""

from __future__ import annotations

import shlex

import pytest
from typer.main import get_command

from composer_speedups.cli import app
from composer_speedups.commands.typed import typed


def words(*given: str, settled: dict | None = None) -> list[str]:
    """What is told of `composer-speedups GIVEN`, as a shell would read it again."""
    group = get_command(app)
    with group.make_context("composer-speedups", list(given), obj=list(given)) as parent:
        name = given[given[0] == "--"]
        rest = list(given[given.index(name) + 1 :])
        with group.commands[name].make_context(name, rest, parent=parent) as context:
            told = shlex.split(typed(context, settled or {}, without=("--retry", "--dry-run")))
    assert told[:2] == ["composer-speedups", name]
    return told[2:]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("demo --retry --seeds 3 --dry-run", "demo --seeds 3"),
        ("--seeds=3 demo", "--seeds=3 demo"),
        ("demo", "demo --seeds 1"),
        ("--no-profile demo --profile --out 'a b'", "--no-profile demo --profile --out 'a b' --seeds 1"),
        ("'description=it'\\''s $HOME\n' demo --retry", "'description=it'\\''s $HOME\n' demo --seeds 1"),
        ("demo --out --retry", "demo --out --retry --seeds 1"),
        ("--out=--retry demo", "--out=--retry demo --seeds 1"),
        ("--retry -- --retry --dry-run", "--seeds 1 -- --retry --dry-run"),
        ("demo --out -- --retry", "demo --out -- --seeds 1"),
        ("ablate --seeds 2", "ablate --seeds 2"),
    ],
)
def test_the_words_are_those_typed(given: str, told: str):
    assert words("ablate", *shlex.split(given), settled={"--seeds": 1}) == shlex.split(told)
    assert words("--", "ablate", *shlex.split(given), settled={"--seeds": 1}) == shlex.split(told)


@pytest.mark.parametrize("name", ["ablate", "tune", "recommend"])
def test_every_option_is_told(name: str):
    """So a new one needs no line of its own."""
    given = ["demo/fp32"] if name != "recommend" else ["max_length=8"]
    values = {"memory_limit": "1GB", "goal": "fastest"}
    flags = set()
    for option in get_command(app).commands[name].params:
        if option.param_type_name == "option":
            given.append((option.secondary_opts or option.opts)[0])
            flags |= {given[-1]} if option.is_flag else set()
            given += [] if option.is_flag else [values.get(option.name, "7")]
    assert len(flags) < len(given) - 5
    assert words(name, *given) == [word for word in given if word not in ("--retry", "--dry-run")]
