"""From texts to token ids, a thousand at a time, so that whoever waits sees that it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer_speedups.errors import TaskError
from composer_speedups.ignored import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encoding"]

_ROWS_AT_ONCE = 1000

Rows = list[list[int]]


@dataclass(frozen=True)
class Encoding:
    """How texts are cut into tokens.

    Attributes:
        tokenizer: the model's.
        length: tokens of a sample, at most, special ones included.
        what: is done, in words.
        say: is told how far it is.
    """

    tokenizer: PreTrainedTokenizerBase
    length: int
    what: str
    say: Callable[[str], None]

    def texts(self, texts: Sequence[str], pairs: Sequence[str] | None) -> tuple[Rows, Rows | None]:
        """The ids of texts, or of pairs, of which the longer one is cut first; and of pairs the types."""
        rows: Rows = []
        types: Rows = []
        for some in self._parts(len(texts)):
            made = self.tokenizer(
                texts[some], None if pairs is None else pairs[some], truncation=True, max_length=self.length,
                return_attention_mask=False, return_token_type_ids=pairs is not None,
            )  # fmt: skip
            rows += made["input_ids"]
            types += made["token_type_ids"] if pairs is not None else []
        return rows, types if pairs is not None else None

    def words(self, texts: Sequence[str], labels: Sequence[Sequence[int]]) -> tuple[Rows, Rows]:
        """The ids of texts of words with one space between, and a label for each id.

        A word's first token has its label, and its others `IGNORED`, so that each word counts once.
        """
        if not self.tokenizer.is_fast:
            raise TaskError(
                f"{type(self.tokenizer).__name__} does not tell which tokens are a word's: token_classification needs "
                "a model with a fast tokenizer (a tokenizer.json)"
            )
        rows: Rows = []
        of_tokens: Rows = []
        for some in self._parts(len(texts)):
            made = self.tokenizer(
                [text.split(" ") for text in texts[some]], is_split_into_words=True, truncation=True,
                max_length=self.length, return_attention_mask=False, return_token_type_ids=False,
            )  # fmt: skip
            rows += made["input_ids"]
            for n, of_words in enumerate(labels[some]):
                places = made.word_ids(n)
                before = [None, *places[:-1]]
                of_tokens.append(
                    [
                        IGNORED if word is None or word == last else of_words[word]
                        for word, last in zip(places, before, strict=True)
                    ]
                )
        return rows, of_tokens

    def _parts(self, count: int) -> Iterator[slice]:
        for start in range(0, count, _ROWS_AT_ONCE):
            self.say(f"{self.what}: {start:,} of {count:,} texts")
            yield slice(start, start + _ROWS_AT_ONCE)
