"""FusedCrossEntropy with its kernels, on the CPU: `test_interpreted.py` runs this file."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import transformers
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel
from small import padded_batch
from test_masked_token_head import MlmRows, loss_and_gradients, masked_lm, mlm_batch

from composer_speedups import FusedCrossEntropy, MaskedTokenHead, apply_fused_cross_entropy, apply_masked_token_head
from composer_speedups.algorithms import fused_cross_entropy
from composer_speedups.errors import ConflictError, SpeedUpUnavailable

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def gpt2() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def causal_batch() -> dict[str, torch.Tensor]:
    batch = padded_batch(3, 12)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    return batch


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "gpt2"])
def test_loss_and_gradients_equal_the_stock_models(kind: str, reuse: bool) -> None:
    model, batch = (gpt2(), causal_batch()) if kind == "gpt2" else (masked_lm(kind), mlm_batch(3, 12))
    loss, gradients = loss_and_gradients(model, batch)
    assert apply_fused_cross_entropy(model, reuse_logits=reuse) == 1
    new_loss, new = loss_and_gradients(model, batch)
    torch.testing.assert_close(new_loss, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(new[name], gradient, rtol=1e-4, atol=1e-6)
    assert apply_fused_cross_entropy(model) == 0


class WeighedForMaskedLM(transformers.BertForMaskedLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        out = super().forward(input_ids, attention_mask, labels=labels, **kwargs)
        out.loss = 2 * out.loss
        return out


@pytest.mark.parametrize("kind", ["Bart", "XLNet", "XLM", "own"])
def test_a_loss_that_is_not_known_is_left_alone(kind: str) -> None:
    """Older causal families take labels that are shifted already; a forward of the user's own may weigh the loss."""
    small: dict[str, object] = dict(vocab_size=64)
    if kind == "Bart":
        small |= dict(d_model=8, encoder_layers=1, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8)
        model = transformers.BartForCausalLM(transformers.BartConfig(**small, encoder_attention_heads=2))
    elif kind == "XLNet":
        model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**small, d_model=8, n_layer=1, n_head=2))
    elif kind == "XLM":
        model = transformers.XLMWithLMHeadModel(transformers.XLMConfig(n_words=64, emb_dim=8, n_layers=1, n_heads=2))
    else:
        model = WeighedForMaskedLM(masked_lm("Bert").config)
    assert apply_fused_cross_entropy(model) == 0


def of_parts(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model whose loss has a second part, and a batch of it: experts are to be used evenly; entities are masked."""
    torch.manual_seed(0)
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    ids = torch.randint(5, 64, (3, 8))
    if kind == "Luke":
        still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = transformers.LukeForMaskedLM(
            transformers.LukeConfig(**small, **still, entity_vocab_size=20, entity_emb_size=16)
        )
        places = torch.full((3, 2, 5), -1)
        places[..., 0] = 1
        entities = torch.randint(1, 20, (3, 2))
        more = dict(entity_ids=entities, entity_position_ids=places, entity_labels=entities)
        return model, dict(input_ids=ids, labels=ids, **more)
    experts = dict(num_key_value_heads=2, output_router_logits=True, router_aux_loss_coef=0.1, num_experts_per_tok=2)
    if kind == "Mixtral":
        config = transformers.MixtralConfig(**small, **experts, num_local_experts=4, sliding_window=None)
    else:
        sizes = dict(moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4)
        config = transformers.Qwen2MoeConfig(**small, **experts, **sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config), dict(input_ids=ids, labels=ids)


@pytest.mark.parametrize("way", ["refused", "taken", "as tuples"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Luke"])
def test_every_part_of_a_loss_is_kept(kind: str, way: str, monkeypatch) -> None:
    """Such models are known by their code; where that fails, what the stock code returns still tells."""
    model, batch = of_parts(kind)
    batch |= {"return_dict": False} if way == "as tuples" else {}
    model.train()
    expected = model(**batch)[0]
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    if way == "taken":
        monkeypatch.setattr(fused_cross_entropy, "_has_one_loss", lambda code: True)
    assert apply_fused_cross_entropy(model) == int(way == "taken")
    loss = model(**batch)[0]
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close((loss, found), (expected, gradients), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("given", [{"num_items_in_batch": 7}, {"ignore_index": 0}, {"shift_labels": True}])
def test_arguments_that_change_the_loss_are_obeyed(given: dict) -> None:
    model, batch = gpt2().eval(), causal_batch()
    batch["labels"] = batch["input_ids"]
    if "shift_labels" in given:
        given = {"shift_labels": batch["labels"]}
    expected = model(**batch, **given).loss
    plain = model(**batch).loss
    apply_fused_cross_entropy(model)
    assert torch.equal(model(**batch, **given).loss, expected) and not torch.allclose(expected, plain)


def test_a_loss_function_of_ones_own_is_left_alone() -> None:
    model = masked_lm("ModernBert")
    model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    assert apply_fused_cross_entropy(model) == 0
    assert apply_fused_cross_entropy(masked_lm("ModernBert")) == 1


@pytest.mark.parametrize("fault", ["ignored rows count", "sum", "temperature", "gradient of the sum"])
def test_planted_faults_are_found(fault: str, monkeypatch) -> None:
    from composer_speedups.kernels import cross_entropy as kernel

    right = kernel.cross_entropy

    def faulty(logits, labels, *args, **kwargs):
        if fault == "ignored rows count":
            return right(logits, labels.clamp_min(0), *args, **kwargs)
        if fault == "temperature":
            return right(logits * 1.1, labels, *args, **kwargs)
        loss, rows = right(logits, labels, *args, **kwargs), (labels != -100).sum()
        return loss * rows if fault == "sum" else loss * rows + (loss - loss * rows).detach()

    monkeypatch.setattr(kernel, "cross_entropy", faulty)
    with pytest.raises(AssertionError):
        test_loss_and_gradients_equal_the_stock_models("Bert", False)


def test_shift_of_a_causal_model_matters() -> None:
    model, batch = gpt2().eval(), causal_batch()
    expected = model(**batch).loss
    apply_fused_cross_entropy(model)
    torch.testing.assert_close(model(**batch).loss, expected)
    wrong = batch | {"labels": batch["labels"].roll(1, 1)}
    assert abs((model(**wrong).loss - expected).item()) > 1e-3


def test_outputs_keep_their_form() -> None:
    model, batch = masked_lm().eval(), mlm_batch(3, 12)
    stock, tuple_ = model(**batch), model(**batch, return_dict=False)
    signature = inspect.signature(model.forward)
    apply_fused_cross_entropy(model)
    new = model(**batch)
    assert list(new) == list(stock) == ["loss", "logits"] and torch.equal(new.logits, stock.logits)
    assert len(model(**batch, return_dict=False)) == len(tuple_) == 2
    assert model(input_ids=batch["input_ids"]).loss is None
    assert inspect.signature(model.forward) == signature
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**batch).loss, new.loss)


def test_together_with_masked_token_head() -> None:
    model, batch = masked_lm(), mlm_batch(3, 12)
    loss, gradients = loss_and_gradients(model, batch)
    apply_fused_cross_entropy(model)
    apply_masked_token_head(model)
    assert model.train()(**batch).logits.shape[0] == 1
    new_loss, new = loss_and_gradients(model, batch)
    torch.testing.assert_close(new_loss, loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(new[name], gradient, rtol=1e-4, atol=1e-6)
    other = masked_lm()
    apply_masked_token_head(other)
    with pytest.raises(ConflictError, match="swap the two"):
        apply_fused_cross_entropy(other)


def test_works_inside_a_trainer(make_trainer) -> None:
    algorithms = [MaskedTokenHead(), FusedCrossEntropy()]  # in the wrong order: stages put it right
    trainer = make_trainer(
        algorithms, model=HuggingFaceModel(masked_lm(), metrics=[]), max_duration="1ba",
        train_dataloader=torch.utils.data.DataLoader(MlmRows(8), batch_size=8),
    )  # fmt: skip
    trainer.fit()
    assert [a.evidence["changed"] for a in algorithms] == [1, 1]


def test_reuse_is_refused_beside_train_metrics(make_trainer) -> None:
    model = HuggingFaceModel(masked_lm(), metrics=[LanguageCrossEntropy()])
    with pytest.raises(SpeedUpUnavailable, match="train metrics"):
        make_trainer([FusedCrossEntropy(reuse_logits=True)], model=model)


def test_a_dry_run_counts_with_the_stock_loss() -> None:
    """The kernel needs numbers: `memory.predict` says that it was left out, and how much the stock loss keeps."""
    from composer_speedups.measurement.memory import predict
    from composer_speedups.recipes import load_recipe

    small = ["model.pretrained=false", "batch_size=4", "task.max_length=32", "model.config={num_hidden_layers: 1}"]
    small += ["speedups.mixed_precision.dtype=bf16", "speedups.matmul_precision.precision=highest"]  # what CPUs can
    recipes = [load_recipe("mlm/amp", [*small, *more]) for more in ([], ["speedups.fused_cross_entropy={}"])]
    stock, fused = (predict(recipe) for recipe in recipes)
    assert fused.activations == stock.activations
    assert [note for note in fused.notes if "fused_cross_entropy" in note] and not stock.notes
