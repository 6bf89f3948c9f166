"""What a new file in `algorithms/` may have forgotten is said with what to write."""

from __future__ import annotations

import sys
import types

import pytest

from composer_speedups import registry

WHOLE = """
from composer_speedups.speedup import SpeedUp, Stage

def apply_two_words(model):
    return 0

class TwoWords(SpeedUp):
    stage = Stage.NORM

    def install(self, state, logger):
        self.report(logger, apply_two_words(state.model), "nothing is there")
"""


@pytest.fixture
def define(monkeypatch: pytest.MonkeyPatch):
    """Let `algorithms/two_words.py` be this text."""

    def define(text: str) -> type:
        name = "composer_speedups.algorithms.two_words"
        module = types.ModuleType(name)
        module.__file__ = "two_words.py"
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(registry, "keys", lambda: ("two_words",))
        exec(text, vars(module))
        return registry.speedup_class.__wrapped__("two_words")  # what is remembered is the real ones'

    return define


def test_a_whole_one_is_found(define) -> None:
    assert define(WHOLE).__name__ == "TwoWords"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("TwoWords", "Two_Words_", "must have the file's name, such as TwoWords, not Two_Words_"),
        ("TwoWords", "_TwoWords", "must define exactly one public SpeedUp"),
        ("stage = Stage.NORM", "slot = 'norm'", "set `stage`, when it acts, to one of DATA, PRECISION"),
        ("apply_two_words", "apply_twowords", "must define the function apply_two_words"),
    ],
)
def test_what_is_missing_is_said(old: str, new: str, said: str, define) -> None:
    with pytest.raises(registry.NotASpeedUp, match=f"^two_words.py.*{said}"):
        define(WHOLE.replace(old, new))


def test_what_regroups_is_known_without_importing_it() -> None:
    classes = {key: registry.speedup_class(key) for key in registry.keys()}
    assert registry.regrouping() == {key for key, cls in classes.items() if cls.regroups}
    assert registry.regrouping() == {key for key, cls in classes.items() if cls.slot == "batches"}


def test_a_star_import_brings_every_speed_up() -> None:
    names: dict[str, object] = {}
    exec("from composer_speedups import *", names)
    keys = registry.keys()
    assert len(keys) > 20
    assert all(names[registry.speedup_class(key).__name__] is registry.speedup_class(key) for key in keys)
    assert all(names[f"apply_{key}"] is registry.function(key) for key in keys)
    assert {"SpeedUp", "algorithm_passes", "build", "load_recipe"} <= names.keys()
