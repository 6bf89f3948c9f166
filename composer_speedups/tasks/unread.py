"""Parameters of a model that no output is made of, as those of the head for contacts that every ESM has."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["freeze_unread"]

log = logging.getLogger("composer_speedups")

_TOKENS = 8


def freeze_unread(model: PreTrainedModel) -> int:
    """Freeze the parameters that `model`'s output does not depend on; return how many.

    They would never have a gradient, and so never change. But DDP waits for their gradients, and PyTorch cannot load an
    optimizer's checkpoint without their moments. A model that cannot read a few tokens alone stays as it is.

    >>> from transformers import EsmConfig, EsmForSequenceClassification
    >>> config = EsmConfig(vocab_size=33, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, pad_token_id=1)
    >>> freeze_unread(EsmForSequenceClassification(config))
    2
    """
    import torch

    was_training, device = model.training, next(model.parameters()).device
    settings = dict(vars(model.config))  # ModernBERT of transformers 4.53 notes here whether it compiles on this device
    ids = torch.arange(_TOKENS, device=device)[None] % model.config.vocab_size
    try:
        with torch.enable_grad():
            out = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    except Exception as error:  # anybody's code
        log.debug("which parameters %s reads was not seen: %s", type(model).__name__, error)
        return 0
    finally:
        model.train(was_training)
        vars(model.config).update(settings)
    read = _leaves(out)
    unread = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in read]
    for _, parameter in unread:
        parameter.requires_grad_(False)
    if unread:
        log.info("not trained, as no output depends on it: %s", ", ".join(name for name, _ in unread))
    return len(unread)


def _leaves(out: torch.Tensor) -> set[int]:
    """By `id`: the tensors that a backward pass from `out` would have gradients for."""
    found: set[int] = set()
    seen, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return found
