"""Where a recipe's model is: its folder, the hub or its cache, or a configuration that is known by name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_speedups.errors import TaskError, in_a_line
from composer_speedups.tasks import hub, tokenizer_files
from composer_speedups.tasks.encoders import check_encoder
from composer_speedups.tasks.known_models import KNOWN, OWNERS, described, known
from composer_speedups.tasks.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

__all__ = [
    "Source",
    "end_of",
    "entries",
    "is_folder",
    "load_config",
    "load_from",
    "load_tokenizer",
    "resolve",
    "unused_weights",
]

log = logging.getLogger("composer_speedups")

_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Source:
    """Where model, tokenizer and configuration come from: `location` is a folder or hub name, None a known one."""

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
    if spec.pretrained is not False or not is_folder(source) or not _has_weights(Path(source.location or "")):
        return None
    return f"{spec.name} has weights, and model.pretrained is false: they are not used; set model.pretrained=true"


def is_folder(source: Source) -> bool:
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
    config = load_from(source, AutoConfig.from_pretrained)
    if is_folder(source) and "model_type" not in described(str(source.location)):
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

    tokenizer = load_from(source, AutoTokenizer.from_pretrained, " and the tokenizer beside it", use_fast=True)
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


_NEWER = "take a newer one, which may have it (Newer stacks, in README)"


def load_from(source: Source, loader: Callable[..., Any], beside: str = "", **kwargs: Any) -> Any:
    try:
        return loader(source.location, local_files_only=source.local_only, trust_remote_code=False, **kwargs)
    except Exception as error:  # what a broken file raises depends on the reader: json, safetensors, tokenizers, ...
        hint = "check the name, or give the path of a local model folder"
        if is_folder(source):
            hint = f"check {source.location}/config.json{beside}"
        if "sentencepiece" in str(error).lower() and (lack := tokenizer_files.lack()) is not None:
            hint = lack
        if "trust_remote_code" in str(error):
            hint = f"it needs code from the hub, which is never run here: {_NEWER}, or choose another model"
        if "does not recognize this architecture" in str(error):
            hint = f"this transformers has no such models: {_NEWER}"
        raise TaskError(f"model {source.name!r} cannot be loaded ({in_a_line(error)}): {hint}") from error
