"""Where data, models and kernels that were made once are kept."""

from __future__ import annotations

import os
from pathlib import Path

from composer_speedups.errors import UserError

__all__ = ["cache_root"]


def cache_root() -> Path:
    """`$COMPOSER_SPEEDUPS_CACHE`, else `~/.cache/composer_speedups` (or below `$XDG_CACHE_HOME`).

    Raises:
        UserError: nobody knows the home folder that this is in.
    """
    if own := os.environ.get("COMPOSER_SPEEDUPS_CACHE"):
        if (folder := os.path.expanduser(own)).startswith("~"):
            raise UserError(f"COMPOSER_SPEEDUPS_CACHE is {own!r}, a home that nobody has: set it to a folder")
        return Path(folder)
    general = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(general) if general else Path.home() / ".cache") / "composer_speedups"
    except RuntimeError as error:  # a user without a name, as containers run them
        raise UserError("nobody knows your home folder: set HOME, or COMPOSER_SPEEDUPS_CACHE to a folder") from error
