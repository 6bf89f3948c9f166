"""Files that are there as a whole or not at all, and never in another one's place."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["move_if_free"]


def move_if_free(temporary: str, target: Path) -> None:
    """Give the file `temporary`, of the same folder, the name `target` (and it may keep its own).

    Raises:
        FileExistsError: somebody else has made `target` meanwhile.
    """
    try:
        os.link(temporary, target)  # unlike a move, it fails if somebody made the target meanwhile
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError(target) from None
        os.replace(temporary, target)
