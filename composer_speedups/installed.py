"""Which packages are installed, without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util

__all__ = ["is_installed", "version"]


def is_installed(*modules: str) -> bool:
    """Whether all of them can be found; of one inside a package, which is imported for that, also that this works.

    >>> is_installed("torch", "torch.nn"), is_installed("torch", "torch.no_such_part")
    (True, False)
    """
    try:
        return all(importlib.util.find_spec(module) is not None for module in modules)
    except Exception:  # of the package that it is in, whatever that does when it is imported
        return False


def version(package: str) -> str | None:
    """The installed version; None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
