"""The model of a recipe: pretrained where asked for, else built from its configuration without any download."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from composer_speedups.errors import TaskError, in_a_line, is_out_of_memory
from composer_speedups.tasks.encoders import check_encoder, check_first_batch
from composer_speedups.tasks.model_sources import end_of, is_folder, load_config, load_from
from composer_speedups.tasks.objectives import OBJECTIVES
from composer_speedups.tasks.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from composer_speedups.tasks.task import Task

__all__ = ["build_empty_model", "build_model", "longest_input"]

log = logging.getLogger("composer_speedups")

# Sizes grow by this: tensor cores want matrices whose sides are multiples of 8 in 16-bit types.
_VOCABULARY_MULTIPLE = 8
_SIZES = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")


def build_model(spec: ModelSpec, task: Task, *, seed: int | None = None) -> PreTrainedModel:
    """The model for `task`, in float32, with its objective's head.

    Without pretrained weights, the embedding has as many rows as the tokenizer has entries, rounded up to a
    multiple of 8 for the tensor cores (ids beyond the tokenizer's never occur), unless the recipe's
    `config.vocab_size` says more. `seed` makes the random weights reproducible and leaves torch's generator as it was.
    """
    import torch

    from composer_speedups.tasks.heads import begin_at
    from composer_speedups.tasks.unread import freeze_unread

    config = _configure(spec, task)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.random.default_generator.manual_seed(seed)
        model = _instantiate(spec, task, config)
    if task.objective == "regression":
        begin_at(model, float(task.train.labels.mean()))
    check_first_batch(model, task)
    model.float()  # transformers 5 keeps a checkpoint's own dtype; masters in float32 are what the recipes assume
    freeze_unread(model)
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
    if getattr(config, "pad_token_id", None) is None:  # without one GPT-2 takes a single row at a time
        config.pad_token_id = 0 if task.tokenizer is None else task.tokenizer.pad_token_id
    if (rows := config.vocab_size or 0) < task.vocabulary:
        raise TaskError(
            f"the model has {rows:,} embeddings, but the task's ids go up to {task.vocabulary - 1:,}: "
            f"set config.vocab_size to at least {task.vocabulary}, or a smaller task.vocabulary"
        )
    room = longest_input(config)
    if room is not None and task.max_length > room:
        raise TaskError(
            f"max_length {task.max_length} exceeds the {room} positions of model {spec.name!r}: lower task.max_length"
            + ("" if task.source.pretrained else ", or raise config.max_position_embeddings")
        )
    objective = OBJECTIVES[task.objective]
    if objective.labels is not None:
        config.num_labels = task.num_labels
        config.id2label = dict(enumerate(task.label_names))
        config.label2id = {name: i for i, name in enumerate(task.label_names)}
        config.problem_type = objective.problem
    return config


def _fit_layer_types(config: PretrainedConfig) -> None:
    """Let there be a kind for each layer, in the pattern that there is: ModernBERT's, which transformers 5 writes down.

    It builds a model of another number of layers, and then refuses to save it.
    """
    kinds, layers = getattr(config, "layer_types", None), getattr(config, "num_hidden_layers", None)
    if kinds and layers is not None and len(kinds) != layers:
        period = next(n for n in range(1, len(kinds) + 1) if kinds == (kinds[:n] * len(kinds))[: len(kinds)])
        config.layer_types = [kinds[i % period] for i in range(layers)]


def longest_input(config: PretrainedConfig) -> int | None:
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
        raise TaskError(f"model.config.{name} cannot be {value!r} ({in_a_line(error)}): leave it out") from error


def _has_sdpa(kind: Any, config: PretrainedConfig) -> bool:
    """Whether the class of models that `kind` makes of `config` has scaled_dot_product_attention; DeBERTa has not."""
    return getattr(kind._model_mapping[type(config)], "_supports_sdpa", True)


def _kind(task: Task) -> Any:
    import transformers

    return getattr(transformers, OBJECTIVES[task.objective].head)


def _instantiate(spec: ModelSpec, task: Task, config: PretrainedConfig) -> PreTrainedModel:
    import torch

    from composer_speedups.tasks.heads import fit_head

    kind = _kind(task)
    attention = {"attn_implementation": spec.attn_implementation if _has_sdpa(kind, config) else "eager"}
    with _quiet_transformers():
        if task.source.pretrained:
            # A checkpoint's own head may have another number of classes: then a new one, but nothing else, is made.
            beside = " and the weights beside it" + (", and model.config" if spec.config else "")
            model, loading = load_from(
                task.source, kind.from_pretrained, beside, config=config, output_loading_info=True,
                ignore_mismatched_sizes=True, **attention,
            )  # fmt: skip
            new = _check_loaded(spec, model, loading)
            objective, own = OBJECTIVES[task.objective], load_config(task.source)
            if objective.labels is not None:
                end = objective.head.removeprefix("AutoModel")
                same_kind = not own.architectures or any(name.endswith(end) for name in own.architectures)
                note = fit_head(model, own.id2label, task.label_names, new, same_kind)
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
            places = ["model.config"] if spec.config or not is_folder(task.source) else []
            places += [f"{task.source.location}/config.json"] if is_folder(task.source) else []
            raise TaskError(
                f"model {spec.name!r} cannot be built for {task.objective} ({in_a_line(error)}): "
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
