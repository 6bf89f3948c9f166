"""What a recipe or a suite is refused with."""

from __future__ import annotations

import pytest

from composer_speedups.errors import ConflictError, RecipeError
from composer_speedups.recipes import load_recipe


def refusal(*args, loader=load_recipe, **kwargs) -> str:
    """The message of the one-line error that loading gives."""
    with pytest.raises((RecipeError, ConflictError)) as caught:
        loader(*args, **{"check_arguments": False} | kwargs)
    message = str(caught.value)
    assert message.isprintable(), "an error is one line, and cannot control the terminal"
    assert len(message) < 700
    return message
