"""Ships the top-level `recipes/` inside the wheel, as `composer_speedups/recipe_data/`; all else: pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout reads recipes/ where it is
            return
        target = Path(self.build_lib) / "composer_speedups" / "recipe_data"
        shutil.rmtree(target, ignore_errors=True)  # no recipe of an older build stays behind
        for source in sorted(Path("recipes").rglob("*.yaml")):
            copy = target / source.relative_to("recipes")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


setup(cmdclass={"build_py": BuildWithRecipes})
