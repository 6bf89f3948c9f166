from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings

import pytest
import torch
import transformers
from composer.algorithms.warnings import NoEffectWarning
from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from composer.models import HuggingFaceModel
from small import bert_config, padded_batch, stock_checkpointing

import composer_speedups.algorithms.masked_token_head as module
from composer_speedups import MaskedTokenHead, Unpadding, apply_masked_token_head, apply_unpadding
from composer_speedups.errors import SpeedUpUnavailable

SHAPE = dict(
    vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=66, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
FAMILIES = {
    "Bert": SHAPE,
    "Roberta": SHAPE,
    "Electra": SHAPE | {"embedding_size": 16},
    "Albert": SHAPE | {"embedding_size": 16},
    "MPNet": SHAPE,
    "DebertaV2": SHAPE,
    "Esm": SHAPE | {"position_embedding_type": "rotary", "pad_token_id": 0, "mask_token_id": 4},
    "DistilBert": dict(
        vocab_size=128, dim=32, n_layers=2, n_heads=4, hidden_dim=64, dropout=0.0, attention_dropout=0.0
    ),
    "ModernBert": dict(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, reference_compile=False,
    ),
    "NomicBert": SHAPE | {"head_dim": 8},
    "JinaEmbeddingsV3": SHAPE | {"pad_token_id": 0},
    "Gte": SHAPE | {"pad_token_id": 0},
    "EuroBert": dict(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        intermediate_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=4,
    ),
}  # fmt: skip
FAMILIES = {name: values for name, values in FAMILIES.items() if hasattr(transformers, f"{name}Config")}


def masked_lm(family: str = "Bert", seed: int = 0) -> torch.nn.Module:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    torch.manual_seed(seed)
    return getattr(transformers, f"{family}ForMaskedLM")._from_config(config, attn_implementation="eager")


def mlm_batch(rows: int = 6, length: int = 16) -> dict[str, torch.Tensor]:
    batch = padded_batch(rows, length)
    asked = (torch.rand(rows, length) < 0.3) & batch["attention_mask"].bool()
    asked[:, 1] = True
    batch["labels"] = torch.where(asked, batch["input_ids"], -100)
    return batch


def loss_and_gradients(model: torch.nn.Module, batch: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model.train()(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def difference(model: torch.nn.Module, batch: dict, **arguments) -> float:
    """The largest deviation of loss and gradients from the stock model's in float64, relative to the largest value."""
    model = model.double()
    loss, gradients = loss_and_gradients(model, batch)
    assert apply_masked_token_head(model, **arguments) == 1
    new_loss, new = loss_and_gradients(model, batch)
    assert new.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())
    worst = max(float((new[n] - g).abs().max()) for n, g in gradients.items()) / largest
    return max(worst, abs(float(new_loss - loss)) / float(loss))


@pytest.mark.parametrize("capacity", [None, 0.75])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_all_gradients_equal_the_stock_models(family: str, capacity: float | None) -> None:
    # Sums of a few hundred float64 terms in another order: a hundred times eps, 2e-14. transformers takes the loss of
    # some families in float32, though, whose last step is then the same but for sums: 1e-6.
    assert difference(masked_lm(family), mlm_batch(), capacity=capacity) < 1e-6
    if family == "Bert" and not transformers.__version__.startswith("5"):
        assert difference(masked_lm(family), mlm_batch(), capacity=capacity) < 2e-14


@pytest.mark.parametrize("fault", ["other places", "one too few", "labels in another order"])
def test_faulty_choices_fail(fault: str, monkeypatch) -> None:
    right = module._places

    def wrong(labels: torch.Tensor, capacity: float | None) -> torch.Tensor:
        places = right(labels, capacity)
        if fault == "one too few":
            return places[1:]
        return places if fault == "labels in another order" else (places + 1) % len(labels)

    monkeypatch.setattr(module, "_places", wrong)
    if fault == "labels in another order":
        stock = module._Gathers.forward

        def reversed_order(self, *args, **kwargs):
            out = stock(self, *args, **kwargs)
            if module._here.now is not None:
                out["last_hidden_state"] = out[0].flip(1)
            return out

        monkeypatch.setattr(module._Gathers, "forward", reversed_order)
    assert difference(masked_lm(), mlm_batch()) > 1e-3


def test_logits_of_training_are_those_of_the_predicted_tokens() -> None:
    model, batch = masked_lm(), mlm_batch()
    expected = model.train()(**batch).logits[batch["labels"] != -100]
    apply_masked_token_head(model)
    logits = model(**batch).logits
    assert logits.shape == (1, int((batch["labels"] != -100).sum()), 128)
    torch.testing.assert_close(logits[0], expected)


def test_evaluation_and_calls_without_labels_are_untouched() -> None:
    model, batch = masked_lm(), mlm_batch()
    ids = {k: v for k, v in batch.items() if k != "labels"}
    expected, without = model.eval()(**batch), model.train()(**ids).logits
    apply_masked_token_head(model)
    out = model.eval()(**batch)
    assert torch.equal(out.logits, expected.logits) and torch.equal(out.loss, expected.loss)
    assert torch.equal(model.train()(**ids).logits, without)


def test_tuples_and_batches_with_nothing_to_predict() -> None:
    model, batch = masked_lm().train(), mlm_batch()
    loss = model(**batch).loss
    apply_masked_token_head(model)
    assert torch.allclose(model(**batch, return_dict=False)[0], loss)
    batch["labels"][:] = -100
    assert model(**batch).loss.isnan()  # as the stock model's


def test_modernberts_own_choice_of_tokens_may_find_none() -> None:
    model, batch = masked_lm("ModernBert").train(), mlm_batch()
    model.sparse_prediction = True
    expected = model(**batch).loss
    apply_masked_token_head(model)
    torch.testing.assert_close(model(**batch).loss, expected)
    batch["labels"][:] = -100
    loss = model(**batch).loss
    assert loss.isnan()  # as the stock model's
    loss.backward()


@pytest.mark.parametrize("rows", [1, 3])
def test_an_encoder_of_words_and_images_is_refused(rows: int) -> None:
    config = transformers.ViltConfig(**SHAPE, image_size=32, patch_size=16)
    model, batch = transformers.ViltForMaskedLM(config).train(), mlm_batch(rows, 8)
    images = dict(pixel_values=torch.randn(rows, 3, 32, 32), pixel_mask=torch.ones(rows, 32, 32).long())
    expected = model.eval()(**batch, **images).loss
    apply_masked_token_head(model)
    with pytest.raises(SpeedUpUnavailable, match=r"ViltModel returns .* leave masked_token_head out"):
        model.train()(**batch, **images)
    assert torch.equal(model.eval()(**batch, **images).loss, expected)


def test_capacity_that_is_too_small_raises() -> None:
    model = masked_lm().train()
    apply_masked_token_head(model, capacity=0.05)
    with pytest.raises(RuntimeError, match=r"more tokens to predict than capacity=0\.05"):
        model(**mlm_batch())
    apply_masked_token_head(small := masked_lm().train(), capacity=1.0)
    assert small(**mlm_batch()).logits.shape[1] == 6 * 16


def test_keeps_keys_tying_name_and_signature() -> None:
    model = masked_lm()
    keys, parameters, signature = (
        list(model.state_dict()),
        list(map(id, model.parameters())),
        inspect.signature(model.forward),
    )
    apply_masked_token_head(model)
    assert list(model.state_dict()) == keys and list(map(id, model.parameters())) == parameters
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert type(model).__name__ == "BertForMaskedLM"  # written to config.json
    assert inspect.signature(model.forward) == signature  # Composer and the Trainer of Hugging Face drop other keys
    assert apply_masked_token_head(model) == 0


@pytest.mark.parametrize("unpadded", [False, True])
def test_copies_and_pickles(unpadded: bool) -> None:
    model, batch = masked_lm().train(), mlm_batch()
    if unpadded:
        apply_unpadding(model)
    apply_masked_token_head(model)
    shape = model(**batch).logits.shape
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(**batch).logits.shape == shape == (1, int((batch["labels"] != -100).sum()), 128)


def test_threads_may_share_a_model() -> None:
    """Each thread waits inside of the encoder until the other is there, with other tokens to predict."""
    model = masked_lm().train()
    batches = [mlm_batch(), mlm_batch()]
    batches[1]["labels"] = batches[1]["labels"].roll(1, 1)
    expected = [model(**batch).loss for batch in batches]
    assert abs(float((expected[0] - expected[1]).detach())) > 1e-3
    apply_masked_token_head(model)
    meet = threading.Barrier(2, timeout=60)
    found = [None, None]

    def wait(*_: object) -> None:
        meet.wait()

    model.base_model.embeddings.register_forward_pre_hook(wait)

    def call(number: int) -> None:
        found[number] = model(**batches[number]).loss

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, expected)


def test_gradients_of_each_sample() -> None:
    """By `vmap`, where one number of tokens stands for all: logits are for all of them, as without."""
    model, batch = masked_lm().train(), mlm_batch()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    # One mask for all: of one a sample transformers 5 asks whether it is all ones, and 4.53 without any for padding.
    mask = torch.ones_like(batch["input_ids"][:1])

    def loss(parameters, ids, labels):
        given = {"input_ids": ids[None], "attention_mask": mask, "labels": labels[None]}
        return torch.func.functional_call(model, parameters, kwargs=given).loss

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    given = batch["input_ids"], batch["labels"]
    expected = each(parameters, *given)
    apply_masked_token_head(model)
    torch.testing.assert_close(each(parameters, *given), expected)


def test_goes_together_with_unpadding() -> None:
    plain, both = masked_lm().double(), masked_lm().double()
    batch = mlm_batch()
    apply_unpadding(both)
    apply_masked_token_head(both)
    loss, gradients = loss_and_gradients(plain, batch)
    new_loss, new = loss_and_gradients(both, batch)
    assert abs(float(loss - new_loss)) < 1e-6
    for name, gradient in gradients.items():
        torch.testing.assert_close(new[name], gradient, rtol=1e-5, atol=1e-7)


def test_gradient_checkpointing() -> None:
    model, batch = masked_lm(), mlm_batch()
    _, expected = loss_and_gradients(model, batch)
    apply_masked_token_head(model)
    stock_checkpointing(model)
    _, gradients = loss_and_gradients(model, batch)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_compiles_into_one_graph_with_a_capacity() -> None:
    model, batch = masked_lm().train(), mlm_batch()
    expected = model(**batch).loss
    apply_masked_token_head(model, capacity=0.75)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch).loss, expected)


class MlmRows(torch.utils.data.Dataset):
    def __init__(self, rows: int = 32) -> None:
        self.data = mlm_batch(rows)

    def __len__(self) -> int:
        return len(self.data["labels"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.data.items()}


def test_works_inside_a_trainer_that_evaluates(make_trainer) -> None:
    results = {}
    for algorithms in ([], [MaskedTokenHead()], [MaskedTokenHead(0.9), Unpadding()]):
        torch.manual_seed(0)
        rows = MlmRows()
        metrics = [LanguageCrossEntropy(), MaskedAccuracy(ignore_index=-100)]
        model = HuggingFaceModel(masked_lm(), use_logits=True, metrics=[], eval_metrics=metrics)
        trainer = make_trainer(
            algorithms, model=model, train_dataloader=torch.utils.data.DataLoader(rows, batch_size=8),
            eval_dataloader=torch.utils.data.DataLoader(rows, batch_size=8),
        )  # fmt: skip
        trainer.fit()
        results[len(algorithms)] = float(trainer.state.eval_metrics["eval"]["LanguageCrossEntropy"].compute())
        assert all(a.evidence["changed"] > 0 for a in algorithms)
    # Four steps of Adam, whose first ones have the sign of the gradient: rounding may move a few weights by 1e-3.
    assert results[1] == pytest.approx(results[0], abs=1e-4)
    assert results[2] == pytest.approx(results[0], abs=1e-4)


def test_refuses_train_metrics(make_trainer) -> None:
    model = HuggingFaceModel(masked_lm(), use_logits=True, metrics=[LanguageCrossEntropy()])
    with pytest.raises(SpeedUpUnavailable, match=r"metrics=\[\]"):
        make_trainer([MaskedTokenHead()], model=model)


def test_says_before_training_what_a_loss_of_ones_own_gets(make_trainer) -> None:
    class Own(HuggingFaceModel):
        def loss(self, outputs, batch):
            return 2 * outputs["loss"]

    for cls, warned in ((Own, True), (HuggingFaceModel, False)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            make_trainer([MaskedTokenHead()], cls(masked_lm(), use_logits=True, metrics=[]))
        assert any("Own has a loss of its own" in str(w.message) for w in told) is warned


def test_warns_where_there_is_no_masked_language_model(make_trainer) -> None:
    with pytest.warns(NoEffectWarning, match="ForMaskedLM"):
        make_trainer([MaskedTokenHead()])
    assert apply_masked_token_head(transformers.BertModel(bert_config())) == 0


@pytest.mark.parametrize("value, error", [(0.0, ValueError), (1.5, ValueError), ("half", TypeError), (True, TypeError)])
def test_arguments_are_checked(value: object, error: type) -> None:
    with pytest.raises(error, match="capacity"):
        MaskedTokenHead(capacity=value)


def test_capacity_has_room_for_its_share_and_no_more() -> None:
    """Of 96 tokens a tenth are 10; of one more no loss would know."""
    batch = mlm_batch()
    ids, places = batch["input_ids"].flatten(), batch["attention_mask"].flatten().nonzero()[:, 0]
    stock, model = masked_lm().train(), masked_lm().train()
    apply_masked_token_head(model, capacity=0.1)
    for count in (10, 11):
        labels = torch.full_like(ids, -100)
        labels[places[:count]] = ids[places[:count]]
        batch["labels"] = labels.view(6, 16)
        if count == 11:
            with pytest.raises(RuntimeError, match=r"more tokens to predict than capacity=0\.1 has room for \(10\)"):
                model(**batch)
        else:
            torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
