from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.models import HuggingFaceModel
from small import BatchDataset, bert_config, config_of

from composer_speedups import (
    CUDAGraphs,
    FusedDropoutAddNorm,
    GradientCheckpointing,
    GradientRelease,
    LastLayerSubset,
    TorchCompile,
    Unpadding,
    apply_cuda_graphs,
    apply_fused_bias_gelu,
    apply_fused_dropout_add_norm,
    apply_fused_embedding,
    apply_last_layer_subset,
    apply_unpadding,
)
from composer_speedups.algorithms import cuda_graphs
from composer_speedups.errors import ConflictError, SpeedUpUnavailable
from composer_speedups.graphs.recording import Memory
from composer_speedups.graphs.replay import Graphs, kernel_by_kernel
from composer_speedups.kernels import dropout_add_norm
from composer_speedups.measurement.memory import predict
from composer_speedups.recipes import load_recipe
from composer_speedups.training.run import run

FAMILIES = ["Bert", "Roberta", "Electra", "DistilBert"]
HEADS = ["SequenceClassification", "TokenClassification", "MaskedLM"]
ROWS, LENGTH = 6, 24
ROOT = Path(__file__).parents[2]
# Bit for bit where operators compute on the CPU; on a GPU sums in attention's backward pass are in no order.
SAME, SAME_BF16 = (0.0, 0.0) if "NULL_GPU" in os.environ else (1e-4, 2e-2)


def model_of(family: str = "Bert", head: str = "SequenceClassification", dropout: float = 0.0, seed: int = 3):
    import transformers

    torch.manual_seed(seed)
    values = vars(bert_config()) | {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    names += ("max_position_embeddings", "hidden_dropout_prob", "attention_probs_dropout_prob")
    own = {"pad_token_id": 0} if family == "ModernBert" else {}
    config = config_of(family, **{name: values[name] for name in names}, **own)
    config.num_labels = 3
    return getattr(transformers, f"{family}For{head}")(config).train()


def batch_of(seed: int, head: str = "SequenceClassification", shortest: int = 9) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 128, (ROWS, LENGTH), generator=draw)
    lengths = torch.randint(shortest, LENGTH, (ROWS,), generator=draw)
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    if head == "SequenceClassification":
        labels = torch.randint(0, 3, (ROWS,), generator=draw)
    else:
        labels = torch.randint(0, 3, (ROWS, LENGTH), generator=draw).masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(model: torch.nn.Module, multiple_of: int = 64) -> torch.nn.Module:
    apply_unpadding(model, multiple_of=multiple_of)
    apply_last_layer_subset(model)
    apply_fused_dropout_add_norm(model)
    apply_fused_bias_gelu(model)
    if torch.cuda.is_available():
        apply_fused_embedding(model)
    return model


def train(
    model: torch.nn.Module,
    head: str,
    device: str,
    dtype: torch.dtype | None = None,
    microbatches: int = 1,
    set_to_none: bool = True,
    steps: int = 5,
) -> list[torch.Tensor]:
    """Losses and gradients of a few steps of SGD, in float64 on the host."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step in range(steps):
        for micro in range(microbatches):
            batch = {name: x.to(device) for name, x in batch_of(step * microbatches + micro, head).items()}
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                loss = model(**batch).loss
            loss.backward()
            seen.append(loss)
        seen += [p.grad for p in model.parameters() if p.grad is not None]
        seen = [x.detach().double().cpu() for x in seen]
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return seen


def graphs_of(model: torch.nn.Module) -> Graphs:
    (graphs,) = [graphs for m in model.modules() if (graphs := cuda_graphs._GRAPHS.get(m)) is not None]
    return graphs


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("unpadded", [True, False])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", [*FAMILIES, "ModernBert"])
def test_trains_as_the_stock_model_in_float64(family: str, head: str, unpadded: bool) -> None:
    """Five steps, of which all but one are replayed: losses and all gradients of the padded model on the CPU.

    Norms keep mean and deviation in float32 on the GPU that is not there.
    """
    stock = model_of(family, head).double()
    model = copy.deepcopy(stock).cuda()
    if unpadded:
        apply_unpadding(model)
        apply_last_layer_subset(model)
    if family == "ModernBert" and not unpadded:
        assert apply_cuda_graphs(model) == 0  # its encoder is more than layers
        return
    assert apply_cuda_graphs(model) == 1
    parameters = list(model.parameters())
    assert_close(train(model, head, "cuda"), train(stock, head, "cpu"), 1e-5)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(stock.state_dict())
    graphs = graphs_of(model)
    assert (graphs.recorded, graphs.replayed, graphs.launched) == (1, 4, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("scope", cuda_graphs.SCOPES)
def test_gradients_are_those_without(
    scope: str, dtype: torch.dtype | None, microbatches: int, set_to_none: bool
) -> None:
    """With our kernels, in autocast, accumulated over microbatches, and kept to be zeroed in place."""
    how = {"device": "cuda", "dtype": dtype, "microbatches": microbatches, "set_to_none": set_to_none}
    model, other = packed(model_of().cuda()), packed(model_of().cuda())
    apply_cuda_graphs(model, scope=scope)
    found, wanted = (train(m, "SequenceClassification", **how) for m in (model, other))
    assert_close(found, wanted, SAME if dtype is None else SAME_BF16)
    assert graphs_of(model).replayed == 5 * microbatches - 1


@pytest.mark.gpu
def test_memory_that_is_not_vacated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: gradients of the microbatch before are written over."""
    monkeypatch.setattr(Memory, "vacate", lambda self, parameters: True)
    how = {"device": "cuda", "microbatches": 3}
    model, other = packed(model_of().cuda()), packed(model_of().cuda())
    apply_cuda_graphs(model)
    with pytest.raises(AssertionError):
        assert_close(*(train(m, "SequenceClassification", **how) for m in (model, other)), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("fault", [False, True])
def test_two_forward_passes_before_one_backward_pass(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for contrastive losses: the second runs kernel by kernel, as the first one's memory is still to be read."""
    if fault:
        monkeypatch.setattr(Memory, "taken", lambda self: False)
    models = [model_of().cuda() for _ in range(2)]
    for model in models:  # in bf16 and without LastLayerSubset no index is computed, which a fault would make wild
        apply_unpadding(model)
    apply_cuda_graphs(models[0])
    found = []
    for model in models:
        for _ in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                one, two = (model(**{k: x.cuda() for k, x in batch_of(seed).items()}).loss for seed in (1, 2))
            model.zero_grad()
            (one * two).backward()
        found.append([p.grad.double().cpu() for p in model.parameters()])
    if fault:
        with pytest.raises(AssertionError):
            assert_close(*found, 1e-2)
    else:
        assert_close(*found, 1e-3)
        graphs = graphs_of(models[0])
        assert (graphs.replayed, graphs.launched) == (3, 3)
        assert graphs.reason == "a backward pass comes after another forward pass"


@pytest.mark.gpu
def test_a_forward_pass_without_backward_pass_leaves_the_next_one_its_memory() -> None:
    model = packed(model_of().cuda())
    apply_cuda_graphs(model)
    batch = {k: x.cuda() for k, x in batch_of(1).items()}
    for _ in range(4):
        model(**batch)  # as of a loss that was thrown away
    assert graphs_of(model).replayed == 3


@pytest.mark.gpu
def test_a_second_backward_pass_is_refused() -> None:
    model = packed(model_of().cuda())
    apply_cuda_graphs(model)
    batch = {k: x.cuda() for k, x in batch_of(1).items()}
    model(**batch).loss.backward()
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass through one forward pass"):
        loss.backward()


@pytest.mark.gpu
def test_what_was_returned_stays_what_it_was() -> None:
    """Whoever keeps hidden states, or their gradients, over steps must not find those of the next batch in them."""
    model, seen = model_of(head="TokenClassification").cuda(), []
    apply_cuda_graphs(model)

    def keep(module, inputs, hidden) -> None:
        hidden.retain_grad()
        seen.append(hidden)

    model.bert.embeddings.register_forward_hook(keep)  # what goes into the layers
    kept = []
    for seed in (1, 2, 3):
        batch = {k: x.cuda() for k, x in batch_of(seed).items() if k != "labels"}
        hidden = model.bert(**batch).last_hidden_state
        hidden.square().sum().backward()
        kept += [(x, x.detach().clone()) for x in (hidden, seen[-1].grad)]
    assert graphs_of(model).replayed == 2
    assert all(torch.equal(x, then) for x, then in kept)


@pytest.mark.gpu
def test_gradients_that_somebody_keeps_stay_what_they_are() -> None:
    model = packed(model_of().cuda())
    apply_cuda_graphs(model)
    weight, kept = model.bert.encoder.layer[0].output.dense.weight, []
    for seed in (1, 2, 3, 4):
        loss = model(**{k: x.cuda() for k, x in batch_of(seed).items()}).loss
        (gradient,) = torch.autograd.grad(loss, weight)
        kept.append((gradient, gradient.clone()))
    assert all(torch.equal(gradient, then) for gradient, then in kept)
    assert graphs_of(model).reason == "somebody holds gradients of the step before"
    kept.clear()
    del gradient
    model(**{k: x.cuda() for k, x in batch_of(5).items()}).loss.backward()
    assert (graphs_of(model).replayed, graphs_of(model).launched) == (2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_norms_add_up_the_gradients_of_two_readers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph; where somebody may ask for the gradient of hidden states, they have it whole."""
    stock, seen = dropout_add_norm._backward, []
    monkeypatch.setattr(dropout_add_norm, "_backward", lambda *a: seen.append(a[9:] not in ((), (None,))) or stock(*a))
    model = model_of(family).cuda()
    apply_unpadding(model)
    norms = apply_fused_dropout_add_norm(model)
    apply_cuda_graphs(model)
    batch = {name: x.cuda() for name, x in batch_of(1).items()}
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(2):
            model(**batch).loss.backward()
    # Kernel by kernel; and to warm up and as recorded: all but the last norm, which only the head reads.
    once = sorted([True] * (norms - 1) + [False])
    assert seen[:norms] == [False] * norms
    assert [sorted(seen[norms * n : norms * (n + 1)]) for n in (1, 2)] == [once, once]


@pytest.mark.gpu
def test_later_graphs_write_gradients_of_products_where_the_first_one_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of BERT-base, 680 MB that need not be copied in each step."""
    model = packed(model_of().cuda(), multiple_of=8)
    apply_cuda_graphs(model)
    moved: list[int] = []
    copy_all = torch._foreach_copy_

    def spy(to: list[torch.Tensor], from_: list[torch.Tensor], *more: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            moved.extend(x.numel() for x, y in zip(from_, to, strict=True) if x.dtype == y.dtype)
        copy_all(to, from_, *more)

    def record(shortest: int) -> list[torch.Tensor]:
        batch = {name: x.cuda() for name, x in batch_of(1, shortest=shortest).items()}
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    record(20)
    graphs = graphs_of(model)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_copy_", spy)
        found = record(9)
    assert graphs.recorded == 2 and moved, graphs.reason
    width = model.config.hidden_size
    assert max(moved) < width * width, "norms and biases only"
    with kernel_by_kernel():
        assert_close(found, record(9), SAME_BF16)


class _Watched(torch.autograd.Function):
    seen: ClassVar[list[tuple[bool, bool]]] = []

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.around = torch.is_autocast_enabled("cuda")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        _Watched.seen.append((ctx.around, torch.is_autocast_enabled("cuda")))
        return gradient.clone()


class _WatchedActivation(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Watched.apply(torch.nn.functional.gelu(x))


@pytest.mark.gpu
def test_only_the_forward_pass_is_in_autocast() -> None:
    """Else sums of the backward pass would be float32's, each with a copy: kernels that nobody asked for."""
    model = model_of().cuda()
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = _WatchedActivation()
    apply_cuda_graphs(model)
    _Watched.seen.clear()
    train(model, "SequenceClassification", "cuda", torch.bfloat16)
    assert graphs_of(model).replayed == 4
    assert set(_Watched.seen) == {(True, False)} and len(_Watched.seen) == 2 * 3  # at first, warming up, recording


@pytest.mark.gpu
def test_what_cannot_be_recorded_is_told() -> None:
    """As a number that is read back would be refused. What follows runs on the stream that it ran on before."""

    class Reading(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("operation not permitted when stream is capturing")
            return torch.nn.functional.gelu(x)

    model, before = model_of().cuda(), torch.cuda.current_stream()
    model.bert.encoder.layer[1].intermediate.intermediate_act_fn = Reading()
    apply_cuda_graphs(model)
    try:
        raise KeyError("whatever is being handled while training goes on")
    except KeyError:
        with pytest.raises(SpeedUpUnavailable, match="cannot record these layers: operation not permitted when stream"):
            train(model, "SequenceClassification", "cuda")
    assert torch.cuda.current_stream() == before


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["PyTorch's allocator", "CUDA, when a recording ends"])
def test_out_of_memory_is_passed_on(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """As Composer and `tune` look for it, to go on with less; what is there is given back, and comes again."""
    model, batch = packed(model_of().cuda()), {k: x.cuda() for k, x in batch_of(1).items()}
    apply_cuda_graphs(model)
    for _ in range(3):
        model(**batch).loss.backward()

    ends = torch.cuda.CUDAGraph.capture_end

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def full_in_the_end(graph):
        ends(graph)
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")

    large = {k: torch.cat((x, x)) for k, x in batch.items()}
    model(**large).loss.backward()
    with monkeypatch.context() as patch:
        if where == "PyTorch's allocator":
            patch.setattr("composer_speedups.graphs.replay.Recorded", full)
        else:
            patch.setattr(torch.cuda.CUDAGraph, "capture_end", full_in_the_end)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            model(**large)
    assert graphs_of(model).recorded == 0
    for _ in range(3):
        model(**batch).loss.backward()
    assert (graphs_of(model).recorded, graphs_of(model).replayed) == (1, 2 + 2)


@pytest.mark.gpu
@pytest.mark.parametrize("scope", cuda_graphs.SCOPES)
def test_dropout_draws_new_masks(scope: str) -> None:
    model = packed(model_of(dropout=0.3).cuda())
    apply_cuda_graphs(model, scope=scope)
    batch = {k: x.cuda() for k, x in batch_of(1).items()}
    losses = []
    for _ in range(6):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
    assert graphs_of(model).replayed == 5
    assert len(set(losses)) == 6


@pytest.mark.gpu
def test_each_shape_has_a_graph_up_to_the_limit() -> None:
    model = packed(model_of().cuda(), multiple_of=16)
    apply_cuda_graphs(model, limit=1)
    totals = []
    for seed in [1, 2, 3, 4, 5] * 2:
        batch = batch_of(seed, shortest=4)
        totals.append(-(-int(batch["attention_mask"].sum()) // 16))
        model(**{k: x.cuda() for k, x in batch.items()}).loss.backward()
        model.zero_grad()
    graphs, first = graphs_of(model), next(t for i, t in enumerate(totals) if t in totals[:i])
    assert len(set(totals)) > 1, "the batches of this test must differ"
    assert (graphs.recorded, graphs.replayed) == (1, totals.count(first) - 1)
    assert graphs.reason in ("", "the limit of 1 shapes is reached")


@pytest.mark.gpu
def test_shapes_share_memory() -> None:
    """Of a second shape only what goes in and comes out is new, and neither gradients nor what backward reads."""
    model = packed(model_of().cuda(), multiple_of=16)
    apply_cuda_graphs(model)

    loss = None

    def taken(rows: int, times: int = 2) -> int:
        nonlocal loss
        for _ in range(times):
            loss = model(**{k: x[:rows].cuda() for k, x in batch_of(1).items()}).loss  # as Composer keeps it, too
            loss.backward()
            model.zero_grad()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    taken(ROWS, 1)
    before = torch.cuda.memory_allocated()
    first, second = taken(ROWS - 2) - before, taken(ROWS - 3) - before
    weights = sum(p.numel() for p in model.bert.encoder.parameters()) * 4
    assert graphs_of(model).recorded == 2
    assert first > weights, "gradients are kept"
    assert second - first < weights / 2
    third = taken(ROWS, 1) - before  # a larger one begins anew: the others' memory does not grow
    assert graphs_of(model).recorded == 1 and third - first < weights / 2
    assert taken(ROWS - 2, 1) - before > third and graphs_of(model).recorded == 2, (
        "and they do, without being run first"
    )


CHANGES = ["moved", "frozen", "dropout", "attention's mode", "activation", "a hook", "evaluation"]


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_recorded_anew(change: str) -> None:
    """What a graph has in it is looked at in each step; what is gone does not count for the limit."""
    model, other = packed(model_of(dropout=0.5).cuda()), packed(model_of(dropout=0.5).cuda())
    apply_cuda_graphs(model, limit=1)
    batch, found, calls = {k: x.cuda() for k, x in batch_of(1).items()}, [], []
    for m in (model, other):
        layer = m.bert.encoder.layer[0]
        for dropout in [x for x in m.modules() if isinstance(x, torch.nn.Dropout)]:
            dropout.p = 0.0
        for step in range(6):
            if step == 3 and change == "moved":
                layer.output.dense.weight.data = layer.output.dense.weight.data * 2
            elif step == 3 and change == "frozen":
                layer.output.dense.weight.requires_grad_(False)
            elif step == 3 and change == "dropout":
                layer.output.dropout.p = 1.0
            elif step == 3 and change == "attention's mode":
                layer.attention.self.training = False
            elif step == 3 and change == "activation":
                layer.intermediate.intermediate_act_fn = torch.nn.ReLU()
            elif step == 3 and change == "a hook":
                layer.register_forward_hook(lambda *_: calls.append(1))
            elif step == 3:
                m.eval()
                with torch.no_grad():
                    m(**batch)
                m.train()
            m.zero_grad()
            m(**batch).loss.backward()
        found.append([p.grad.double().cpu() for p in m.parameters() if p.grad is not None])
    assert_close(*found, SAME)
    graphs = graphs_of(model)
    counts = {"evaluation": (1, 5, 1), "a hook": (1, 2, 4)}
    assert (graphs.recorded, graphs.replayed, graphs.launched) == counts.get(change, (1, 4, 2))
    assert len(calls) == (6 if change == "a hook" else 0)


@pytest.mark.gpu
def test_layers_that_change_all_the_time_are_not_recorded_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that take turns, say, and a model that loses a layer."""
    monkeypatch.setattr("composer_speedups.graphs.replay._CHANGES", 2)
    model, batch = packed(model_of().cuda()), {k: x.cuda() for k, x in batch_of(1).items()}
    apply_cuda_graphs(model)
    for step in range(12):
        model.bert.encoder.layer[0].output.dense.weight.requires_grad_(step // 2 % 2 == 0)
        model.zero_grad()
        model(**batch).loss.backward()
    assert (graphs_of(model).replayed, graphs_of(model).launched) == (3, 9)
    assert graphs_of(model).reason.startswith("the layers have changed 3 times: frozen, moved, other rates of dropout")


@pytest.mark.gpu
def test_a_model_may_lose_a_layer() -> None:
    model, batch = model_of().cuda(), {k: x.cuda() for k, x in batch_of(1).items()}
    apply_unpadding(model)
    apply_cuda_graphs(model)
    for layers in (2, 2, 2, 1, 1, 1):
        model.bert.encoder.layer = model.bert.encoder.layer[:layers]
        model(**batch).loss.backward()
    assert (graphs_of(model).replayed, graphs_of(model).launched) == (4, 2)


@pytest.mark.gpu
def test_attention_dropout_that_is_a_number_is_looked_at() -> None:
    model, batch = model_of("ModernBert").cuda(), {k: x.cuda() for k, x in batch_of(1).items()}
    apply_unpadding(model)
    apply_cuda_graphs(model)
    for rate in (0.0, 0.0, 0.5, 0.5):
        for layer in model.model.layers:
            layer.attn.attention_dropout = rate
        model(**batch).loss.backward()
    assert (graphs_of(model).replayed, graphs_of(model).launched) == (2, 2)


@pytest.mark.gpu
def test_a_hook_in_a_layer_is_called_each_time() -> None:
    model = packed(model_of().cuda())
    apply_cuda_graphs(model)
    calls: list[int] = []
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: calls.append(1))
    batch = {k: x.cuda() for k, x in batch_of(1).items()}
    for _ in range(3):
        model(**batch).loss.backward()
    assert (len(calls), graphs_of(model).recorded) == (3, 0)
    assert graphs_of(model).reason == "there is a hook in a layer"


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_in_a_trainer(make_trainer, compiled: bool) -> None:
    """Listed in any order, with evaluation after each epoch; with compiled blocks, too."""
    losses = []
    for graphs in ([], [CUDAGraphs()]):
        others = [Unpadding(), FusedDropoutAddNorm()]
        others += [TorchCompile(scope="block", dynamic=True) if compiled else LastLayerSubset()]
        loader = torch.utils.data.DataLoader(BatchDataset(16), batch_size=8)
        options = {"device": "gpu", "precision": "fp32", "eval_dataloader": loader, "max_duration": "2ep"}
        trainer = make_trainer([*graphs, *others], HuggingFaceModel(model_of()), **options)
        trainer.fit()
        losses.append(float(trainer.state.total_loss_dict["loss/train/total"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert graphs[0].evidence == {"changed": 1, "recorded": 1, "replayed": 7, "launched": 1}


RANKS = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = ["tests", "tests/algorithms"]
from test_cuda_graphs import apply_cuda_graphs, batch_of, graphs_of, model_of, packed

dist.init_process_group("gloo")
found = []
for recorded in (False, True):
    model = packed(model_of().cuda())
    if recorded:
        apply_cuda_graphs(model, scope=sys.argv[1])
    ranks, seen = DistributedDataParallel(model), []
    optimizer = torch.optim.SGD(ranks.parameters(), lr=0.05)
    for step in range(4):
        batch = batch_of(2 * step + dist.get_rank())
        ranks(**{name: x.cuda() for name, x in batch.items()}).loss.backward()
        seen += [p.grad.double().cpu() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    found.append(seen)
worst = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
assert worst < 1e-4, worst
assert graphs_of(model).replayed >= (3 if sys.argv[1] == "layers" else 2)
dist.destroy_process_group()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("scope", cuda_graphs.SCOPES)
def test_two_ranks_exchange_their_gradients(tmp_path: Path, scope: str) -> None:
    """Each with batches of its own; both on one device, which NCCL would refuse, and gloo does not."""
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "ranks.py"), scope], cwd=ROOT, capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
def test_a_trainer_says_if_nothing_was_replayed(make_trainer) -> None:
    model = model_of()
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)
    trainer = make_trainer([CUDAGraphs()], HuggingFaceModel(model), device="gpu", precision="fp32")
    with pytest.warns(NoEffectWarning, match="replayed nothing in 4 forward passes: there is a hook in a layer"):
        trainer.fit()


@pytest.mark.gpu
def test_a_measured_run_is_looked_at_kernel_by_kernel() -> None:
    """What autograd keeps and which attention ran is told, which replays would hide; its steps were replays."""
    sizes = "{num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 1, intermediate_size: 64, vocab_size: 128}"
    task = "{name: dummy, max_length: 32, mean_length: 20, length_std: 4, train_samples: 48}"
    changes = [f"task={task}", "model.pretrained=false", f"model.config={sizes}", "batch_size=8", "evaluate=false"]
    recipe = load_recipe("finetune/fastest", [*changes, "duration=6ba", "schedule.warmup=1ba", "workers=1"])
    result = run(recipe, inspect=True)
    assert result.status == "ok", result.reason
    evidence = result.evidence["cuda_graphs"]
    assert (evidence["recorded"], evidence["replayed"]) == (1, 5)
    assert "flash" in result.as_it_ran["attention"]
    # Queries, keys, values and what goes into each product: ten widths a token and layer, at least.
    assert result.memory["activations"] > 2 * 8 * 14 * 10 * 64 * 2


def test_the_cpu_is_left_alone() -> None:
    """The same model as before: losses and gradients bit for bit."""
    model, stock = packed(model_of()), packed(model_of())
    assert (apply_cuda_graphs(model), apply_cuda_graphs(model)) == (1, 0)
    for one, other in zip(*(train(m, "SequenceClassification", "cpu") for m in (model, stock)), strict=True):
        assert torch.equal(one, other)
    assert list(model.state_dict()) == list(stock.state_dict())


def test_copies_and_pickles_have_graphs_of_their_own() -> None:
    model = packed(model_of())
    apply_cuda_graphs(model, limit=3)
    model(**batch_of(1)).loss.backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.bert.encoder.graphs_limit == 3
        assert cuda_graphs._GRAPHS.get(other.bert.encoder) is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TorchCompile(scope="model"), "scope='model'.*Give it scope='block' and no mode"),
        (TorchCompile(scope="block", mode="reduce-overhead"), "reduce-overhead.*or remove it"),
        (GradientCheckpointing(), "keeps the memory that gradient_checkpointing gives back"),
        (GradientRelease(), "keeps the memory that gradient_release gives back"),
    ],
)
def test_contradictions_are_refused(make_trainer, monkeypatch: pytest.MonkeyPatch, other, message: str) -> None:
    monkeypatch.setattr(CUDAGraphs, "unavailable", lambda self, device: None)
    with pytest.raises(ConflictError, match=message):
        make_trainer([other, CUDAGraphs()])


def test_a_model_of_another_family_is_left_alone(make_trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    monkeypatch.setattr(CUDAGraphs, "unavailable", lambda self, device: None)
    config = GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9, pad_token_id=0)
    with pytest.warns(NoEffectWarning, match="no layers of bert, roberta"):
        make_trainer([CUDAGraphs()], HuggingFaceModel(GPT2ForSequenceClassification(config)))


def test_needs_a_gpu(make_trainer) -> None:
    with pytest.raises(SpeedUpUnavailable, match="CUDA graphs need a GPU"):
        make_trainer([CUDAGraphs()])


@pytest.mark.parametrize("limit", [0, -1, 2.0, "8", True, None])
def test_wrong_limits_are_refused(limit) -> None:
    with pytest.raises((TypeError, ValueError), match="limit"):
        CUDAGraphs(limit=limit)


def test_its_memory_is_predicted() -> None:
    """What backward reads stays between steps, while another shape runs kernel by kernel beside it."""
    sizes = "{num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 1, intermediate_size: 64, vocab_size: 128}"
    changes = ["task={name: dummy, max_length: 32}", "model.pretrained=false", f"model.config={sizes}", "batch_size=8"]
    found = predict(load_recipe("finetune/fastest", changes))
    without = predict(load_recipe("finetune/fastest", [*changes, "speedups.cuda_graphs=null"]))
    assert found.activations == without.activations > 0
    assert found.peak == without.peak + without.activations
