from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from composer.algorithms.warnings import NoEffectWarning
from composer.models import ComposerClassifier, HuggingFaceModel
from dropout_add_norm_check import kept
from model_check import check_model, random_weights
from small import bert_config, checkpoint_blocks, config_of, padded_batch
from torch._dynamo.utils import counters

import composer_speedups
from composer_speedups import FusedDropoutAddNorm, apply_fused_dropout_add_norm, post_norm
from composer_speedups.algorithms import fused_dropout_add_norm as module
from composer_speedups.compat import distilbert_attention
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.kernels import dropout_add_norm as kernel

FAMILIES = [
    "Bert",
    "Roberta",
    "XLMRoberta",
    "Camembert",
    "Electra",
    "DebertaV2",
    "DistilBert",
    "MPNet",
    "Data2VecText",
    "Ernie",
]
NEWER = [f for f in ("NomicBert", "JinaEmbeddingsV3", "Gte") if hasattr(transformers, f"{f}Config")]
# Four ways to the kernel: by the end of each half of a layer, by the layer, by what is around its attention, and by a
# layer that adds no bias itself.
each_kind = pytest.mark.parametrize("family", ["Bert", "DistilBert", "MPNet", *NEWER[:1]])


def small(family: str, p: float = 0.0) -> transformers.PretrainedConfig:
    values = bert_config(hidden_dropout_prob=p, attention_probs_dropout_prob=p).to_diff_dict()
    return config_of(family, **{k: v for k, v in values.items() if k != "model_type"}, num_labels=3)


def bert(p: float = 0.0, family: str = "Bert") -> torch.nn.Module:
    cls = getattr(transformers, f"{family}ForSequenceClassification")
    return cls._from_config(small(family, p), attn_implementation="eager")


@pytest.fixture
def calls(monkeypatch) -> list[torch.dtype]:
    """The dtype of each input that the kernel was given."""
    seen: list[torch.dtype] = []
    forward = kernel._forward
    monkeypatch.setattr(kernel, "_forward", lambda x, *rest: seen.append(x.dtype) or forward(x, *rest))
    return seen


@pytest.mark.parametrize("family", [*FAMILIES, *NEWER])
def test_takes_every_familys_blocks_once(family: str) -> None:
    model = getattr(transformers, f"{family}Model")(small(family))
    before = [(n, id(p), p.requires_grad) for n, p in model.named_parameters()]
    keys = list(model.state_dict())
    assert apply_fused_dropout_add_norm(model) == 4
    assert apply_fused_dropout_add_norm(model) == 0
    assert [(n, id(p), p.requires_grad) for n, p in model.named_parameters()] == before
    assert list(model.state_dict()) == keys


@each_kind
@pytest.mark.parametrize("padded", [True, False])
def test_matches_float64(padded: bool, family: str, calls: list) -> None:
    stock = random_weights(bert(family=family)).eval()
    changed = copy.deepcopy(stock)
    assert apply_fused_dropout_add_norm(changed) == 4
    batch = padded_batch(rows=2, length=6)
    if not padded:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    check_model(changed, stock, batch)
    assert calls == [torch.float32] * 4


@each_kind
@pytest.mark.parametrize("fault", ["bias", "eps", "residual", "x_bias"])
def test_the_check_finds_a_planted_fault(fault: str, family: str, monkeypatch) -> None:
    if (fault, family) == ("x_bias", "NomicBert"):
        pytest.skip("its products have no bias")
    stock = random_weights(bert(family=family)).eval()
    changed = copy.deepcopy(stock)
    apply_fused_dropout_add_norm(changed)
    right = kernel.dropout_add_norm
    wrong = {
        "bias": lambda x, r, w, b, p, eps, x_bias: right(x, r, w, b * 0, p, eps, x_bias),
        "eps": lambda x, r, w, b, p, eps, x_bias: right(x, r, w, b, p, 1e-3, x_bias),
        "residual": lambda x, r, w, b, p, eps, x_bias: right(x, x, w, b, p, eps, x_bias),
        "x_bias": lambda x, r, w, b, p, eps, x_bias: right(x, r, w, b, p, eps, None if x_bias is None else x_bias * 0),
    }
    monkeypatch.setattr(kernel, "dropout_add_norm", wrong[fault])
    with pytest.raises(AssertionError, match="is off by"):
        check_model(changed, stock, padded_batch(rows=2, length=6))


def test_dropout_is_that_of_the_mask_in_training_only() -> None:
    block = random_weights(bert(0.4)).bert.encoder.layer[0].output.double()
    hidden, residual = torch.randn(5, 7, 64).double(), torch.randn(5, 7, 32).double()
    expected = block.eval()(hidden, residual)
    apply_fused_dropout_add_norm(block)
    torch.testing.assert_close(block(hidden, residual), expected, rtol=1e-12, atol=1e-12)
    x = block.dense(hidden)
    keep = kept(x, 0.4, 9)
    torch.manual_seed(9)
    out = block.train()(hidden, residual)
    norm = block.LayerNorm
    wanted = kernel.reference_dropout_add_norm(x, residual, norm.weight, norm.bias, keep, 0.4, norm.eps)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)


def test_of_distilberts_layer_one_end_drops() -> None:
    """Behind the feed-forward block, with the mask of the next keys; not behind the attention."""
    layer = random_weights(bert(0.4, "DistilBert")).distilbert.transformer.layer[0].double()
    layer.attention.dropout.p = 0.0
    hidden = torch.randn(5, 7, 32).double()
    mask = torch.ones(5, 7) if transformers.__version__.startswith("4.") else None  # all tokens are real
    layer.eval()
    attended = layer.sa_layer_norm(distilbert_attention(layer, hidden, mask) + hidden)
    x = layer.ffn(attended)
    encoder = torch.nn.Module()
    encoder.config, encoder.transformer = transformers.DistilBertConfig(), torch.nn.Module()
    encoder.transformer.layer = torch.nn.ModuleList([layer])
    assert apply_fused_dropout_add_norm(encoder) == 2
    keep = kept(x, 0.4, 9)
    torch.manual_seed(9)
    out = layer.train()(hidden, mask)
    norm = layer.output_layer_norm
    wanted = kernel.reference_dropout_add_norm(x, attended, norm.weight, norm.bias, keep, 0.4, norm.eps)
    torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_computes_in_the_autocast_dtype_with_float32_weights(dtype: torch.dtype, calls: list) -> None:
    block = random_weights(bert()).bert.encoder.layer[0].output
    apply_fused_dropout_add_norm(block)
    hidden, residual = (
        torch.randn(5, 64),
        torch.randn(5, 32, requires_grad=True),
    )  # a residual in float32, as after a norm
    with torch.autocast("cpu", dtype):
        out = block(hidden, residual)
        x = F.linear(hidden, block.dense.weight)
    assert out.dtype == dtype and calls == [dtype]
    norm = block.LayerNorm
    *doubles, x_bias = [t.detach().double() for t in (x, residual.to(dtype), norm.weight, norm.bias, block.dense.bias)]
    exact = kernel.reference_dropout_add_norm(*doubles, eps=norm.eps, x_bias=x_bias)  # the bias is not rounded
    # One rounding of the result, of values up to 4 times a weight of 2: half an eps of 8, and as much for the sums.
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)
    out.sum().backward()
    gradients = [t.grad.dtype for t in (norm.weight, residual, block.dense.weight, block.dense.bias)]
    assert gradients == [torch.float32] * 4


@each_kind
def test_masks_are_torchs_in_distribution(family: str) -> None:
    """Mean and spread of the loss over many masks are those of the stock model."""
    batch, losses = padded_batch(), {}
    for fused in (False, True):
        torch.manual_seed(0)
        model = bert(0.3, family)
        if fused:
            apply_fused_dropout_add_norm(model)
        with torch.no_grad():
            losses[fused] = torch.stack([model(**batch).loss for _ in range(200)])
    mean, spread = (torch.stack([f(losses[False]), f(losses[True])]) for f in (torch.mean, torch.std))
    # The mean of 200 draws has a standard error of spread / sqrt(200), the spread itself of spread / sqrt(400).
    assert float((mean[0] - mean[1]).abs()) < 5 * float(spread.max()) * (2 / 200) ** 0.5
    assert float((spread[0] - spread[1]).abs()) < 5 * float(spread.max()) * (2 / 400) ** 0.5


@each_kind
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_draws_the_same_masks(reentrant: bool, family: str) -> None:
    model, gradients = bert(0.3, family).train(), []
    apply_fused_dropout_add_norm(model)
    for way in ("plain", "checkpointed"):
        if way == "checkpointed":
            checkpoint_blocks(model, reentrant)
        model.zero_grad()
        torch.manual_seed(3)
        model(**padded_batch()).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@each_kind
def test_copies_and_pickles(family: str) -> None:
    model, batch = bert(family=family), padded_batch()
    apply_fused_dropout_add_norm(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**batch).logits, model(**batch).logits)
        assert any(isinstance(m, post_norm.FUSED) for m in twin.modules())
        assert apply_fused_dropout_add_norm(twin) == 0


def test_hooks_and_functional_transforms_take_the_blocks_own_code(calls: list) -> None:
    model, seen = bert(), []
    apply_fused_dropout_add_norm(model)
    block = model.bert.encoder.layer[0].output
    hidden, residual = torch.randn(3, 64), torch.randn(3, 32)
    expected = block(hidden, residual)
    handles = [m.register_forward_hook(lambda m, *_: seen.append(type(m))) for m in (block.LayerNorm, block.dropout)]
    torch.testing.assert_close(block(hidden, residual), expected)
    assert seen == [post_norm.DropoutOfBlock, post_norm.NormOfBlock]
    for handle in handles:
        handle.remove()
    mapped = torch.func.vmap(block.eval())(hidden[:, None], residual[:, None])[:, 0]
    torch.testing.assert_close(mapped, expected)
    assert len(calls) == 1


@pytest.mark.parametrize("heard", ["sa_layer_norm", "output_layer_norm", "ffn", "ffn.dropout"])
def test_hooks_in_distilberts_layer_take_its_own_code(heard: str, calls: list) -> None:
    model, seen = bert(family="DistilBert"), []
    apply_fused_dropout_add_norm(model)
    expected = model(**padded_batch()).logits
    first = model.distilbert.transformer.layer[0]
    first.get_submodule(heard).register_forward_hook(lambda m, *_: seen.append(m))
    calls.clear()
    torch.testing.assert_close(model(**padded_batch()).logits, expected)
    assert seen == [first.get_submodule(heard)] and len(calls) == 2, "the other layer alone is fused"


class Doubling(torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Halving(torch.nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@pytest.mark.parametrize("new", [Doubling, torch.nn.RMSNorm, Halving], ids=lambda cls: cls.__name__)
@each_kind
def test_what_somebody_puts_in_afterwards_is_called(family: str, new: type, calls: list) -> None:
    """A norm that is no LayerNorm, or one that computes more; another dropout."""
    stock = random_weights(bert(family=family)).eval()
    changed = copy.deepcopy(stock)
    apply_fused_dropout_add_norm(changed)
    for model in (stock, changed):
        first = next(m for m in model.modules() if type(m) is torch.nn.ModuleList)[0]
        parts = [name for name, m in first.named_modules() if isinstance(m, torch.nn.LayerNorm | torch.nn.Dropout)]
        # The last norm of the block, or the dropout before it.
        last = "dropout" if new is Halving else ("LayerNorm", "output_layer_norm", "post_mlp_layernorm")
        name = [n for n in parts if n.endswith(last)][-1]
        owner, _, name = name.rpartition(".")
        setattr(first.get_submodule(owner), name, new(0.1) if new is Halving else new(32))
    calls.clear()
    torch.testing.assert_close(changed(**padded_batch()).logits, stock(**padded_batch()).logits)
    assert len(calls) == {"DistilBert": 2, "Bert": 3, "MPNet": 3, "NomicBert": 2}[family], "all others are fused"


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # what PEFT says of every LayerNorm
@pytest.mark.parametrize("kind", ["LNTuning", "modules_to_save"])
def test_adapters_of_norms_may_come_afterwards(kind: str) -> None:
    from peft import LNTuningConfig, LoraConfig, get_peft_model

    tuned = {
        "LNTuning": lambda: LNTuningConfig(task_type="SEQ_CLS", target_modules=["LayerNorm"]),
        "modules_to_save": lambda: LoraConfig(
            task_type="SEQ_CLS", target_modules=["query"], modules_to_save=["LayerNorm"]
        ),
    }[kind]
    stock, results = random_weights(bert()), []
    for fused in (False, True):
        model = copy.deepcopy(stock)
        if fused:
            apply_fused_dropout_add_norm(model)
        model = get_peft_model(model, tuned())
        loss = model(**padded_batch()).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        results.append(loss.detach())
    torch.testing.assert_close(*results)


def test_a_hook_on_a_linear_layer_is_called_and_the_end_still_fused(calls: list) -> None:
    for family, name in (
        ("Bert", "bert.encoder.layer.0.output.dense"),
        ("DistilBert", "distilbert.transformer.layer.0.ffn.lin2"),
    ):
        model, seen = bert(family=family).eval(), []
        expected = model(**padded_batch()).logits
        apply_fused_dropout_add_norm(model)
        model.get_submodule(name).register_forward_hook(lambda m, _, out, seen=seen: seen.append(out))
        calls.clear()
        torch.testing.assert_close(model(**padded_batch()).logits, expected)
        assert len(seen) == 1 and len(calls) == 4, family


def test_what_the_kernel_refuses_is_computed_as_ever(monkeypatch) -> None:
    """With the linear layer's bias, and in the dtype of its product."""
    block = random_weights(bert()).bert.encoder.layer[0].output.eval()
    hidden, residual = torch.randn(5, 64), torch.randn(5, 32)
    for dtype in (torch.float32, torch.bfloat16):
        low = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
        changed = copy.deepcopy(block)
        with low:
            expected = block(hidden, residual.to(dtype))
            apply_fused_dropout_add_norm(changed)
            with monkeypatch.context() as patch:
                patch.setattr(kernel, "why_not", lambda *arguments: "refused")
                out = changed(hidden, residual.to(dtype))
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)  # values up to 8 or so


def test_what_distilberts_own_code_must_answer(calls: list) -> None:
    """Attention weights, and a feed-forward block in chunks."""
    model = bert(family="DistilBert").eval()
    stock = copy.deepcopy(model)
    apply_fused_dropout_add_norm(model)
    one, other = (m(**padded_batch(), output_attentions=True) for m in (stock, model))
    assert len(one.attentions) == len(other.attentions) == 2
    torch.testing.assert_close(other.attentions, one.attentions)
    calls.clear()
    for layer in model.distilbert.transformer.layer:
        layer.ffn.chunk_size_feed_forward = 4
    torch.testing.assert_close(model(**padded_batch()).logits, one.logits)
    assert not calls


def test_the_rest_is_for_the_others(make_trainer) -> None:
    """Whatever the order listed: blocks first, then norms and dropouts that are in no block."""
    from composer_speedups import FastDropout, LowPrecisionNorm

    algorithms = [LowPrecisionNorm(), FastDropout(), FusedDropoutAddNorm()]
    model = bert(0.1)
    dropouts = sum(type(m) is torch.nn.Dropout for m in model.modules())
    make_trainer(algorithms, model=HuggingFaceModel(model))
    assert [a.evidence["changed"] for a in algorithms] == [1, dropouts - 4, 4]
    # By functions in another order the same modules end in the blocks.
    other = bert(0.1)
    composer_speedups.apply_low_precision_norm(other)
    composer_speedups.apply_fast_dropout(other)
    assert apply_fused_dropout_add_norm(other) == 4
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]


def test_leaves_what_it_does_not_know_alone() -> None:
    class Own(torch.nn.LayerNorm):
        pass

    model = bert()
    first, second = model.bert.encoder.layer
    first.output.LayerNorm.__class__ = Own
    second.output.forward = None  # an instance's own forward pass is called instead of the class's
    first.attention.output.dropout = torch.nn.AlphaDropout(0.1)
    assert apply_fused_dropout_add_norm(model) == 1
    assert isinstance(second.attention.output, post_norm.FusedEnd)


@pytest.mark.parametrize("family", ["Bert", "DistilBert", pytest.param("MPNet", marks=pytest.mark.elsewhere)])
def test_trains_unpadded_compiled_and_with_everything_else(make_trainer, family: str, calls: list) -> None:
    from composer_speedups import (
        FastDropout,
        LastLayerSubset,
        LowPrecisionNorm,
        MixedPrecision,
        TorchCompile,
        Unpadding,
    )

    results = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(1)
        algorithm = FusedDropoutAddNorm()
        compiler = TorchCompile(scope="block", backend="aot_eager", dynamic=True)
        others = [FastDropout(), LastLayerSubset(), LowPrecisionNorm(), MixedPrecision("bf16"), Unpadding()]
        trainer = make_trainer([compiler, algorithm, *others], model=HuggingFaceModel(bert(0.1, family)))
        trainer.fit()
        assert not counters["graph_break"]
        assert algorithm.evidence["changed"] == 4 and algorithm.evidence["kernel"] in ("C", "PyTorch")
        results.append(next(trainer.state.model.model.classifier.parameters()).detach().clone())
    assert set(calls) == {torch.bfloat16}
    assert torch.equal(*results)
    torch._dynamo.reset()


@each_kind
def test_unpadded_equals_padded(family: str) -> None:
    stock = random_weights(bert(family=family)).eval()
    changed = copy.deepcopy(stock)
    composer_speedups.apply_unpadding(changed)
    apply_fused_dropout_add_norm(changed)
    check_model(changed, stock, padded_batch())


def test_refused_where_there_is_no_kernel(monkeypatch) -> None:
    assert FusedDropoutAddNorm().unavailable(torch.device("cpu")) is None
    assert "remove it" in FusedDropoutAddNorm().unavailable(torch.device("mps"))
    assert FusedDropoutAddNorm().unavailable(torch.device("cuda")) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in FusedDropoutAddNorm().unavailable(torch.device("cuda"))
    model = bert()
    monkeypatch.setattr(module, "missing_kernel", lambda device: "no kernel")
    with pytest.raises(SpeedUpUnavailable, match="apply_fused_dropout_add_norm cannot be used here: no kernel"):
        apply_fused_dropout_add_norm(model)
    assert not any(isinstance(m, post_norm.FUSED) for m in model.modules())


def test_what_is_around_an_attention_may_have_a_forward_of_its_own() -> None:
    """As Accelerate's hooks give it one: an instance's, which would never reach what is mixed into the class."""
    model = bert(family="MPNet")
    around = model.mpnet.encoder.layer[0].attention
    around.forward = around.forward
    assert apply_fused_dropout_add_norm(model) == 3
    assert type(around.LayerNorm) is torch.nn.LayerNorm


def test_warns_when_nothing_to_replace(make_trainer) -> None:
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match="no block in the model ends in dropout"):
        make_trainer([FusedDropoutAddNorm()], model=model)


@each_kind
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
def test_trains_on_the_gpu(make_trainer, precision: str, family: str) -> None:
    algorithm = FusedDropoutAddNorm()
    make_trainer([algorithm], model=HuggingFaceModel(bert(0.1, family)), device="gpu", precision=precision).fit()
    assert algorithm.evidence == {"changed": 4, "kernel": "Triton"}
