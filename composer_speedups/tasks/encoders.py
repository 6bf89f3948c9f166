"""Whether a model reads texts, as those here have to, and whether it can read a task's: said before it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer_speedups.errors import TaskError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from composer_speedups.tasks.model_sources import Source
    from composer_speedups.tasks.task import Task

__all__ = ["check_encoder", "check_first_batch"]


def check_encoder(source: Source, config: PretrainedConfig, kind: Any = None) -> None:
    """Raise if models of `config` read something else than texts or write some, or if `kind` makes none of them.

    `kind` is a class of transformers such as `AutoModelForMaskedLM`.
    """
    why = None
    if getattr(config, "is_encoder_decoder", False):
        why = "it has a decoder, too"
    elif not hasattr(config, "vocab_size") or (source.pretrained and config.vocab_size is None):
        why = "it has no vocabulary"
    elif kind is not None and type(config) not in kind._model_mapping:
        why = f"there is no {kind.__name__} of it"
    if why is not None:
        raise TaskError(
            f"model {source.name!r} is of type {config.model_type}, which is no encoder of texts ({why}): "
            "choose a BERT-like encoder"
        )
    for name in ("vocab_size", "max_position_embeddings", "pad_token_id"):  # those that are compared with others
        value = getattr(config, name, None)
        if value is not None and type(value) is not int:
            raise TaskError(f"{source.location}/config.json has {name} {value!r}: it must be a whole number")


def check_first_batch(model: PreTrainedModel, task: Task) -> None:
    """Raise where a model can be built, but its first batch would end in an error that names no value."""
    import torch

    family, chunk = model.config.model_type, 0
    for name, module in model.named_modules():
        chunk = max(chunk, getattr(module, "chunk_size_feed_forward", 0))
        types = isinstance(module, torch.nn.Embedding) and name.endswith("token_type_embeddings")
        if types and not module.num_embeddings:
            raise TaskError(
                f"model.config.type_vocab_size is 0, but a {family} model looks a type up for each token: "
                "set it to at least 1"
            )
    unit = task.collate_train.length or task.collate_train.multiple_of or 1
    if chunk and unit % chunk:
        raise TaskError(
            f"model.config.chunk_size_feed_forward is {chunk}, but the batches' lengths are multiples of {unit}, which "
            "it does not divide: set it to 0"
        )
