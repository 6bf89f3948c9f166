"""Train a WordPiece tokenizer, as BERT uses, on a task's own texts: for models that bring none.

`tokenizers` numbers the letters in the order of a randomly seeded hash map, and those numbers break ties between
merges: two trainings on the same texts give two vocabularies. Here the letters are numbered beforehand, so the same
texts give the same vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

__all__ = ["SPECIAL_TOKENS", "load", "train"]

SPECIAL_TOKENS = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]",
}  # fmt: skip
# Rarer letters become [UNK]: box-drawing in sympy's docstrings alone is a hundred. Chinese has thousands, of which the
# most frequent are taken until of the texts' characters no more than so many are others, or half the vocabulary is full
# of letters: the rest is for words.
_LETTERS, _COVERED = 512, 0.9995
_PREFIX = "##"


def train(texts: Sequence[str], vocabulary: int, folder: Path) -> None:
    """Write `folder/tokenizer.json`, with at most `vocabulary` entries (fewer if the texts hold fewer)."""
    from tokenizers import trainers

    specials = list(SPECIAL_TOKENS.values())
    letters, continuing = _letters(texts, vocabulary)
    # Given as "special", letters get the numbers of their places in the list: see above.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=[*specials, *letters, *(_PREFIX + c for c in continuing)],
        initial_alphabet=letters, limit_alphabet=len(letters), continuing_subword_prefix=_PREFIX, show_progress=False,
    )  # fmt: skip
    draft = _tokenizer({name: i for i, name in enumerate(specials)})
    draft.train_from_iterator(texts, trainer)
    _tokenizer(draft.get_vocab()).save(str(folder / "tokenizer.json"))


def load(file: Path, max_length: int) -> PreTrainedTokenizerFast:
    """The trained tokenizer as transformers' own class, which any Hugging Face tool can save and load."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(file), model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],  # of one text all tokens have one type
        **SPECIAL_TOKENS,
    )  # fmt: skip


def _tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", continuing_subword_prefix=_PREFIX))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_PREFIX)
    cls, sep = vocabulary["[CLS]"], vocabulary["[SEP]"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS.values()))
    return tokenizer


def _letters(texts: Sequence[str], vocabulary: int) -> tuple[list[str], list[str]]:
    """The letters to know, and those of them that also continue words."""
    from tokenizers import normalizers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    count: Counter[str] = Counter()
    for text in texts:
        count.update(normalizer.normalize_str(text))
    ordered = sorted((c for c in count if not c.isspace()), key=lambda c: (-count[c], c))
    letters = ordered[: min(_LETTERS, (vocabulary - len(SPECIAL_TOKENS)) // 2)]
    continuing = list(letters)
    rarer = ordered[len(letters) :]
    missed, allowed = sum(count[c] for c in rarer), (1 - _COVERED) * sum(count.values())
    for c in rarer:
        # BERT's normalizer makes a word of each ideograph, which nothing continues.
        alone = normalizer.normalize_str(f"a{c}") != f"a{c}"
        if missed <= allowed or len(letters) + len(continuing) + 2 - alone > vocabulary // 2:
            break
        letters.append(c)
        continuing += [] if alone else [c]
        missed -= count[c]
    return sorted(letters), sorted(continuing)
