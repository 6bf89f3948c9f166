"""What is done to a model after `Unpadding` and `LastLayerSubset`: they still compute what the model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from unpadded import FAMILIES, batch, compare, tiny_config, with_random_weights

from composer_speedups import apply_last_layer_subset, apply_unpadding
from composer_speedups.families import attention_of, layers_of, stack_of
from composer_speedups.packed import encoder as packed_encoder

HEAD = "ForSequenceClassification"


class Half(torch.nn.Dropout):
    """A dropout of the user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def make(family: str, **changes: object) -> torch.nn.Module:
    """With eager attention, which calls its dropout; EuroBERT's, which does not, has its softmax in float32."""
    cls = getattr(transformers, family + HEAD)
    config = tiny_config(family, num_hidden_layers=3, **changes)
    attention = "sdpa" if family == "EuroBert" else "eager"
    return with_random_weights(cls._from_config(config, attn_implementation=attention).double())


def layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    return layers_of(stack_of(model.base_model))


def own_dropout(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    attention = attention_of(layers(model)[1])
    setattr(attention, "attention_dropout" if "attention_dropout" in attention._modules else "dropout", Half(0.0))


def no_dropout(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, torch.nn.Identity())


def listened(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    attention_of(layers(model)[1]).dropout.register_forward_hook(lambda module, given, out: out * 0.5)


def foreign_layer(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    layers(model)[1] = copy.deepcopy(layers(stock)[0])


def one_more_layer(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    layers(model).insert(1, copy.deepcopy(layers(model)[0]))
    model.config.num_hidden_layers = 4


def wrapped(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    """As FSDP and Composer's activation checkpointing wrap layers, when the speed-ups are in the model."""
    layers(model)[1] = checkpoint_wrapper(layers(model)[1])


def fewer_layers(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    del layers(model)[1]


def chunks(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    for layer in layers(model):
        getattr(layer, "ffn", layer).chunk_size_feed_forward = 4


def decoder(model: torch.nn.Module, stock: torch.nn.Module) -> None:
    model.config.is_decoder = True


STILL_PACKED = (no_dropout, one_more_layer, fewer_layers, wrapped)
PADDED = (own_dropout, foreign_layer)
EACH = ("Bert", "DistilBert", "MPNet", "DebertaV2")
# Of transformers 5 only, and without a module that drops attention weights.
NEWER = [family for family in ("NomicBert", "EuroBert") if family in FAMILIES]
CASES = [(family, change) for family in EACH for change in STILL_PACKED + PADDED]
CASES += [("Albert", change) for change in (no_dropout, wrapped, own_dropout, foreign_layer)]
CASES += [(family, change) for family in NEWER for change in (*STILL_PACKED, foreign_layer)]
CASES += [("Bert", chunks), ("DistilBert", chunks), ("Bert", decoder)]


@pytest.mark.parametrize(("family", "change"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_unpadding(family: str, change: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """What its packed layers know nothing of is computed by the stock forward pass, and that is said."""
    if change is no_dropout and transformers.__version__ >= "5" and family in ("Bert", "DistilBert", "Albert"):
        pytest.skip("in transformers 5 the stock model reads its dropout's rate")
    stock = make(family)
    fast, untouched = copy.deepcopy(stock), copy.deepcopy(stock)
    assert apply_unpadding(fast) == 3
    for model in (stock, fast):
        change(model, untouched)
    packed_encoder._SAID.clear()
    compare(stock, fast, HEAD, batch(HEAD, FAMILIES[family]))
    assert ("padded forward pass" in caplog.text) == (change not in STILL_PACKED), caplog.text


@pytest.mark.parametrize("kind", ["right", "full"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", [*EACH, *NEWER])
def test_a_last_layer_that_stands_there_twice(family: str, packed: bool, kind: str) -> None:
    """Its first call must compute all tokens, which its second one reads."""
    stock = make(family)
    fast = copy.deepcopy(stock)
    assert apply_last_layer_subset(fast) == 1
    assert not packed or apply_unpadding(fast) == 3
    for model in (stock, fast):
        layers(model)[1] = layers(model)[2]
    compare(stock, fast, HEAD, batch(HEAD, FAMILIES[family], kind))


@pytest.mark.parametrize("change", [own_dropout, listened, chunks], ids=lambda change: change.__name__)
@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_last_layer_subset(family: str, change: Callable[..., None]) -> None:
    stock = make(family)
    fast = copy.deepcopy(stock)
    assert apply_last_layer_subset(fast) == 1
    for model in (stock, fast):
        del layers(model)[0]  # so that the change is the last one's
        change(model, stock)
    compare(stock, fast, HEAD, batch(HEAD, FAMILIES[family]))
