"""`build_task`: from what a recipe says to data sets, tokenizer and collators."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from composer_speedups.errors import TaskError
from composer_speedups.ignored import IGNORED
from composer_speedups.installed import version
from composer_speedups.tasks import docstrings, dummy, files, hub_texts, imdb, model_sources, wordpiece
from composer_speedups.tasks.cache import cached, digest
from composer_speedups.tasks.data import Lengths, MaskCollator, PadCollator, TokenDataset, TokenLabelCollator
from composer_speedups.tasks.encoding import Encoding
from composer_speedups.tasks.labels import majority, shares
from composer_speedups.tasks.objectives import OBJECTIVES
from composer_speedups.tasks.spec import ModelSpec, TaskSpec
from composer_speedups.tasks.texts import Texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Task", "build_task"]

log = logging.getLogger("composer_speedups")

DEFAULT_VOCABULARY = 8192
_CUT = 0.02  # of the labelled words: that many may lie beyond a text's cut without a word
_UNKNOWN = 0.02  # of the tokens: that many the tokenizer may not know without a word
_CHECKS = 5  # raised when `files.read` learns to refuse or to tell more: a filled cache would not hear of it


@dataclass
class Task:
    """All that training needs to know about its data.

    Attributes:
        train: map-style samples `{"input_ids", "label", "index"}`, not padded, of pairs with `token_type_ids`.
        evaluation: the same, to evaluate on.
        tokenizer: the pretrained model's own, or one trained on the task's texts.
        collate_train: makes batches of `input_ids`, `attention_mask` and `labels`, of pairs with `token_type_ids`.
        collate_eval: the same; for MLM with masks that stay the same in every epoch and for every seed.
        num_labels: number of classes; 1 for regression and MLM.
        label_names: name of each class; of regression, that of its column.
        objective: one of `OBJECTIVES`.
        vocabulary: number of ids that may occur.
        max_length: tokens of the longest possible sample.
        lengths: how long the training samples are.
        source: where model and tokenizer come from, and whether the weights are pretrained.
        notes: what the user should know: rows dropped, fewer samples than asked for, random weights.
    """

    train: TokenDataset
    evaluation: TokenDataset
    tokenizer: PreTrainedTokenizerBase
    collate_train: PadCollator
    collate_eval: PadCollator
    num_labels: int
    label_names: list[str]
    objective: str
    vocabulary: int
    max_length: int
    lengths: Lengths
    source: model_sources.Source
    notes: list[str] = field(default_factory=list)

    @property
    def pretrained(self) -> bool:
        return self.source.pretrained

    @property
    def classes(self) -> dict[str, float]:
        """Each class's share of the training texts, or of their words; empty where there are no classes."""
        if not OBJECTIVES[self.objective].has_classes:
            return {}
        found = shares(self.train.labels, len(self.label_names))
        return dict(zip(self.label_names, found.tolist(), strict=True))

    @property
    def majority(self) -> float | None:
        """The accuracy, on the evaluation samples, of always giving the most frequent answer; None without classes."""
        return majority(self.evaluation.labels) if OBJECTIVES[self.objective].has_classes else None

    @property
    def loss_unit(self) -> float:
        """What a loss is small or large against: 1, as of classes, and of numbers their variance."""
        return float(np.var(self.train.labels, dtype=np.float64)) if self.objective == "regression" else 1.0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's masks, before its first batch is drawn; for classification it does nothing."""
        if isinstance(self.collate_train, MaskCollator):
            self.collate_train.set_epoch(epoch)


def build_task(spec: TaskSpec, model: ModelSpec, *, seed: int, progress: Callable[[str], None] | None = None) -> Task:
    """Make the task, from the cache where it was made before.

    `seed` decides the masks of MLM; which samples there are follows from `spec.data_seed` alone, so runs with
    several seeds share their data. `progress` is called with short lines while anything slow is done.
    """
    say = progress or (lambda line: log.info("%s", line))
    source = model_sources.resolve(model, say)
    if (unused := model_sources.unused_weights(model, source)) is not None:
        log.warning("%s", unused)
    notes = [source.note] if source.note else []
    if spec.name == "dummy":
        tokenizer, train, evaluation = dummy.build(spec, source, model)
        label_names = [str(i) for i in range(1 if spec.objective == "regression" else spec.num_labels)]
        vocabulary = spec.vocabulary or len(tokenizer)
    else:
        raw = _Raw(spec, say)
        tokenizer = _tokenizer(spec, source, raw)
        stored = _tokenised(spec, source, tokenizer, raw)
        typed = spec.text_pair_column is not None and _types_known(model, source) > 1
        if typed and "token_type_ids" not in tokenizer.model_input_names:
            # As it is saved with the model: whoever gives it a pair then gets what the model was trained with.
            tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]
        train, evaluation = (TokenDataset.load(stored / part, typed) for part in ("train", "evaluation"))
        about = _About.load(stored)
        label_names, vocabulary = about.label_names, len(tokenizer)
        notes += about.notes
    for note in notes[1 if source.note else 0 :]:
        log.warning("%s", note)
    if spec.objective == "mlm":
        label_names = []
    return Task(
        train=train, evaluation=evaluation, tokenizer=tokenizer,
        collate_train=_collator(spec, tokenizer, vocabulary, (seed, 0)),
        collate_eval=_collator(spec, tokenizer, vocabulary, (spec.data_seed, 1)),
        num_labels=max(1, len(label_names)), label_names=label_names, objective=spec.objective,
        vocabulary=vocabulary, max_length=spec.max_length,
        lengths=Lengths.of(train.lengths, spec.max_length), source=source, notes=notes,
    )  # fmt: skip


class _Raw:
    """The task's texts, read only if the cache lacks something that needs them, and then once."""

    def __init__(self, spec: TaskSpec, say: Callable[[str], None]) -> None:
        self.spec, self.say = spec, say
        self._texts: Texts | None = None
        self.key: dict[str, Any] = {"task": spec.name, "seed": spec.data_seed}
        self.key |= {"train": spec.train_samples, "evaluation": spec.eval_samples}
        if spec.name == "docstrings":
            self.key["versions"] = docstrings.versions()
        else:
            self.key["objective"] = spec.objective
            pair = [] if spec.text_pair_column is None else [spec.text_pair_column]
            self.key["columns"] = [spec.text_column, spec.label_column, spec.label_columns, spec.split_column, *pair]
            self._on_hub = hub_texts.load(spec) if spec.name == "hub" else None
            if self._on_hub is not None:
                self.key["hub"] = [spec.path, spec.subset, spec.revision, spec.train_split, spec.eval_split]
                self.key["files"] = hub_texts.fingerprint(self._on_hub)
            else:
                paths = {"task.path": spec.path, "task.eval_path": spec.eval_path}
                self.key["files"] = [files.fingerprint(path, key) for key, path in paths.items() if path is not None]

    def texts(self) -> Texts:
        if self._texts is None:
            self._texts = self._read()
        return self._texts

    def _read(self) -> Texts:
        spec, size = self.spec, (self.spec.train_samples, self.spec.eval_samples)
        labels = OBJECTIVES[spec.objective].labels
        if spec.name == "docstrings":
            self.say("collecting docstrings of the installed packages")
            folder = cached(
                "texts", self.key, lambda f: docstrings.collect(*size, spec.data_seed, self.say).save(f), self.say
            )
            return Texts.load(folder)
        self.say(f"reading the texts of task {spec.name}")
        if spec.name == "imdb":
            return imdb.read(spec.path, *size, seed=spec.data_seed, labels=labels)
        if self._on_hub is not None:
            return hub_texts.read(self._on_hub, spec)
        assert spec.path is not None
        return files.read(
            spec.path, text_column=spec.text_column, text_pair_column=spec.text_pair_column,
            labels=labels, label_column=spec.label_column, label_columns=spec.label_columns,
            split_column=spec.split_column, eval_path=spec.eval_path,
            train=spec.train_samples, evaluation=spec.eval_samples, seed=spec.data_seed,
        )  # fmt: skip


def _tokenizer(spec: TaskSpec, source: model_sources.Source, raw: _Raw) -> PreTrainedTokenizerBase:
    if source.tokenizer:
        return model_sources.load_tokenizer(source)
    size = spec.vocabulary or DEFAULT_VOCABULARY

    def train(folder: Path) -> None:
        texts = raw.texts().train + (raw.texts().train_pairs or [])
        raw.say(f"training a WordPiece tokenizer of {size:,} entries on {len(texts):,} texts")
        wordpiece.train(texts, size, folder)

    key = {"texts": raw.key, "vocabulary": size, "checks": _CHECKS, "tokenizers": version("tokenizers")}
    folder = cached("tokenizer", key, train, raw.say)
    return wordpiece.load(folder / "tokenizer.json", spec.max_length)


@dataclass
class _About:
    label_names: list[str]
    notes: list[str]

    def save(self, folder: Path) -> None:
        import json

        (folder / "about.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> _About:
        import json

        return cls(**json.loads((folder / "about.json").read_text()))


def _tokenised(spec: TaskSpec, source: model_sources.Source, tokenizer: PreTrainedTokenizerBase, raw: _Raw) -> Path:
    def build(folder: Path) -> None:
        texts = raw.texts()
        notes, of_tokens = list(texts.notes), spec.objective == "token_classification"
        for part in ("train", "evaluation"):
            # A copy: a tokenizer keeps how it was last used, and what is saved with a model must not tell of the cache.
            pairs, labels = getattr(texts, f"{part}_pairs"), getattr(texts, f"{part}_labels")
            encode = Encoding(copy.deepcopy(tokenizer), spec.max_length, f"tokenizing for {part}", raw.say)
            types = None
            if of_tokens:
                rows, labels = encode.words(getattr(texts, part), labels)
            else:
                rows, types = encode.texts(getattr(texts, part), pairs)
            # Texts of control characters alone leave nothing to learn, and nothing that MLM could mask.
            special = set(tokenizer.all_special_ids)
            full = [i for i, row in enumerate(rows) if not special.issuperset(row)]
            if len(full) < len(rows):
                notes.append(f"{len(rows) - len(full):,} of {len(rows):,} {part} texts dropped: no token in them")
            if of_tokens:
                full, note = _labelled(full, labels, getattr(texts, f"{part}_labels"), part, spec.max_length)
                notes += note
            notes += _unknown(rows, tokenizer, part, own=not source.tokenizer)
            if not full:
                raise TaskError(
                    f"no {part} text of task {spec.name} holds a token that the tokenizer knows"
                    + (", with a label" if of_tokens else "")
                )
            typed = None if types is None else [types[i] for i in full]
            TokenDataset.of([rows[i] for i in full], [labels[i] for i in full], typed, of_tokens).save(folder / part)
        _About(texts.label_names, notes).save(folder)

    key = {
        "texts": raw.key, "max_length": spec.max_length, "checks": _CHECKS, "own_tokenizer": not source.tokenizer,
        "tokenizer": digest(_meaning(tokenizer)),
    }  # fmt: skip
    return cached("tokens", key, build, raw.say)


def _meaning(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What decides how it cuts texts."""
    if tokenizer.is_fast:
        return {"json": tokenizer.backend_tokenizer.to_str(), "tokenizers": version("tokenizers")}
    # In Python: its class, and all that it would be made of again, options and merges among it.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        made_of = {path.name: path.read_bytes().hex() for path in sorted(Path(folder).iterdir())}
    cls = type(tokenizer)
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "made_of": made_of,
        "transformers": version("transformers"),
    }


def _unknown(rows: list[list[int]], tokenizer: PreTrainedTokenizerBase, part: str, own: bool) -> list[str]:
    """What to say where many tokens are the one for what the tokenizer does not know: there is little to learn."""
    unknown, special = tokenizer.unk_token_id, set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    total = sum(token not in special for row in rows for token in row)
    share = sum(row.count(unknown) for row in rows) / max(1, total) if unknown is not None else 0.0
    if share < _UNKNOWN:
        return []
    remedy = f"raise task.vocabulary above {len(tokenizer):,}" if own else "choose a model for such texts"
    return [
        f"{share:.0%} of the {part} tokens are {tokenizer.unk_token}, as the tokenizer does not know them: {remedy}"
    ]


def _labelled(
    full: list[int], labels: list[list[int]], of_words: list[list[int]], part: str, length: int
) -> tuple[list[int], list[str]]:
    """Of the texts at `full` those with a label on some token, without which a loss is no number; and what to say."""
    kept = [i for i in full if any(label != IGNORED for label in labels[i])]
    notes = []
    if without := len(full) - len(kept):
        notes.append(f"{without:,} of {len(full):,} {part} texts dropped: no labelled word in {length} tokens")
    there = sum(label != IGNORED for row in of_words for label in row)
    read = sum(label != IGNORED for i in kept for label in labels[i])
    if read < (1 - _CUT) * there:
        notes.append(f"{1 - read / there:.0%} of the labelled {part} words are cut off: raise task.max_length {length}")
    return kept, notes


def _types_known(model: ModelSpec, source: model_sources.Source) -> int:
    """Of how many types a model has embeddings: BERT of two, RoBERTa of one, DistilBERT of none."""
    own = model.config.get("type_vocab_size", getattr(model_sources.load_config(source), "type_vocab_size", 0))
    return own if isinstance(own, int) else 0  # what is no number, is refused where the model is built


def _collator(
    spec: TaskSpec, tokenizer: PreTrainedTokenizerBase, vocabulary: int, seed: tuple[int, int]
) -> PadCollator:
    length = spec.max_length if spec.padding == "max_length" else None
    padding = {"pad_id": tokenizer.pad_token_id, "length": length, "multiple_of": spec.pad_to_multiple_of}
    objective = OBJECTIVES[spec.objective]
    if objective.labels is not None:
        return (TokenLabelCollator if objective.of_tokens else PadCollator)(**padding)
    if tokenizer.mask_token_id is None:
        raise TaskError(
            "the model's tokenizer has no mask token: choose a masked language model, such as bert-base-uncased"
        )
    special = tuple(sorted(tokenizer.all_special_ids))
    return MaskCollator(
        **padding, mask_id=tokenizer.mask_token_id, special=special,
        replacements=np.setdiff1d(np.arange(vocabulary), special),
        probability=spec.mlm_probability, seed=seed[0] * 2 + seed[1],
    )  # fmt: skip
