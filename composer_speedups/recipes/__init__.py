"""Recipes: named YAML files that say what is trained, with which speed-ups, batch size and learning rate.

`recipe.py` loads one, `schema.py` says what it may say, `files.py`, `merge.py` and `yaml.py` read it, `written.py`
writes one that was searched for, and `suites.py` puts several into a table. Imports neither torch nor Composer.
"""

from composer_speedups.recipes.recipe import (
    Recipe,
    check_speedups,
    finish,
    load_recipe,
    load_recipes,
    make_recipe,
    plain_speedups,
    validated,
)

__all__ = [
    "Recipe",
    "check_speedups",
    "finish",
    "load_recipe",
    "load_recipes",
    "make_recipe",
    "plain_speedups",
    "validated",
]
