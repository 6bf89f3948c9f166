"""For each family of `families.py`: how its encoder is packed, and how its last layer is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from composer_speedups.families import (
    ALBERT,
    BERT_LIKE,
    DATA2VEC,
    DEBERTA,
    DISTILBERT,
    ERNIE,
    ESM,
    EUROBERT,
    MODERNBERT,
    MPNET,
    NOMIC_LIKE,
)
from composer_speedups.packed.albert import pack_albert
from composer_speedups.packed.bert import FirstOfBert, pack_bert
from composer_speedups.packed.deberta import FirstOfDeberta, pack_deberta
from composer_speedups.packed.distilbert import FirstOfDistilBert, pack_distilbert
from composer_speedups.packed.ernie import pack_ernie
from composer_speedups.packed.esm import FirstOfEsm, pack_esm
from composer_speedups.packed.first import FirstOnly
from composer_speedups.packed.llama_named import FirstOfEuroBert, FirstOfNomicBert, pack_llama_named
from composer_speedups.packed.modernbert import FirstOfModernBert, pack_modernbert
from composer_speedups.packed.mpnet import FirstOfMPNet, pack_mpnet

__all__ = ["BY_FAMILY", "Family"]


class Family(NamedTuple):
    """What is changed in a family's models.

    Args:
        pack: lets an encoder, and the head of its owner, work on packed tokens; returns how many attention layers.
        first: mixed into the last layer, which then computes first tokens only; None if it cannot be cut.
    """

    pack: Callable[[torch.nn.Module, torch.nn.Module | None], int]
    first: type[FirstOnly] | None


BY_FAMILY: dict[str, Family] = {
    **dict.fromkeys((*BERT_LIKE, *DATA2VEC), Family(pack_bert, FirstOfBert)),
    **dict.fromkeys(ALBERT, Family(pack_albert, None)),  # one layer is all of its layers
    **dict.fromkeys(DEBERTA, Family(pack_deberta, FirstOfDeberta)),
    **dict.fromkeys(DISTILBERT, Family(pack_distilbert, FirstOfDistilBert)),
    **dict.fromkeys(ERNIE, Family(pack_ernie, FirstOfBert)),
    **dict.fromkeys(ESM, Family(pack_esm, FirstOfEsm)),
    **dict.fromkeys(EUROBERT, Family(pack_llama_named, FirstOfEuroBert)),
    **dict.fromkeys(NOMIC_LIKE, Family(pack_llama_named, FirstOfNomicBert)),
    **dict.fromkeys(MODERNBERT, Family(pack_modernbert, FirstOfModernBert)),
    **dict.fromkeys(MPNET, Family(pack_mpnet, FirstOfMPNet)),
}
