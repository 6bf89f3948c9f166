"""Classes made at run time lie over each other, and still copy and pickle."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import dataclass
from itertools import permutations
from types import MethodType

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from composer_speedups import apply_gradient_checkpointing, apply_last_layer_subset, apply_mixed_precision
from composer_speedups.compat import compile_counters
from composer_speedups.compilation import compile_statistics
from composer_speedups.surgery import mix_in, override_methods, overrides, repeated_blocks, stock_class

# Two mixins and an override, two of them on the classifier itself and two on its last layer.
SURGERIES = {
    "override": lambda model: apply_mixed_precision(model, "bf16"),
    "mixin": apply_last_layer_subset,
    "checkpointing": apply_gradient_checkpointing,
    "override of a layer": lambda model: apply_mixed_precision(model.bert.encoder.layer[-1], "bf16"),
}


@pytest.mark.parametrize("order", list(permutations(SURGERIES, 3)), ids=" ".join)
def test_in_any_order_they_copy_and_pickle(order: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64)
    stock = BertForSequenceClassification(config).eval()
    model, batch = copy.deepcopy(stock), {"input_ids": torch.randint(0, 64, (2, 7))}
    for name in order:
        assert SURGERIES[name](model)
    with torch.no_grad():
        expected = model(**batch).logits
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
            assert overrides(twin) == overrides(model)
            assert torch.equal(twin(**batch).logits, expected)
    assert all(stock_class(type(m)) is type(s) for m, s in zip(model.modules(), stock.modules(), strict=True))
    assert len(repeated_blocks(model)) == 2


class Twice:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@dataclass(frozen=True)
class Doubled:
    def __call__(self, forward):
        def doubled(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * forward(self, x)

        return doubled


@pytest.mark.parametrize("change", ["mix_in", "override_methods"])
def test_each_class_has_dynamos_limit_of_its_own(change: str) -> None:
    """In one process many models may be compiled: with one code for all of them, the last ones would run uncompiled."""
    torch._dynamo.reset()
    before = compile_counters()
    with torch._dynamo.config.patch(recompile_limit=2):
        for number in range(4):
            layer = type(f"Layer{number}", (torch.nn.Linear,), {"forward": lambda self, x: self.weight.sum() * x})(3, 3)
            if change == "mix_in":
                mix_in(Twice, layer)
            else:
                assert override_methods(layer, ("forward",), Doubled())
            layer.compile(backend="eager")
            torch.testing.assert_close(layer(torch.ones(2, 3)), 2 * layer.weight.sum() * torch.ones(2, 3))
    statistics = compile_statistics(before)
    assert (statistics["graphs"], statistics["frames_over_limit"]) == (4, 0)
    torch._dynamo.reset()


def test_accelerate_takes_its_own_precision_off_and_no_more() -> None:
    """`unwrap_model(keep_fp32_wrapper=False)` follows `__wrapped__` to its end."""
    from accelerate.utils import convert_outputs_to_fp32, extract_model_from_parallel

    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64)
    model = BertForSequenceClassification(config).eval()
    apply_last_layer_subset(model)
    seen, ids = [], torch.randint(0, 64, (2, 7))
    model.bert.encoder.layer[-1].output.register_forward_hook(lambda module, given, out: seen.append(out.shape[1]))
    before = str(inspect.signature(model.forward))
    model(input_ids=ids)
    model._original_forward = model.forward  # as `prepare` does in bf16
    model.forward = MethodType(convert_outputs_to_fp32(model.forward.__func__), model)
    model = extract_model_from_parallel(model, keep_fp32_wrapper=False)
    model(input_ids=ids)
    assert seen == [1, 1] and str(inspect.signature(model.forward)) == before
