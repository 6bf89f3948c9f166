"""`CUDAGraphs(scope="model")`: from the ids to the loss, for totals of tokens that are fixed beforehand."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.models import HuggingFaceModel
from small import BatchDataset
from test_cuda_graphs import FAMILIES, HEADS, LENGTH, ROWS, assert_close, batch_of, graphs_of, model_of, packed, train

from composer_speedups import (
    CUDAGraphs,
    MaskedTokenHead,
    Unpadding,
    apply_cuda_graphs,
    apply_masked_token_head,
    apply_unpadding,
)
from composer_speedups.errors import ConflictError
from composer_speedups.graphs.replay import Total
from composer_speedups.packed.fixed_total import FixedTotal, fixed_total, total_fixed
from composer_speedups.packed.packing import Packing


def test_where_tokens_are_is_the_same_on_the_device() -> None:
    """For all totals that serve a batch: the real tokens in order, and no token that is in no sequence."""
    draw = torch.Generator().manual_seed(0)
    for seed in range(200):
        rows, length = int(torch.randint(1, 9, (), generator=draw)), int(torch.randint(1, 40, (), generator=draw))
        share = float(torch.rand((), generator=draw))
        mask = (torch.rand(rows, length, generator=draw) < share).long()
        mask[:, 0] = 1
        step = int(torch.randint(1, 70, (), generator=draw))
        real, most = int(mask.sum()), mask.numel()
        wanted = Total(min(most, -(-real // step) * step), step, most, length)
        for tokens in range(wanted.tokens, most + 1):
            total = wanted._replace(tokens=tokens)
            if not total.serves(wanted.tokens) and total != wanted.enlarged():
                continue
            found = Packing.on_device(mask, total.fixed())
            exact = Packing.of(mask, mask.sum(1).tolist())
            ends = found.lengths.cumulative
            assert (int(ends[-1]), len(found.indices)) == (tokens, tokens), (seed, wanted, tokens)
            assert int((ends[1:] - ends[:-1]).max()) <= length == found.lengths.longest
            assert len(found.lengths.host) == len(ends) - 1
            assert ends[: rows + 1].tolist() == exact.lengths.cumulative.tolist()
            assert len(set(found.indices.tolist())) == tokens
            x = torch.randn(rows, length, 2, generator=draw)
            assert found.pack(x)[:real].equal(exact.pack(x))
            assert found.pad(found.pack(x)).equal(exact.pad(exact.pack(x)))
            assert found.first(found.pack(x)).equal(x[:, 0])


def test_padding_gets_no_gradient() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    packing = Packing.on_device(mask, FixedTotal(6, 4))
    x = torch.ones(6, 2, requires_grad=True)
    packing.pad(x).sum().backward()
    assert x.grad.sum(1).tolist() == [2, 2, 2, 0, 0, 0]


def test_a_total_is_fixed_in_one_place_only() -> None:
    with total_fixed(FixedTotal(3, 1)):
        with pytest.raises(ZeroDivisionError), total_fixed(None):
            assert fixed_total() is None
            _ = 1 / 0
        assert fixed_total() == FixedTotal(3, 1)
    assert fixed_total() is None


@pytest.mark.gpu
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", [*FAMILIES, "ModernBert"])
def test_trains_as_the_stock_model_in_float64(family: str, head: str) -> None:
    stock = model_of(family, head).double()
    model = packed(copy.deepcopy(stock).cuda()) if family != "ModernBert" else copy.deepcopy(stock).cuda()
    apply_unpadding(model)
    assert apply_cuda_graphs(model, scope="model") == 1
    assert apply_cuda_graphs(model, scope="model") == 0
    assert_close(train(model, head, "cuda"), train(stock, head, "cpu"), 1e-5)
    assert list(model.state_dict()) == list(stock.state_dict())
    graphs = graphs_of(model)
    assert graphs.replayed >= 3 and graphs.launched + graphs.replayed == 5, graphs.reason


@pytest.mark.gpu
def test_predicted_tokens_with_a_capacity() -> None:
    def losses(graphs: bool) -> list[torch.Tensor]:
        model = model_of(head="MaskedLM").cuda()
        apply_unpadding(model)
        apply_masked_token_head(model, capacity=1.0)
        assert not graphs or apply_cuda_graphs(model, scope="model")
        found = train(model, "MaskedLM", "cuda")
        assert not graphs or graphs_of(model).replayed >= 3
        return found

    assert_close(losses(True), losses(False), 1e-4)


def step_of_total(model: torch.nn.Module, real: int) -> tuple[int, int, int]:
    """One with so many real tokens: how many graphs there are then, and how often one was and was not used."""
    ids = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    mask[:, 0] = 1
    mask[mask == 0] = (torch.arange(ROWS * (LENGTH - 1)) < real - ROWS).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(ROWS, dtype=torch.long)}
    model(**{k: x.cuda() for k, x in batch.items()}).loss.backward()
    model.zero_grad()
    graphs = graphs_of(model)
    return graphs.recorded, graphs.replayed, graphs.launched


@pytest.mark.gpu
def test_a_larger_total_serves() -> None:
    model = packed(model_of().cuda(), multiple_of=4)
    apply_cuda_graphs(model, scope="model", limit=2)
    assert step_of_total(model, 80) == (0, 0, 1)
    assert step_of_total(model, 80) == (1, 1, 1), "with room for more: 96 tokens"
    assert step_of_total(model, 80) == (2, 2, 1), "and now its own"
    assert step_of_total(model, 88) == (2, 3, 1), "in 96"
    assert step_of_total(model, 88) == (2, 4, 1), "at the limit, still"
    assert step_of_total(model, 40) == (2, 4, 2), "of which 80 would be twice as many"
    totals = [total.tokens for (_, total), known in graphs_of(model)._known.items() if known is not None]
    assert sorted(totals) == [80, 96]


@pytest.mark.gpu
def test_a_total_is_recorded_when_filling_it_up_has_cost_as_much() -> None:
    """What seldom comes costs no recording, and what often comes no more than twice as much as it must."""
    model = packed(model_of().cuda(), multiple_of=4)
    apply_cuda_graphs(model, scope="model")
    for _ in range(3):
        step_of_total(model, 80)
    uses = 4 * 88 // (96 - 88)  # until four batches of padding have been computed
    assert [step_of_total(model, 88)[0] for _ in range(uses)] == [2] * (uses - 1) + [3]
    totals = [total.tokens for (_, total), known in graphs_of(model)._known.items() if known is not None]
    assert sorted(totals) == [80, 88, 96]


@pytest.mark.gpu
def test_gradients_of_logits_beside_the_loss_are_refused() -> None:
    model = packed(model_of().cuda())
    apply_cuda_graphs(model, scope="model")
    batch = {k: x.cuda() for k, x in batch_of(1).items()}
    for _ in range(2):
        model(**batch).loss.backward()
    out = model(**batch)
    with pytest.raises(RuntimeError, match=r"those of its other outputs .* Use scope='layers'"):
        (out.loss + out.logits.sum()).backward()
    del out
    model(**batch).loss.backward()


@pytest.mark.gpu
def test_without_labels_logits_have_gradients() -> None:
    """As label smoothing and distillation compute losses of their own."""

    def gradients(graphs: bool) -> list[torch.Tensor]:
        model = packed(model_of().cuda())
        assert not graphs or apply_cuda_graphs(model, scope="model")
        batch = {k: x.cuda() for k, x in batch_of(1).items() if k != "labels"}
        for _ in range(3):
            model.zero_grad()
            model(**batch).logits.square().sum().backward()
        assert not graphs or graphs_of(model).replayed == 2
        return [p.grad.double().cpu() for p in model.parameters()]

    assert_close(gradients(True), gradients(False), 1e-4)


@pytest.mark.gpu
def test_calls_that_no_graph_knows_run_kernel_by_kernel() -> None:
    model = packed(model_of().cuda())
    apply_cuda_graphs(model, scope="model")
    batch = {k: x.cuda() for k, x in batch_of(1).items()}
    exact = model(**batch, output_hidden_states=True)
    for _ in range(3):
        again = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
        assert torch.allclose(again.loss, exact.loss, rtol=1e-4)
        whole = model(**batch, output_hidden_states=True)
        assert len(whole.hidden_states) == len(exact.hidden_states)
        whole.loss.backward()
    graphs = graphs_of(model)
    assert (graphs.replayed, graphs.launched) == (0, 7) and graphs.reason.startswith("not called with ids")


@pytest.mark.gpu
def test_in_a_trainer(make_trainer) -> None:

    losses = []
    for graphs in ([], [CUDAGraphs(scope="model")]):
        loader = torch.utils.data.DataLoader(BatchDataset(16), batch_size=8)
        options = {"device": "gpu", "precision": "fp32", "eval_dataloader": loader, "max_duration": "2ep"}
        trainer = make_trainer([*graphs, Unpadding()], HuggingFaceModel(model_of()), **options)
        trainer.fit()
        losses.append(float(trainer.state.total_loss_dict["loss/train/total"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    evidence = graphs[0].evidence
    assert evidence["changed"] == 1 and evidence["replayed"] >= 6 and evidence["launched"] <= 2


def test_needs_an_unpadded_model(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAGraphs, "unavailable", lambda self, device: None)
    with pytest.warns(NoEffectWarning, match="no unpadded model of bert.*Use scope='layers'"):
        make_trainer([CUDAGraphs(scope="model")], HuggingFaceModel(model_of()))


def test_a_head_that_waits_is_refused(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAGraphs, "unavailable", lambda self, device: None)
    model = HuggingFaceModel(model_of(head="MaskedLM"), metrics=[])
    with pytest.raises(ConflictError, match="Give it a capacity"):
        make_trainer([Unpadding(), MaskedTokenHead(), CUDAGraphs(scope="model")], model)
    by_hand = model_of(head="MaskedLM")
    apply_unpadding(by_hand)
    apply_masked_token_head(by_hand)
    with pytest.raises(ConflictError, match="Give it a capacity"):
        apply_cuda_graphs(by_hand, scope="model")
    model = HuggingFaceModel(model_of(head="MaskedLM"), metrics=[])
    make_trainer([Unpadding(), MaskedTokenHead(capacity=0.2), CUDAGraphs(scope="model")], model)


@pytest.mark.parametrize("scope", ["encoder", None, 3])
def test_wrong_scopes_are_refused(scope) -> None:
    with pytest.raises((TypeError, ValueError), match="scope"):
        CUDAGraphs(scope=scope)


def losses_with(model: torch.nn.Module, change, steps: int = 3, **more: object) -> list[torch.Tensor]:
    """Of a batch, before and after `change(model)`, with every gradient of the last one."""
    batch = {k: x.cuda() for k, x in batch_of(1, more.pop("head", "SequenceClassification")).items()} | more
    found = []
    for step in range(2 * steps):
        if step == steps:
            change(model)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append(loss.detach().double().cpu())
    return found + [p.grad.double().cpu() for p in model.parameters() if p.grad is not None]


def half_as_much(model: torch.nn.Module) -> None:
    stock = model.loss_function
    model.loss_function = lambda *args, **kwargs: stock(*args, **kwargs) / 2


def other_positions(model: torch.nn.Module) -> None:
    embeddings = model.base_model.embeddings
    embeddings.position_ids = embeddings.position_ids.flip(1).contiguous()


CHANGES_BETWEEN = {
    "the loss": ("ModernBert", "MaskedLM", half_as_much),
    "the problem": (
        "Bert",
        "SequenceClassification",
        lambda model: setattr(model.config, "problem_type", "multi_label_classification"),
    ),
    "pooling": ("ModernBert", "SequenceClassification", lambda m: setattr(m.config, "classifier_pooling", "mean")),
    "a buffer": ("Bert", "SequenceClassification", other_positions),
    "a DistilBERT's buffer": ("DistilBert", "SequenceClassification", other_positions),
}


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES_BETWEEN)
def test_what_is_read_on_the_host_is_looked_at(change: str) -> None:
    family, head, changed = CHANGES_BETWEEN[change]

    def found(graphs: bool) -> list[torch.Tensor]:
        model = model_of(family, head).cuda()
        apply_unpadding(model)
        assert not graphs or apply_cuda_graphs(model, scope="model")
        more: dict[str, object] = {"head": head}
        if change == "the problem":  # of labels that may be either
            more["labels"] = torch.eye(3).repeat(2, 1).cuda()
            model.config.problem_type = "regression"
        results = losses_with(model, changed, **more)
        assert not graphs or graphs_of(model).replayed >= (2 if change == "the loss" else 3)
        return results

    wanted = found(False)
    assert (wanted[2] - wanted[3]).abs() > 1e-3 * wanted[2].abs(), "the change must be seen"
    assert_close(found(True), wanted, 1e-5)


class Annealed:
    """A loss whose weight a callback changes."""

    def __init__(self, stock) -> None:
        self.stock, self.weight = stock, 1.0

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.stock(*args, **kwargs) * self.weight


@pytest.mark.gpu
def test_a_loss_of_ones_own_is_called_in_each_step() -> None:
    def found(graphs: bool) -> list[torch.Tensor]:
        model = model_of("ModernBert", "MaskedLM").cuda()
        apply_unpadding(model)
        assert not graphs or apply_cuda_graphs(model, scope="model")
        model.loss_function = loss = Annealed(model.loss_function)
        results = losses_with(model, lambda _: setattr(loss, "weight", 30.0), head="MaskedLM")
        if graphs:
            assert (graphs_of(model).replayed, graphs_of(model).launched) == (0, 6)
            assert graphs_of(model).reason.startswith("the model was given a loss that is not transformers'")
        return results

    wanted = found(False)
    assert wanted[3] / wanted[2] == pytest.approx(30.0, rel=1e-3)
    assert_close(found(True), wanted, 1e-5)
    model = model_of("ModernBert", "MaskedLM")
    apply_unpadding(model)
    model.loss_function = Annealed(model.loss_function)
    assert apply_cuda_graphs(model, scope="model") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["layers", "model"])
def test_who_listens_to_the_model_itself_hears_each_call(scope: str) -> None:
    """As Accelerate, which gives it another `forward`; both are called around what is recorded."""
    model = packed(model_of().cuda())
    apply_cuda_graphs(model, scope=scope)
    calls: list[str] = []
    inner = model.forward
    model.forward = lambda **kwargs: calls.append("forward") or inner(**kwargs)
    model.register_forward_hook(lambda *_: calls.append("hook"))
    batch = {k: x.cuda() for k, x in batch_of(1).items()}
    for _ in range(5):
        model(**batch).loss.backward()
        model.zero_grad()
    assert (graphs_of(model).replayed, graphs_of(model).launched) == (4, 1)
    assert calls == ["forward", "hook"] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("family", [*FAMILIES, "ModernBert"])
def test_positions_of_ones_own(family: str) -> None:
    def found(graphs: bool) -> list[torch.Tensor]:
        model = model_of(family).cuda()
        apply_unpadding(model)
        assert not graphs or apply_cuda_graphs(model, scope="model")
        positions = torch.arange(LENGTH - 1, -1, -1).expand(ROWS, -1).contiguous().cuda()
        return losses_with(model, lambda _: None, position_ids=positions)

    assert_close(found(True), found(False), 1e-5)


@pytest.mark.gpu
def test_a_number_of_items_that_always_differs_is_no_shape_of_its_own() -> None:
    def found(graphs: bool) -> list[torch.Tensor]:
        model = model_of("ModernBert", "MaskedLM").cuda()
        apply_unpadding(model)
        assert not graphs or apply_cuda_graphs(model, scope="model")
        batch = {k: x.cuda() for k, x in batch_of(1, "MaskedLM").items()}
        losses = []
        for number in (10, 20, 30, 40):
            loss = model(**batch, num_items_in_batch=number).loss
            loss.backward()
            losses.append(loss.detach().double().cpu())
        assert not graphs or graphs_of(model).replayed == 3
        return losses

    wanted = found(False)
    assert wanted[0] / wanted[1] == pytest.approx(2)
    assert_close(found(True), wanted, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("waits", ["x[chosen]", "x.nonzero()", "x.masked_select(chosen)"])
def test_no_graph_can_wait_to_learn_how_many_there_are(waits: str) -> None:
    """Nor on the GPU that is not there: why heads that choose tokens by a mask are left alone."""
    code = f"""
import torch
x, chosen = torch.ones(3, device="cuda"), torch.ones(3, dtype=torch.bool, device="cuda")
{waits}
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        {waits}
except RuntimeError as error:
    print("refused:", error, flush=True)
import os
os._exit(0)  # a process that has tried may not be able to end otherwise
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "refused: " in done.stdout and "captur" in done.stdout, done.stdout + done.stderr[-2000:]


class Scaled(torch.nn.Linear):
    """With a number that Python keeps."""

    scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def heads_that_are_left_alone() -> dict[str, torch.nn.Module]:
    from transformers import BertForMultipleChoice, ElectraForPreTraining

    own, statistics = model_of(), model_of()
    own.classifier = Scaled(own.classifier.in_features, 3)
    statistics.classifier = torch.nn.Sequential(torch.nn.BatchNorm1d(own.classifier.in_features), statistics.classifier)
    sparse = model_of("ModernBert", "MaskedLM")
    sparse.sparse_prediction = True
    return {
        "somebody's own module": own,
        "statistics": statistics,
        "tokens chosen by a mask": sparse,
        "likewise": ElectraForPreTraining(model_of("Electra").config),
        "ids [rows, choices, length]": BertForMultipleChoice(model_of().config),
    }


@pytest.mark.parametrize("which", heads_that_are_left_alone())
def test_heads_that_no_graph_can_have_are_left_alone(which: str) -> None:
    model = heads_that_are_left_alone()[which]
    assert apply_unpadding(model)
    assert apply_cuda_graphs(model, scope="model") == 0
    assert apply_cuda_graphs(model, scope="layers") == 1


def test_a_model_is_recorded_as_a_whole_or_its_layers_are() -> None:
    model = model_of()
    apply_unpadding(model)
    assert [apply_cuda_graphs(model, scope=scope) for scope in ("model", "layers")] == [1, 0]
    model = model_of()
    apply_unpadding(model)
    assert [apply_cuda_graphs(model, scope=scope) for scope in ("layers", "model")] == [1, 0]
