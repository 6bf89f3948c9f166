"""Training speed-ups for BERT-like models as MosaicML Composer algorithms.

Classes and functions are imported when first used: `from composer_speedups import FusedAdamW` loads one
file, and `import composer_speedups` loads neither torch nor Composer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_speedups import registry

if TYPE_CHECKING:
    from composer_speedups.recipes import load_recipe as load_recipe
    from composer_speedups.registry import build as build
    from composer_speedups.speedup import algorithm_passes as algorithm_passes
    from composer_speedups.verification.verify import verify as verify

__version__ = "0.1.0"

_LAZY = {
    "SpeedUp": "speedup",
    "algorithm_passes": "speedup",
    "build": "registry",
    "load_recipe": "recipes",
    "verify": "verification.verify",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "__all__":  # for `import *`: as discovered, none listed by hand
        return [public for public in __dir__() if not public.startswith("_")]
    if name in _LAZY:
        return getattr(importlib.import_module(f"composer_speedups.{_LAZY[name]}"), name)
    if name.startswith("apply_") and name.removeprefix("apply_") in registry.keys():
        return registry.function(name.removeprefix("apply_"))
    # A class is named as its key is, but for case and underscores: FusedAdamW, fused_adamw.
    for key in registry.keys():
        if key.replace("_", "") == name.lower():
            cls = registry.speedup_class(key)
            if cls.__name__ == name:
                return cls
    raise AttributeError(f"module 'composer_speedups' has no attribute {name!r}")


def __dir__() -> list[str]:
    classes = [registry.speedup_class(key).__name__ for key in registry.keys()]
    return sorted([*_LAZY, *classes, *(f"apply_{key}" for key in registry.keys()), "__version__"])
