"""Which files hold a pretrained model's tokenizer, and whether they can be read here."""

from __future__ import annotations

from collections.abc import Callable

from composer_speedups.installed import is_installed

__all__ = ["ANY", "PLAIN", "found", "lack"]

PLAIN = ("tokenizer.json", "vocab.txt", "vocab.json")
# Of DeBERTa-v3; of ALBERT and XLNet; of XLM-R. They are read by a package that most do without.
_SENTENCEPIECE = ("spm.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")
ANY = (*PLAIN, *_SENTENCEPIECE)


def found(is_there: Callable[[str], object]) -> tuple[bool, str | None]:
    """Whether there is a tokenizer, and what to do before it can be read, if something.

    Args:
        is_there: whether a file of that name is.
    """
    if any(map(is_there, PLAIN)):
        return True, None
    return (True, lack()) if any(map(is_there, _SENTENCEPIECE)) else (False, None)


def lack() -> str | None:
    """What to do before a SentencePiece model can be read; None if it can."""
    packages = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
    missing = [package for module, package in packages.items() if not is_installed(module)]
    return f"pip install {' '.join(missing)}" if missing else None
