"""FusedBiasGELU with its kernel for CPUs; `tests/kernels` looks at the kernels of both devices."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
import transformers
from composer.algorithms.warnings import NoEffectWarning
from composer.models import ComposerClassifier, HuggingFaceModel
from model_check import check_model, random_weights
from small import bert_config, padded_batch, stock_checkpointing
from transformers import BertForSequenceClassification
from unpadded import FAMILIES, batch, make

from composer_speedups import (
    FusedBiasGELU,
    TorchCompile,
    Unpadding,
    apply_fused_bias_gelu,
    apply_fused_dropout_add_norm,
    apply_unpadding,
)
from composer_speedups.algorithms.fused_bias_gelu import _FusedIntermediate
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.kernels import bias_gelu as kernel


@pytest.fixture
def calls(monkeypatch) -> list[torch.dtype]:
    """The dtype of each input that the kernel was given."""
    seen: list[torch.dtype] = []
    forward = kernel._forward
    monkeypatch.setattr(kernel, "_forward", lambda x, bias: seen.append(x.dtype) or forward(x, bias))
    return seen


def test_same_parameters_same_keys_twice_is_once(tiny_bert) -> None:
    before = [(n, id(p), p.requires_grad) for n, p in tiny_bert.named_parameters()]
    keys = list(tiny_bert.state_dict())
    assert apply_fused_bias_gelu(tiny_bert) == 2
    assert apply_fused_bias_gelu(tiny_bert) == 0
    assert [(n, id(p), p.requires_grad) for n, p in tiny_bert.named_parameters()] == before
    assert list(tiny_bert.state_dict()) == keys


@pytest.mark.parametrize("padded", [True, False])
def test_bert_matches_float64(tiny_bert: torch.nn.Module, padded: bool, calls: list) -> None:
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    assert apply_fused_bias_gelu(changed) == 2
    batch = padded_batch(rows=2, length=6)
    if not padded:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    check_model(changed, stock, batch)
    assert calls == [torch.float32] * 2


def test_with_all_that_touches_the_same_layers(tiny_bert: torch.nn.Module, calls: list) -> None:
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    apply_unpadding(changed)
    assert apply_fused_dropout_add_norm(changed) == 4 and apply_fused_bias_gelu(changed) == 2
    check_model(changed, stock, padded_batch(rows=2, length=6))
    assert len(calls) == 2


def test_esm_whose_gelu_is_a_function(calls: list) -> None:
    stock = random_weights(make("Esm", "ForSequenceClassification").float()).eval()
    changed = copy.deepcopy(stock)
    assert apply_fused_bias_gelu(changed) == 2 and apply_fused_bias_gelu(changed) == 0
    check_model(changed, stock, batch("ForSequenceClassification", FAMILIES["Esm"]))
    assert calls == [torch.float32] * 2


def test_a_function_that_computes_something_else_is_left_alone(monkeypatch) -> None:
    model = make("Esm", "ForSequenceClassification")
    home = sys.modules[type(model).__module__]
    monkeypatch.setattr(home, "gelu", lambda x: F.gelu(x, approximate="tanh"))
    assert apply_fused_bias_gelu(model) == 0


class _LikeEsms(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 8)

    def forward(self, hidden_states):
        hidden_states = self.dense(hidden_states)
        hidden_states = gelu(hidden_states)  # noqa: F821  # which there is not
        return hidden_states


def test_a_layer_of_your_own_that_reads_like_esms_is_left_alone() -> None:
    assert apply_fused_bias_gelu(_LikeEsms()) == 0


@pytest.mark.parametrize("fault", ["bias", "activation"])
def test_the_check_finds_a_planted_fault(tiny_bert: torch.nn.Module, fault: str, monkeypatch) -> None:
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    apply_fused_bias_gelu(changed)
    if fault == "bias":
        monkeypatch.setattr(kernel, "bias_gelu", lambda x, bias: kernel.reference_bias_gelu(x, bias * 0))
    else:
        monkeypatch.setattr(kernel, "bias_gelu", lambda x, bias: F.gelu(x + bias, approximate="tanh"))
    with pytest.raises(AssertionError, match="is off by"):
        check_model(changed, stock, padded_batch(rows=2, length=6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_computes_in_the_autocast_dtype(tiny_bert: torch.nn.Module, dtype: torch.dtype, calls: list) -> None:
    layer = tiny_bert.bert.encoder.layer[0].intermediate
    apply_fused_bias_gelu(layer)
    x = torch.randn(3, 32)
    with torch.autocast("cpu", dtype):
        out = layer(x)
    assert out.dtype == dtype
    assert calls == [dtype] * (dtype == torch.bfloat16), "of fp16 there is no kernel for CPUs: PyTorch's GELU stays"
    exact = F.gelu(F.linear(x.to(dtype).double(), layer.dense.weight.to(dtype).double(), layer.dense.bias.double()))
    # The product and the output are rounded, each by at most an eps of values up to 4 or so.
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=8 * torch.finfo(dtype).eps)
    out.sum().backward()
    assert layer.dense.bias.grad.dtype == layer.dense.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "gelu_fast"])
def test_other_activations_are_left_alone(activation: str, make_trainer) -> None:
    model = BertForSequenceClassification(bert_config(hidden_act=activation))
    algorithm = FusedBiasGELU()
    with pytest.warns(NoEffectWarning, match="and the kernel's is the exact gelu"):
        make_trainer([algorithm], model=HuggingFaceModel(model))
    assert algorithm.evidence["changed"] == 0 and algorithm.evidence["left_alone"] == 2


@pytest.mark.parametrize("activation", [F.gelu, torch.nn.GELU()], ids=["function", "module"])
def test_every_form_of_the_exact_gelu_is_taken(tiny_bert, activation) -> None:
    for layer in tiny_bert.bert.encoder.layer:
        del layer.intermediate.intermediate_act_fn
        layer.intermediate.intermediate_act_fn = activation
    assert apply_fused_bias_gelu(tiny_bert) == 2


def test_hooks_and_other_linear_layers_take_the_models_own_code(tiny_bert, calls: list) -> None:
    apply_fused_bias_gelu(tiny_bert)
    first, second = (layer.intermediate for layer in tiny_bert.bert.encoder.layer)
    seen = []
    first.dense.register_forward_hook(lambda *_: seen.append("dense"))
    second.dense = torch.nn.Sequential(second.dense)
    tiny_bert(**padded_batch())
    assert seen == ["dense"] and calls == []


def test_checkpointing_evaluation_copies_and_pickles(tiny_bert, calls: list) -> None:
    apply_fused_bias_gelu(tiny_bert)
    batch = padded_batch(rows=2, length=6)
    twins = (copy.deepcopy(tiny_bert), pickle.loads(pickle.dumps(tiny_bert)))
    gradients = []
    for way in ("plain", "checkpointed"):
        if way == "checkpointed":
            stock_checkpointing(tiny_bert)
        tiny_bert.train().zero_grad()
        tiny_bert(**batch).loss.backward()
        gradients.append([p.grad.clone() for p in tiny_bert.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(calls) == 6
    tiny_bert.eval()
    for twin in twins:
        assert torch.equal(twin.eval()(**batch).logits, tiny_bert(**batch).logits)
        assert isinstance(twin.bert.encoder.layer[0].intermediate, _FusedIntermediate)


def test_trains_unpadded_and_compiled_in_a_trainer(make_trainer, calls: list) -> None:
    algorithm = FusedBiasGELU()
    compiler = TorchCompile(scope="block", backend="aot_eager", fullgraph=True)
    trainer = make_trainer([compiler, algorithm, Unpadding()], rows=8)
    before = trainer.state.model.model.bert.encoder.layer[0].intermediate.dense.bias.detach().clone()
    trainer.fit()
    after = trainer.state.model.model.bert.encoder.layer[0].intermediate.dense.bias
    assert algorithm.evidence == {"changed": 2, "left_alone": 0, "kernel": "C" if kernel.native() else "PyTorch"}
    assert after.isfinite().all() and not torch.equal(before, after) and calls
    torch._dynamo.reset()


def test_missing_triton_names_the_remedy(monkeypatch) -> None:
    cuda = torch.device("cuda", 0)
    assert FusedBiasGELU().unavailable(cuda) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in FusedBiasGELU().unavailable(cuda)


def test_a_device_without_kernels_is_refused(tiny_bert, monkeypatch) -> None:
    assert "its kernels are for CUDA and for CPUs" in FusedBiasGELU().unavailable(torch.device("mps"))
    monkeypatch.setattr("composer_speedups.algorithms.fused_bias_gelu.missing_kernel", lambda device: "no kernel")
    with pytest.raises(SpeedUpUnavailable, match="apply_fused_bias_gelu cannot be used here: no kernel"):
        apply_fused_bias_gelu(tiny_bert)


def test_without_a_compiler_pytorch_serves(tiny_bert, monkeypatch, calls: list) -> None:
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    monkeypatch.setattr(kernel, "native", lambda: None)
    assert apply_fused_bias_gelu(changed) == 2
    check_model(changed, stock, padded_batch(rows=2, length=6))
    assert calls == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_kernel_refuses_is_computed_as_ever(tiny_bert, dtype: torch.dtype, monkeypatch, calls: list) -> None:
    layer, x = random_weights(tiny_bert).bert.encoder.layer[0].intermediate, torch.randn(3, 32)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = layer(x)
        apply_fused_bias_gelu(tiny_bert)
        monkeypatch.setattr(kernel, "why_not", lambda *arguments: "refused")
        out = layer(x)
    assert out.dtype == expected.dtype == dtype and calls == []
    torch.testing.assert_close(out, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)  # values up to 8 or so


def test_an_adapter_put_on_later_is_heard(tiny_bert, calls: list) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not on every machine that is lent")
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    assert apply_fused_bias_gelu(changed) == 2
    batch, wanted = padded_batch(rows=2, length=6), peft.LoraConfig(target_modules=["dense"], lora_dropout=0.0)
    adapted = []
    for model in (stock, changed):
        with_adapters = peft.get_peft_model(model, wanted)
        with torch.no_grad():
            for name, p in with_adapters.named_parameters():
                if "lora" in name:
                    p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
        adapted.append(with_adapters)
    torch.testing.assert_close(adapted[1](**batch).logits, adapted[0](**batch).logits)
    assert calls == []


def test_under_torch_func_the_layer_takes_its_own_code(tiny_bert, calls: list) -> None:
    layer, x = tiny_bert.bert.encoder.layer[0].intermediate, torch.randn(3, 32)
    expected = layer(x)
    apply_fused_bias_gelu(tiny_bert)
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
    assert calls == []


def distilbert() -> torch.nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=128, dim=32, n_layers=2, n_heads=2, hidden_dim=64, dropout=0.0, attention_dropout=0.0
    )
    config.seq_classif_dropout, config.num_labels = 0.0, 3
    return transformers.DistilBertForSequenceClassification(config)


@pytest.mark.parametrize("ends", [False, True], ids=["alone", "with fused ends"])
def test_distilbert_matches_float64(ends: bool, calls: list) -> None:
    stock = random_weights(distilbert()).eval()
    changed = copy.deepcopy(stock)
    if ends:
        apply_fused_dropout_add_norm(changed)
    assert apply_fused_bias_gelu(changed) == 2 and apply_fused_bias_gelu(changed) == 0
    batch = padded_batch(rows=2, length=6)
    batch.pop("token_type_ids", None)
    check_model(changed, stock, batch)
    assert calls == [torch.float32] * 2


@pytest.mark.parametrize("heard", ["lin1", "activation"])
def test_hooks_in_distilberts_block_are_called(heard: str, calls: list) -> None:
    model, seen = distilbert().eval(), []
    batch = padded_batch()
    batch.pop("token_type_ids", None)
    expected = model(**batch).logits
    apply_fused_bias_gelu(model)
    model.distilbert.transformer.layer[0].ffn.get_submodule(heard).register_forward_hook(lambda *_: seen.append(heard))
    torch.testing.assert_close(model(**batch).logits, expected)
    assert seen == [heard] and len(calls) == 1, "the other layer alone is fused"


def test_distilberts_block_in_chunks_copies_and_one_of_ones_own(calls: list) -> None:
    model = distilbert().eval()
    batch = padded_batch()
    batch.pop("token_type_ids", None)
    expected = model(**batch).logits
    first, second = (layer.ffn for layer in model.distilbert.transformer.layer)
    first.ff_chunk = first.ff_chunk
    assert apply_fused_bias_gelu(model) == 1, "one has a method of its own"
    second.chunk_size_feed_forward = 4
    torch.testing.assert_close(model(**batch).logits, expected)
    chunks = len(calls)
    assert chunks > 1
    del first.ff_chunk
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(**batch).logits, expected)
    assert len(calls) == 3 * chunks


def test_a_layer_changed_by_its_owner_is_left_alone(tiny_bert) -> None:
    first, second = (layer.intermediate for layer in tiny_bert.bert.encoder.layer)
    first.forward = lambda hidden_states: hidden_states
    assert apply_fused_bias_gelu(tiny_bert) == 1 and isinstance(second, _FusedIntermediate)


def test_an_activation_changed_later_is_what_counts(tiny_bert, calls: list) -> None:
    apply_fused_bias_gelu(tiny_bert)
    layer, x = tiny_bert.bert.encoder.layer[0].intermediate, torch.randn(3, 32)
    layer.intermediate_act_fn = torch.nn.ReLU()
    assert torch.equal(layer(x), torch.relu(layer.dense(x))) and calls == []


def test_warns_when_nothing_fits(make_trainer) -> None:
    linear = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match="no layer in the model is dense and activation"):
        make_trainer([FusedBiasGELU()], model=linear)


@pytest.mark.gpu
def test_trains_on_the_gpu(make_trainer, calls: list) -> None:
    algorithm = FusedBiasGELU()
    make_trainer([algorithm], device="gpu", precision="amp_fp16").fit()
    assert algorithm.evidence["changed"] == 2 and algorithm.evidence["kernel"] == "Triton" and calls
