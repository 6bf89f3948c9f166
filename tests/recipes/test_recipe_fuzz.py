"""Property-based tests: whatever a recipe's file holds, it loads or is refused in one line, and runs no code.

More than a thousand mutated recipes a run: text that is cut, spliced and spiced, structures whose values are replaced,
and bytes at random.
"""

from __future__ import annotations

import os
import random
import string
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_speedups.errors import RecipeError
from composer_speedups.recipes import load_recipe
from composer_speedups.recipes.files import recipe_names, suite_names
from composer_speedups.recipes.suites import load_suite

ROOT = Path(__file__).parents[2] / "recipes"
TEXTS = [(ROOT / f"{name}.yaml").read_text() for name in recipe_names()]
SUITES = [(ROOT / f"suites/{name}.yaml").read_text() for name in suite_names()]
TREES = [yaml.safe_load(text) for text in TEXTS]
EXAMPLES = {"structure": 400, "text": 350, "bytes": 150, "override": 200, "suite": 100}

# Deterministic: the same examples everywhere, and no database of failures in the working folder.
quick = dict(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
counts: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def no_code_runs(monkeypatch, tmp_path):
    """Work in an empty folder, with everything by which YAML could run code made to fail loudly."""
    monkeypatch.chdir(tmp_path)

    def trap(*arguments: Any, **keywords: Any) -> None:
        pytest.fail(f"a recipe ran code: {arguments!r}")

    monkeypatch.setattr(os, "system", trap)
    monkeypatch.setattr(os, "popen", trap)
    monkeypatch.setattr(subprocess, "Popen", trap)
    monkeypatch.setattr(yaml, "load", trap)
    monkeypatch.setattr(yaml, "unsafe_load", trap)
    monkeypatch.setattr(yaml, "full_load", trap)
    for name in ("make_python_instance", "find_python_name", "find_python_module"):
        monkeypatch.setattr(yaml.constructor.FullConstructor, name, trap)


def judge(load: Any, kind: str) -> None:
    """It loads, and what it resolves to loads again as the same; or one RecipeError of one printable line."""
    counts[f"{kind} tried"] += 1
    try:
        recipe = load()
    except RecipeError as error:
        text = str(error)
        assert text.isprintable() and text.strip() and len(text) < 2000, text
        counts[f"{kind} refused"] += 1
        return
    counts[f"{kind} loaded"] += 1
    if hasattr(recipe, "to_yaml"):
        Path("again.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        assert load_recipe("./again.yaml", check_arguments=False).to_dict() == recipe.to_dict()


def load(content: str | bytes) -> Any:
    Path("mutant.yaml").write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return load_recipe("mutant.yaml", check_arguments=False)


# ---- what is put in the place of a value

RUNS_CODE = [
    "!!python/object/apply:os.system ['touch pwned']",
    "!!python/object/new:subprocess.Popen [['touch', 'pwned']]",
    "!!python/name:os.system",
    "!!python/module:os",
    '!!python/object/apply:eval [\'open("pwned", "w")\']',
    "!!python/tuple [1, 2]",
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch pwned']",
]
numbers = st.one_of(
    st.integers(),
    st.integers(min_value=10**18, max_value=10**400),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, -1, 1e308, 5e-324, -0.0, 2**31, 2**32, 2**63, 2**64]),
)
words = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=st.characters(), max_size=12),
    st.text(alphabet="\u202e\u200b\ufeff\x85\u2028😀éß\x7f\t\n ", max_size=8),
    st.sampled_from(["", " ", "~", "null", "yes", "1e-4", "0x10", "1:30", ".nan", "on", "=", "<<", "-", "a" * 300]),
    st.sampled_from([*recipe_names(), "demo/fp32", "./mutant.yaml", "../..", "/etc/passwd", "finetune"]),
    st.sampled_from(["1ep", "10ba", "0ep", "-1ba", "1e9ep", "100000000000000000000ba", "1.5ep", "5sp", "0.1dur"]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(words, st.integers(), st.booleans()), inner, max_size=4)
    ),
    max_leaves=12,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        found += places(child, (*path, key))
    return found


def copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, list) else tree


FIELDS = ["task", "model", "batch_size", "learning_rate", "optimizer", "schedule", "duration", "speedups", "loggers"]


@st.composite
def mutated_trees(draw: Any) -> Any:
    tree = copied(draw(st.sampled_from(TREES)))
    for _ in range(draw(st.integers(1, 3))):
        there = places(tree)
        kind = draw(st.sampled_from(["replace", "remove", "add", "rename", "wrap"]))
        path = draw(st.sampled_from(there))
        owner = tree
        for key in path[:-1]:
            owner = owner[key]
        if kind == "replace":
            owner[path[-1]] = draw(values)
        elif kind == "remove" and len(there) > 1:
            del owner[path[-1]]
        elif kind == "wrap":
            owner[path[-1]] = draw(st.sampled_from([[owner[path[-1]]], {"a": owner[path[-1]]}]))
        elif isinstance(owner, dict):
            key = draw(st.one_of(st.sampled_from(FIELDS), words))
            owner[key] = owner.pop(path[-1]) if kind == "rename" else draw(values)
        if not isinstance(tree, dict) or not tree:
            return tree
    return tree


@pytest.mark.elsewhere
@settings(max_examples=EXAMPLES["structure"], **quick)
@given(tree=mutated_trees(), flow=st.sampled_from([None, True, False]))
def test_mutated_structures(tree: Any, flow: bool | None) -> None:
    judge(lambda: load(yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True)), "structure")


SPICE = [
    *RUNS_CODE,
    *["&a ", "*a", "<<: *a", "<<: {a: 1}", "!!int ", "!x ", "---\n", "...\n", "%YAML 9.9\n", "? ", ": ", "- ", "| "],
    *["[" * 50, "{a: " * 50, "]", "}", "{", "[", "'", '"', "#", "\t", "\r", "\r\n", "\0", "\x1b[31m", "\ufeff"],
    *[".nan", ".inf", "-.inf", "1e999", "9" * 400, "1_" * 40 + "1", "0o7", "0b1", "12:30:45", "2001-01-01", "~"],
    *["batch_size: 3\n", "task:\n", "  name: text\n", "extends: mutant.yaml\n", "speedups: {}\n", "- fused_adamw\n"],
    *["speedups:\n  fused_adamw: {}\n  foreach_adamw: {}\n", "loggers: {os.system: {command: ls}}\n", "x" * 3000],
    *["\ud800", ">\n"],
]


@st.composite
def mutated_texts(draw: Any) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 5))):
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 40))
        kind = draw(st.sampled_from(["spice", "cut", "double", "swap", "splice", "characters", "indent"]))
        if kind == "spice":
            text = text[:at] + draw(st.sampled_from(SPICE)) + text[at:]
        elif kind == "cut":
            text = text[:at] + text[at + length :]
        elif kind == "double":  # keys twice, too
            text = text[: at + length] + text[at:]
        elif kind == "swap":
            text = text[at:] + text[:at]
        elif kind == "splice":
            other = draw(st.sampled_from(TEXTS))
            text = text[:at] + other[draw(st.integers(0, len(other))) :]
        elif kind == "characters":
            text = text[:at] + draw(st.text(max_size=6)) + text[at + length // 8 :]
        else:
            text = text[:at] + "\n" + " " * draw(st.integers(0, 9)) + text[at:]
    return text


@settings(max_examples=EXAMPLES["text"], **quick)
@given(text=mutated_texts())
def test_mutated_texts(text: str) -> None:
    judge(lambda: load(text), "text")


@settings(max_examples=EXAMPLES["bytes"], **quick)
@given(
    data=st.one_of(st.binary(max_size=300), st.randoms(use_true_random=False)),
    text=st.sampled_from(TEXTS),
)
def test_bytes(data: bytes | random.Random, text: str) -> None:
    if isinstance(data, random.Random):  # a recipe with some bytes changed
        raw = bytearray(text.encode())
        for _ in range(data.randint(1, 8)):
            raw[data.randrange(len(raw))] = data.randrange(256)
        data = bytes(raw)
    judge(lambda: load(data), "bytes")


DOTTED = [".".join(p) for tree in TREES for p in places(tree) if all(isinstance(k, str) for k in p)]
keys = st.one_of(
    st.sampled_from(sorted(set(DOTTED))),
    st.lists(st.text(alphabet=string.ascii_lowercase + "._-", max_size=8), max_size=5).map(".".join),
    st.text(max_size=20),
)
plausible = st.one_of(
    st.integers(0, 300).map(str),
    st.floats(0, 1, exclude_min=True).map(str),
    st.sampled_from(["true", "false", "null", "2ep", "30ba", "linear", "cosine", "docstrings", "high", "bf16", "{}"]),
)
dumped = values.map(lambda value: yaml.safe_dump(value, default_flow_style=True))
written = st.one_of(plausible, plausible, words, st.sampled_from(SPICE), dumped)


@settings(max_examples=EXAMPLES["override"], **quick)
@given(name=st.sampled_from(recipe_names()), overrides=st.lists(st.tuples(keys, written), min_size=1, max_size=2))
def test_overrides(name: str, overrides: list[tuple[str, str]]) -> None:
    given = [f"{key}={value}" for key, value in overrides]
    judge(lambda: load_recipe(name, given, check_arguments=False), "override")


@settings(max_examples=EXAMPLES["suite"], **quick)
@given(
    text=st.sampled_from(SUITES), at=st.floats(0, 1), spice=st.sampled_from([*SPICE, *TEXTS]), cut=st.integers(0, 60)
)
def test_mutated_suites(text: str, at: float, spice: str, cut: int) -> None:
    place = int(at * len(text))

    def load_mutant() -> Any:
        mutant = text[:place] + spice + text[place + cut :]
        Path("suite.yaml").write_bytes(mutant.encode("utf-8", "surrogatepass"))
        return load_suite("suite.yaml", check_arguments=False)

    judge(load_mutant, "suite")


@pytest.mark.parametrize("code", RUNS_CODE)
@pytest.mark.parametrize("key", ["seed", "task", "speedups", "description", "extends", "model"])
def test_tags_that_run_code_are_refused(code: str, key: str) -> None:
    with pytest.raises(RecipeError, match="is not allowed: recipes are plain data"):
        load(f"{key}: {code}\n")
    assert os.listdir() == ["mutant.yaml"]


def test_more_than_a_thousand_were_tried_and_both_ends_seen() -> None:
    """The fuzz tells nothing unless some mutants load and some are refused. Runs last in this file."""
    if not counts:
        pytest.skip("the other tests of this file did not run in this process")
    for kind in {name.split()[0] for name in counts}:
        assert counts[f"{kind} tried"] >= EXAMPLES[kind] * 0.9, counts
        assert counts[f"{kind} refused"] >= 10, counts
    assert sum(EXAMPLES.values()) > 1000
    print(dict(counts))
