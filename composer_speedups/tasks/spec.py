"""What a recipe may say about its task and its model: `TaskSpec` and `ModelSpec`.

Imports pydantic only, so that reading and checking a recipe stays instant.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

__all__ = ["ModelSpec", "TaskSpec"]

Scalar = bool | int | float | str | None

_ARCHITECTURE_KEYS = {"trust_remote_code", "auto_map", "model_type", "architectures", "num_labels"}
_ONLY_FOR = {
    "path": ("text", "hub", "imdb"),
    "text_column": ("text", "hub"),
    "text_pair_column": ("text", "hub"),
    "label_column": ("text", "hub"),
    "label_columns": ("text", "hub"),
    "split_column": ("text",),
    "eval_path": ("text",),
    "subset": ("hub",),
    "revision": ("hub",),
    "train_split": ("hub",),
    "eval_split": ("hub",),
    "mean_length": ("dummy",),
    "length_std": ("dummy",),
    "num_labels": ("dummy",),
    "lowest_token": ("dummy",),
}
_WITH_ANY_LABELS = ("text", "hub", "dummy")  # the others have one class a text
# Written only where they are set: studies and checkpoints that know nothing of them stay what they were.
_LATER = ("text_pair_column", "label_columns", "subset", "revision", "train_split", "eval_split")


class _Spec(BaseModel):
    # Strict: `epochs: "2"` in YAML is a mistake to be told about, not one to be guessed at.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TaskSpec(_Spec):
    """What is trained on what.

    Attributes:
        name: `docstrings` (embedded, no download), `imdb`, `text` (the user's own files), `hub` (a data set of the
            Hugging Face hub), `dummy` (random tokens).
        objective: `classification` of whole texts; `multi_label`, any of several classes a text (their names in a list,
            or with commas between); `regression`, a number a text; `token_classification`, a class a word (words and
            labels each in a list, or with spaces between); or `mlm` (masked language modelling, as BERT does it).
        max_length: tokens per sample including the special ones; longer texts are cut.
        padding: `max_length` pads every batch to `max_length`, `longest` to its own longest sample.
        pad_to_multiple_of: with `longest`, round the padded length up to a multiple of this.
        train_samples: training samples, at most; None is all there are.
        eval_samples: evaluation samples, at most; None is all there are.
        data_seed: which samples are drawn, and how MLM masks them.
        mlm_probability: share of the tokens (special ones excluded) that MLM has to predict.
        vocabulary: size of the WordPiece vocabulary trained for `docstrings` and for `text` when the model brings
            no tokenizer of its own; number of ids for `dummy` (None: the model's own).
        path: `text`: csv, tsv, jsonl, parquet file, or a folder of those or of class folders with .txt files;
            `hub`: a name such as nyu-mll/glue, or a folder that `datasets.load_dataset` reads;
            `imdb`: a local folder or parquet file instead of the hub.
        eval_path: `text`: a second file or folder to evaluate on; without it (and without `split_column`) a stable
            tenth of the texts is held out.
        text_column: `text`, `hub`: the column with the text.
        text_pair_column: `text`, `hub`: the column with a second text, where pairs are classified: premise and
            hypothesis, question and answer. The model is given both, as its tokenizer joins them.
        label_column: `text`, `hub`: the column with the label (not needed for MLM).
        label_columns: `text`, `hub`, for `multi_label`: a column for each class instead, with 1 or 0 in it.
        split_column: `text`: a column that says `train`, or `test` / `validation` / `eval`.
        subset: `hub`: one of the sets that share a name, such as mrpc of nyu-mll/glue.
        revision: `hub`: a commit, branch or tag of it; None is the newest.
        train_split: `hub`: the split to train on.
        eval_split: `hub`: the split to evaluate on; None is `validation`, or else `test`, or else a stable tenth of the
            texts.
        mean_length: `dummy`: mean tokens per sample; None is full length.
        length_std: `dummy`: standard deviation of the tokens per sample.
        num_labels: `dummy`: number of classes; not for regression.
        lowest_token: `dummy`: smallest random id, so that special ids stay out.

    >>> TaskSpec(name="imdb", train_samples=100).max_length
    256
    """

    name: Literal["docstrings", "imdb", "text", "hub", "dummy"] = "docstrings"
    objective: Literal["classification", "multi_label", "regression", "token_classification", "mlm"] = "classification"
    max_length: Annotated[int, Field(ge=8, le=32768)] = 256
    padding: Literal["max_length", "longest"] = "max_length"
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=1024)] | None = None
    train_samples: Annotated[int, Field(ge=1)] | None = 8000
    eval_samples: Annotated[int, Field(ge=1)] | None = 8000
    data_seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    vocabulary: Annotated[int, Field(ge=256, le=1_000_000)] | None = None
    path: str | None = None
    eval_path: str | None = None
    text_column: str = "text"
    text_pair_column: str | None = None
    label_column: str = "label"
    label_columns: list[str] | None = None
    split_column: str | None = None
    subset: str | None = None
    revision: str | None = None
    train_split: str = "train"
    eval_split: str | None = None
    mean_length: Annotated[float, Field(ge=3)] | None = None
    length_std: Annotated[float, Field(ge=0)] = 0.0
    num_labels: Annotated[int, Field(ge=2, le=100_000)] = 2
    lowest_token: Annotated[int, Field(ge=0)] = 100

    @model_validator(mode="after")
    def _fits_together(self) -> TaskSpec:
        for field, tasks in _ONLY_FOR.items():
            if self.name not in tasks and getattr(self, field) != type(self).model_fields[field].default:
                belongs = " or ".join(filter(None, (", ".join(tasks[:-1]), tasks[-1])))
                raise ValueError(f"{field} belongs to task {belongs}, not to {self.name}: remove it, or change name")
        if self.objective not in ("classification", "mlm") and self.name not in _WITH_ANY_LABELS:
            raise ValueError(
                f"task {self.name} has one class a text: objective {self.objective} needs {', '.join(_WITH_ANY_LABELS)}"
            )
        if self.objective == "token_classification" and self.text_pair_column is not None:
            raise ValueError("text_pair_column belongs to objectives of whole texts: remove it")
        if self.name == "text" and self.path is None:
            raise ValueError("task text needs path: a csv, tsv, jsonl or parquet file, or a folder")
        if self.name == "hub" and self.path is None:
            raise ValueError("task hub needs path: the name of a data set on the Hugging Face hub, as stanfordnlp/sst2")
        if self.name == "hub" and self.train_split == self.eval_split:
            raise ValueError(f"train_split and eval_split are both {self.eval_split!r}: evaluate on another")
        if self.name == "text" and self.eval_path is not None and self.split_column is not None:
            raise ValueError("eval_path and split_column both say what to evaluate on: keep one")
        if self.label_columns is not None and (self.objective != "multi_label" or len(set(self.label_columns)) < 2):
            raise ValueError("label_columns are of objective multi_label, two or more, each once")
        columns = [(n, getattr(self, n)) for n in ("text_column", "text_pair_column", "label_column") if self._reads(n)]
        columns += [("label_columns", name) for name in self.label_columns or ()]
        for (one, name), (other, same) in itertools.combinations(columns, 2):
            if name == same:
                raise ValueError(f"{one} and {other} are both {name!r}: one column cannot be both")
        if self.mean_length is not None and self.mean_length > self.max_length:
            raise ValueError(f"mean_length {self.mean_length:g} exceeds max_length {self.max_length}")
        if self.mean_length is None and self.length_std > 0:
            raise ValueError("length_std needs mean_length: without it every sample has full length")
        if self.pad_to_multiple_of is not None and self.max_length % self.pad_to_multiple_of:
            raise ValueError(
                f"max_length {self.max_length} is no multiple of pad_to_multiple_of {self.pad_to_multiple_of}"
            )
        return self

    def _reads(self, column: str) -> bool:
        needed = column != "label_column" or (self.objective != "mlm" and self.label_columns is None)
        return self.name in _ONLY_FOR[column] and getattr(self, column) is not None and needed

    @model_serializer(mode="wrap")
    def _as_before(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        unset = [key for key in _LATER if getattr(self, key) == type(self).model_fields[key].default]
        return {key: value for key, value in write(self).items() if key not in unset}


class ModelSpec(_Spec):
    """Which model is trained.

    Attributes:
        name: a Hugging Face hub name, or the path of a local model folder.
        pretrained: True: weights from the hub, its cache or the folder; False: random weights from the
            configuration; "auto": pretrained where they can be had, else random, said loudly and recorded.
        config: changes to the configuration, scalars only, such as `num_hidden_layers: 4`. With pretrained weights
            only values that leave the shapes alone (such as dropout) fit.
        attn_implementation: `sdpa`, where the model has it (DeBERTa has not), or `eager` attention.

    >>> ModelSpec(pretrained=False, config={"num_hidden_layers": 2}).name
    'bert-base-uncased'
    """

    name: Annotated[str, Field(min_length=1)] = "bert-base-uncased"
    pretrained: bool | Literal["auto"] = "auto"
    config: dict[str, Scalar] = Field(default_factory=dict)
    attn_implementation: Literal["eager", "sdpa"] = "sdpa"

    @field_validator("config")
    @classmethod
    def _no_architecture(cls, config: dict[str, Scalar]) -> dict[str, Scalar]:
        for key in config:
            if key in _ARCHITECTURE_KEYS or key.startswith("_"):
                raise ValueError(f"config.{key} cannot be set: it follows from name and task; remove it")
        return config
