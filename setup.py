"""What pyproject.toml cannot say: the top-level `recipes/` go into the wheel, as `composer_speedups/recipe_data/`, and
LLM Foundry finds every algorithm by its key, through an entry point made for each file in `algorithms/`.
"""

from __future__ import annotations

import ast
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


def algorithm_entry_points() -> list[str]:
    """`fused_adamw = composer_speedups:FusedAdamW` for each file; the class is named as it, but for case and `_`."""
    points = []
    for file in sorted(Path(__file__).with_name("composer_speedups").joinpath("algorithms").glob("[!_]*.py")):
        classes = [n.name for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
        named = [name for name in classes if name.lower() == file.stem.replace("_", "")]
        if len(named) != 1:
            raise SystemExit(
                f"{file} must define one class named as the file is (two_words.py: TwoWords), found {classes}"
            )
        points.append(f"{file.stem} = composer_speedups:{named[0]}")
    return points


setup(
    cmdclass={"build_py": BuildWithRecipes},
    entry_points={
        "console_scripts": ["composer-speedups = composer_speedups.cli:main"],
        "llmfoundry_algorithms": algorithm_entry_points(),
    },
)
