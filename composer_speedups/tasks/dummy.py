"""Random tokens of a stated length distribution: for throughput alone, there is nothing to learn in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from composer_speedups.errors import TaskError
from composer_speedups.tasks import model_sources, wordpiece
from composer_speedups.tasks.data import TokenDataset
from composer_speedups.tasks.spec import ModelSpec, TaskSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["build"]

_DEFAULT_SAMPLES = 8000
_SHORTEST = 3  # [CLS], one token, [SEP]


def build(
    spec: TaskSpec, source: model_sources.Source, model: ModelSpec
) -> tuple[PreTrainedTokenizerFast, TokenDataset, TokenDataset]:
    """Tokenizer, training and evaluation samples, the same for the same `spec.data_seed`.

    Lengths are normal with `spec.mean_length` and `spec.length_std`, rounded, and cut to 3 .. `max_length`.
    Ids are uniform in `lowest_token` .. `vocabulary` - 1, special ids left out. Labels are uniform, of regression from
    0 to 1.
    """
    if source.tokenizer:
        tokenizer = model_sources.load_tokenizer(source)
        size = spec.vocabulary or len(tokenizer)
    else:
        size = spec.vocabulary or int(model.config.get("vocab_size") or model_sources.entries(source))
        tokenizer = _placeholder(size, spec.max_length)
    ids = np.setdiff1d(np.arange(spec.lowest_token, size), tokenizer.all_special_ids)
    if len(ids) < 2:
        raise TaskError(f"task.lowest_token {spec.lowest_token} leaves no ids below {size:,}: lower it")
    random = np.random.Generator(np.random.Philox(spec.data_seed))
    ends = tokenizer.cls_token_id, model_sources.end_of(tokenizer)
    parts = [_part(n or _DEFAULT_SAMPLES, spec, ids, ends, random) for n in (spec.train_samples, spec.eval_samples)]
    return tokenizer, parts[0], parts[1]


def _part(
    rows: int, spec: TaskSpec, ids: np.ndarray, ends: tuple[int, int], random: np.random.Generator
) -> TokenDataset:
    lengths = np.full(rows, spec.max_length, np.int64)
    if spec.mean_length is not None:
        drawn = np.rint(random.normal(spec.mean_length, spec.length_std, rows))
        lengths = np.clip(drawn, _SHORTEST, spec.max_length).astype(np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    flat = ids[random.integers(0, len(ids), int(offsets[-1]))].astype(np.int32)
    flat[offsets[:-1]], flat[offsets[1:] - 1] = ends
    return TokenDataset(flat, offsets, _labels(spec, rows, len(flat), random))


def _labels(spec: TaskSpec, rows: int, tokens: int, random: np.random.Generator) -> np.ndarray:
    if spec.objective == "regression":
        return random.random(rows, np.float32)
    if spec.objective == "multi_label":
        return random.integers(0, 2, (rows, spec.num_labels)).astype(np.float32)
    return random.integers(0, spec.num_labels, tokens if spec.objective == "token_classification" else rows)


def _placeholder(size: int, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose entries are their own numbers, so that a dummy run can be saved like any other."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = list(wordpiece.SPECIAL_TOKENS.values())
    entries = {token: i for i, token in enumerate(special)}
    entries |= {str(i): i for i in range(len(special), size)}
    tokenizer = Tokenizer(WordLevel(entries, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"], **wordpiece.SPECIAL_TOKENS,
    )  # fmt: skip
