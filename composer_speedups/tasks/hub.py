"""What of the Hugging Face hub can be had here, found out in seconds.

The hub's own client tries five times with growing pauses before it gives up: 23 seconds for each file on
a machine without network. One plain request tells as much.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

__all__ = ["cached_file", "unreachable"]

_SECONDS = 6


@cache
def unreachable() -> str | None:
    """Why the hub cannot be asked from here; None if it answers."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # requests or httpx, as the hub's version has it: whatever fails, there is no hub
        return f"{constants.ENDPOINT} does not answer: {type(error).__name__}"
    return None


def cached_file(repository: str, name: str) -> Path | None:
    """Where a file of the hub lies in the local cache, if it does."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, name)
    return Path(found) if isinstance(found, str) else None
