"""Read docstrings out of Python files, without importing or running them.

Run as a script in a bare interpreter (`python -I -S`): a JSON list of paths comes in on stdin, and for each path a
list of its docstrings goes out on stdout. It imports the standard library only, so that a process starts in
some 30 milliseconds, and no code of the caller's (`__main__`, site packages) is ever run again in it.
"""

from __future__ import annotations

import ast
import json
import sys

__all__ = ["MIN_WORDS", "docstrings"]

MIN_WORDS = 20

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: bytes) -> list[str]:
    """The docstrings of at least `MIN_WORDS` words in `source`, in the order in which they stand there.

    >>> docstrings(b'def f():\\n    "' + b"word " * 20 + b'"')[0][:9]
    'word word'
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # templates, Python 2, generated monsters: other files have text enough
    found = []
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            text = ast.get_docstring(node)
            if text and len(text.split()) >= MIN_WORDS:
                found.append((getattr(node, "lineno", 0), text))
    # A lone surrogate, written as an escape in some docstrings, cannot be encoded by a tokenizer.
    return [t.encode("utf-8", "replace").decode() for _, t in sorted(found, key=lambda pair: pair[0])]


def _read(path: str) -> list[str]:
    try:
        with open(path, "rb") as stream:
            return docstrings(stream.read())
    except OSError:
        return []


if __name__ == "__main__":
    json.dump([_read(path) for path in json.load(sys.stdin)], sys.stdout)
