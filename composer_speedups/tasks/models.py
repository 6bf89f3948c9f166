"""The model of a recipe: pretrained where asked for, else built from its configuration without any download."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_speedups.errors import TaskError, is_out_of_memory
from composer_speedups.tasks import hub, tokenizer_files
from composer_speedups.tasks.encoders import check_encoder, check_first_batch
from composer_speedups.tasks.known_models import KNOWN, OWNERS, described, known
from composer_speedups.tasks.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from composer_speedups.tasks.task import Task

__all__ = [
    "Source",
    "build_empty_model",
    "build_model",
    "end_of",
    "entries",
    "load_config",
    "load_tokenizer",
    "positions",
    "resolve",
    "unused_weights",
]

log = logging.getLogger("composer_speedups")

_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Sizes grow by this: tensor cores want matrices whose sides are multiples of 8 in 16-bit types.
_VOCABULARY_MULTIPLE = 8
_SIZES = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")


@dataclass(frozen=True)
class Source:
    """Where model, tokenizer and configuration come from: `location` is a folder or hub name, None the table above."""

    name: str
    location: str | None
    pretrained: bool
    tokenizer: bool
    local_only: bool
    note: str | None = None


def resolve(spec: ModelSpec, progress: Callable[[str], None] | None = None) -> Source:
    """Decide where the model comes from; one clear `TaskError`, within seconds, if it cannot be had."""
    folder = Path(os.path.expanduser(spec.name))  # a home that nobody has stays as it is, and is not there
    if os.path.isdir(folder):
        return _from_folder(spec, folder)
    if not _HUB_NAME.fullmatch(spec.name) or os.path.exists(folder):
        raise TaskError(
            f"model folder {spec.name!r} is not there or is no folder (seen from {str(Path.cwd())!r}): give a "
            "folder with config.json and weights, or a hub name such as bert-base-uncased"
        )
    architecture = known(spec.name)
    if spec.pretrained is False and architecture is not None:
        return Source(spec.name, None, pretrained=False, tokenizer=False, local_only=True)
    return _from_hub(spec, architecture is not None, progress)


def _from_folder(spec: ModelSpec, folder: Path) -> Source:
    try:
        there = (folder / "config.json").is_file()
    except OSError as error:
        raise TaskError(f"model folder {spec.name!r} cannot be read: {error.strerror}") from error
    if not there:
        raise TaskError(f"model folder {spec.name!r} has no config.json: give a folder that save_pretrained wrote")
    weights = _has_weights(folder)
    if spec.pretrained is True and not weights:
        raise TaskError(
            f"model folder {spec.name!r} has no weights ({_WEIGHTS[0]}): add them, or set model.pretrained: false"
        )
    pretrained = weights and spec.pretrained is not False
    tokenizer, lack = tokenizer_files.found(lambda name: (folder / name).is_file())
    if pretrained and not tokenizer:
        raise TaskError(
            f"model folder {spec.name!r} has weights but no tokenizer ({', '.join(tokenizer_files.PLAIN[:2])}): add "
            "the one that the weights were trained with, or set model.pretrained: false"
        )
    if lack is not None:
        raise TaskError(f"model folder {spec.name!r} has a SentencePiece tokenizer, which cannot be read here: {lack}")
    note = None
    if spec.pretrained == "auto" and not weights:
        note = f"model folder {spec.name!r} has no weights: training starts from random ones"
        log.warning("%s", note)
    return Source(spec.name, str(folder), pretrained, tokenizer, local_only=True, note=note)


def _has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _WEIGHTS)


def unused_weights(spec: ModelSpec, source: Source) -> str | None:
    """What to tell someone whose folder has weights that the recipe, perhaps unseen, does without; None if not so."""
    if spec.pretrained is not False or not _is_folder(source) or not _has_weights(Path(source.location or "")):
        return None
    return f"{spec.name} has weights, and model.pretrained is false: they are not used; set model.pretrained=true"


def _is_folder(source: Source) -> bool:
    return source.location is not None and os.path.isdir(source.location)


def _from_hub(spec: ModelSpec, is_known: bool, progress: Callable[[str], None] | None) -> Source:
    wants_weights, unread = spec.pretrained is not False, None
    for name in (spec.name, *(f"{owner}/{spec.name}" for owner in OWNERS if f"{owner}/{spec.name}" in KNOWN)):
        parts = [("config.json",), tokenizer_files.ANY, *([_WEIGHTS] if wants_weights else [])]
        if all(any(hub.cached_file(name, file) for file in part) for part in parts):
            _, unread = tokenizer_files.found(partial(hub.cached_file, name))
            if unread is None:
                return Source(spec.name, name, wants_weights, True, local_only=True)  # no need to ask anybody
    why = hub.unreachable()
    if why is not None and unread is not None:
        why = f"its SentencePiece tokenizer, which is in the cache, cannot be read: {unread}"
    if why is None:
        if progress is not None:
            progress(f"fetching {spec.name} from the Hugging Face hub")
        return Source(spec.name, spec.name, wants_weights, True, local_only=False)
    if is_known and spec.pretrained == "auto":
        note = (
            f"no pretrained weights of {spec.name!r} here ({why}): training starts from random ones, "
            "with a tokenizer trained on the task's texts"
        )
        log.warning("%s", note)
        return Source(spec.name, None, pretrained=False, tokenizer=False, local_only=True, note=note)
    ways = "set model.name to a local model folder"
    ways += ", or model.pretrained: false" if is_known else ", or to a model known here (such as bert-base-uncased)"
    raise TaskError(f"model {spec.name!r} is neither in the local cache nor to be had from the hub ({why}): {ways}")


def load_config(source: Source) -> PretrainedConfig:
    """The configuration as the source has it, before the recipe's changes."""
    from transformers import AutoConfig

    if source.location is None:
        found = known(source.name)
        assert found is not None
        return AutoConfig.for_model(found[0], **found[1])
    config = _load(source, AutoConfig.from_pretrained)
    if _is_folder(source) and "model_type" not in described(str(source.location)):
        # transformers 4 has then taken one whose name happens to occur in the folder's path.
        raise TaskError(f"model {source.name!r} cannot be loaded: add its model_type to {source.location}/config.json")
    return config


def entries(source: Source) -> int:
    """How many entries the vocabulary of the source's model has."""
    config = load_config(source)
    check_encoder(source, config)
    return config.vocab_size


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The source's own tokenizer: a fast one, or where its family has none (ESM), the one in Python."""
    from transformers import AutoTokenizer

    tokenizer = _load(source, AutoTokenizer.from_pretrained, " and the tokenizer beside it", use_fast=True)
    missing = [n for n in ("pad_token", "cls_token") if getattr(tokenizer, n, None) is None]
    if end_of(tokenizer) is None:
        missing.append("sep_token")
    if missing:
        raise TaskError(
            f"the tokenizer of model {source.name!r} has no {' and '.join(missing)}: choose a BERT-like encoder"
        )
    return tokenizer


def end_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the token that ends a text: BERT's separator, or where there is none (ESM) the end itself."""
    return tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id


def _load(source: Source, loader: Callable[..., Any], beside: str = "", **kwargs: Any) -> Any:
    try:
        return loader(source.location, local_files_only=source.local_only, trust_remote_code=False, **kwargs)
    except Exception as error:  # what a broken file raises depends on the reader: json, safetensors, tokenizers, ...
        hint = "check the name, or give the path of a local model folder"
        if _is_folder(source):
            hint = f"check {source.location}/config.json{beside}"
        if "sentencepiece" in str(error).lower() and (lack := tokenizer_files.lack()) is not None:
            hint = lack
        if "trust_remote_code" in str(error):
            hint = "it needs code from the hub, which is never run here: choose another model"
        raise TaskError(f"model {source.name!r} cannot be loaded ({_first_line(error)}): {hint}") from error


def build_model(spec: ModelSpec, task: Task, *, seed: int | None = None) -> PreTrainedModel:
    """The model for `task`, in float32, with its objective's head.

    Without pretrained weights, the embedding has as many rows as the tokenizer has entries, rounded up to a
    multiple of 8 for the tensor cores (ids beyond the tokenizer's never occur), unless the recipe's
    `config.vocab_size` says more. `seed` makes the random weights reproducible and leaves torch's generator as it was.
    """
    import torch

    config = _configure(spec, task)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.random.default_generator.manual_seed(seed)
        model = _instantiate(spec, task, config)
    check_first_batch(model, task)
    model.float()  # transformers 5 keeps a checkpoint's own dtype; masters in float32 are what the recipes assume
    return model


def build_empty_model(spec: ModelSpec, task: Task) -> PreTrainedModel:
    """The model that `build_model` would make, with weights that mean nothing: for those who ask for its sizes only.

    Inside PyTorch's FakeTensorMode it takes no memory. Of `task` no data is looked at.
    """
    from composer_speedups.compat import no_initial_weights

    config = _configure(spec, task)
    fresh = replace(task, source=replace(task.source, pretrained=False))
    with no_initial_weights():  # some are drawn until all are near enough to zero, and that asks for numbers
        model = _instantiate(spec, fresh, config)
    model.tie_weights()
    return model


def _configure(spec: ModelSpec, task: Task) -> PretrainedConfig:
    config = load_config(task.source)
    check_encoder(task.source, config, _kind(task))
    if not task.source.pretrained:
        config.vocab_size = -(-task.vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        if (tokenizer := task.tokenizer) is not None:
            ids = {"pad": tokenizer.pad_token_id, "mask": tokenizer.mask_token_id}
            ids |= dict.fromkeys(("cls", "bos"), tokenizer.cls_token_id)
            ids |= dict.fromkeys(("sep", "eos"), end_of(tokenizer))
            for name, token in ids.items():
                if hasattr(config, f"{name}_token_id"):
                    setattr(config, f"{name}_token_id", token)
        for name in ("pad", "cls", "sep", "bos", "eos", "mask"):  # ModernBERT's are the last of its own vocabulary
            if (getattr(config, f"{name}_token_id", None) or 0) >= config.vocab_size:
                setattr(config, f"{name}_token_id", 0)
    width = getattr(config, "hidden_size", None)
    for name, value in spec.config.items():
        _override(config, name, value)
    if "layer_types" not in spec.config:
        _fit_layer_types(config)
    if getattr(config, "pooler_hidden_size", None) == width and "pooler_hidden_size" not in spec.config:
        config.pooler_hidden_size = getattr(config, "hidden_size", None)  # DeBERTa's has a number of its own for it
    if task.tokenizer is not None and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = task.tokenizer.pad_token_id  # without one GPT-2 takes a single row at a time
    if (rows := config.vocab_size or 0) < task.vocabulary:
        raise TaskError(
            f"the model has {rows:,} embeddings, but the task's ids go up to {task.vocabulary - 1:,}: "
            f"set config.vocab_size to at least {task.vocabulary}, or a smaller task.vocabulary"
        )
    room = positions(config)
    if room is not None and task.max_length > room:
        raise TaskError(
            f"max_length {task.max_length} exceeds the {room} positions of model {spec.name!r}: lower task.max_length"
            + ("" if task.source.pretrained else ", or raise config.max_position_embeddings")
        )
    if task.objective == "classification":
        config.num_labels = task.num_labels
        config.id2label = dict(enumerate(task.label_names))
        config.label2id = {name: i for i, name in enumerate(task.label_names)}
        config.problem_type = "single_label_classification"
    return config


def _fit_layer_types(config: PretrainedConfig) -> None:
    """Let there be a kind for each layer, in the pattern that there is: ModernBERT's, which transformers 5 writes down.

    It builds a model of another number of layers, and then refuses to save it.
    """
    kinds, layers = getattr(config, "layer_types", None), getattr(config, "num_hidden_layers", None)
    if kinds and layers is not None and len(kinds) != layers:
        period = next(n for n in range(1, len(kinds) + 1) if kinds == (kinds[:n] * len(kinds))[: len(kinds)])
        config.layer_types = [kinds[i % period] for i in range(layers)]


def positions(config: PretrainedConfig) -> int | None:
    """How many tokens a sequence may have; None if the model has no such limit."""
    room = getattr(config, "max_position_embeddings", None)
    if room is None or room < 0:  # XLNet's is -1: its positions are relative
        return None
    if config.model_type == "esm" and getattr(config, "position_embedding_type", "absolute") == "rotary":
        return None
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet", "esm"):
        # MPNet's embeddings have it in their code.
        padding = 1 if config.model_type == "mpnet" else config.pad_token_id or 0
        room -= padding + 1  # their positions start behind the padding id
    return room


def _override(config: PretrainedConfig, name: str, value: Any) -> None:
    there = config.to_dict()
    own = config.attribute_map.get(name, name)
    if own not in there:
        if value is None:  # how one takes away what a recipe for another family says
            return
        near = difflib.get_close_matches(name, [*there, *config.attribute_map], n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(near)}" if near else "the names are those of its config.json"
        raise TaskError(f"model.config.{name} is no setting of a {config.model_type} model: {hint}; null leaves it out")
    old = there[own]
    # An int will do for a float; a bool is no number, though Python thinks so.
    kinds = (int, float) if type(old) is float else (type(old),)
    if old is not None and value is not None and type(value) not in kinds:
        raise TaskError(f"model.config.{name} is {value!r}, but must be of type {type(old).__name__}, such as {old!r}")
    # Transformers builds a model of no layers, or of less than none, and it trains.
    if own in {config.attribute_map.get(size, size) for size in _SIZES} and isinstance(value, int) and value < 1:
        raise TaskError(f"model.config.{name} must be 1 or more, got {value}")
    try:
        setattr(config, name, value)
    except Exception as error:  # transformers 5 looks at what it is given, by a validator of its own
        raise TaskError(f"model.config.{name} cannot be {value!r} ({_first_line(error)}): leave it out") from error


def _has_sdpa(kind: Any, config: PretrainedConfig) -> bool:
    """Whether the class of models that `kind` makes of `config` has scaled_dot_product_attention; DeBERTa has not."""
    return getattr(kind._model_mapping[type(config)], "_supports_sdpa", True)


def _kind(task: Task) -> Any:
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if task.objective == "classification" else AutoModelForMaskedLM


def _instantiate(spec: ModelSpec, task: Task, config: PretrainedConfig) -> PreTrainedModel:
    import torch

    from composer_speedups.tasks.heads import fit_head

    kind = _kind(task)
    attention = {"attn_implementation": spec.attn_implementation if _has_sdpa(kind, config) else "eager"}
    with _quiet_transformers():
        if task.source.pretrained:
            # A checkpoint's own head may have another number of classes: then a new one, but nothing else, is made.
            beside = " and the weights beside it" + (", and model.config" if spec.config else "")
            model, loading = _load(
                task.source, kind.from_pretrained, beside, config=config, output_loading_info=True,
                ignore_mismatched_sizes=True, **attention,
            )  # fmt: skip
            new = _check_loaded(spec, model, loading)
            if task.objective == "classification":
                note = fit_head(model, load_config(task.source).id2label, task.label_names, new)
                if note is not None:
                    log.warning("model %s: %s", spec.name, note)
            return model
        # In float32 from the start: made in a checkpoint's bf16, random weights would be rounded to that.
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", torch.float32)
        try:
            return kind.from_config(config, **attention)
        except Exception as error:  # whatever the model's code makes of impossible values
            if is_out_of_memory(error):
                raise
            places = ["model.config"] if spec.config or not _is_folder(task.source) else []
            places += [f"{task.source.location}/config.json"] if _is_folder(task.source) else []
            raise TaskError(
                f"model {spec.name!r} cannot be built for {task.objective} ({_first_line(error)}): "
                f"check {' and '.join(places)}"
            ) from error


def _check_loaded(spec: ModelSpec, model: PreTrainedModel, loading: dict[str, Any]) -> list[str]:
    """The weights that were not found in the checkpoint, or did not fit; raise if they are of the body."""
    wrong = [key[0] if isinstance(key, tuple) else key for key in loading["mismatched_keys"]] + [
        key
        for key in loading["missing_keys"]
        if ".pooler." not in key  # checkpoints of MLM have no pooler
    ]
    body = [key for key in wrong if key.startswith(f"{model.base_model_prefix}.")]
    if body:
        raise TaskError(
            f"the weights of model {spec.name!r} do not fit its configuration ({len(body)} tensors, as {body[0]}): "
            + (
                f"the recipe sets {', '.join(spec.config)}. Write model.config={{}} for the checkpoint's own, or "
                if spec.config
                else "use the configuration that it was saved with, or "
            )
            + "model.pretrained=false for random weights"
        )
    return wrong


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No report that the head is new, which is no news here, and no progress bar across our own display."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"
