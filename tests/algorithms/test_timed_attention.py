"""`Unpadding(timed_attention=True)`: attention by a kernel of our own, where a trial prefers it."""

from __future__ import annotations

import copy
import re
from collections import Counter

import pytest
import torch
from composer.models import HuggingFaceModel
from small import BatchDataset, checkpoint_blocks
from test_cuda_graphs import HEADS, SAME_BF16, assert_close, graphs_of, model_of, train
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from composer_speedups import MixedPrecision, Unpadding, apply_cuda_graphs, apply_last_layer_subset, apply_unpadding
from composer_speedups.kernels import attention_trial
from composer_speedups.packed import encoder as module
from composer_speedups.packed.packing import Packing

BF16 = torch.bfloat16


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A trial that computes, forward and backward, and finds our kernel the faster; the tokens of each of its calls."""
    calls: list[int] = []
    attend, milliseconds = module.packed_attention, iter([5.0] * 1000)

    def counted(q, *arguments):
        calls.append(len(q))
        return attend(q, *arguments)

    monkeypatch.setattr(module, "packed_attention", counted)
    monkeypatch.setattr(attention_trial, "_VERDICTS", {})
    monkeypatch.setattr(attention_trial, "_UNDECIDED", Counter())
    monkeypatch.setattr(attention_trial, "_milliseconds", lambda call: next(milliseconds))
    monkeypatch.setattr(attention_trial._Trial, "times", lambda self, p: (0.1, 0.2))
    return calls


def wide(family: str = "Bert", head: str = "SequenceClassification", dropout: float = 0.0) -> torch.nn.Module:
    """With heads of 32, as the kernel takes them."""
    model = model_of(family, head, dropout)
    layers = [m for m in model.modules() if hasattr(m, "attention_head_size")]
    for layer in layers:
        layer.num_attention_heads = layer.n_heads = 1
        layer.attention_head_size = 32
    assert layers
    return model


def timed(model: torch.nn.Module, on: bool = True) -> torch.nn.Module:
    model = copy.deepcopy(model).cuda()
    assert apply_unpadding(model, timed_attention=on) == 2
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert"])
def test_trains_as_with_flash_attention(family: str, head: str, preferred: list[int]) -> None:
    stock = wide(family, head)
    found = train(timed(stock), head, "cuda", BF16)
    assert len(preferred) == 2 * 5, "both layers, in five steps"
    assert attention_trial._VERDICTS and all(verdict.own for verdict in attention_trial._VERDICTS.values())
    assert_close(found, train(timed(stock, False), head, "cuda", BF16), 2e-2)
    assert len(preferred) == 2 * 5
    assert_close(found, train(stock, head, "cpu", BF16), 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_trial_within_checkpointed_blocks_is_not_part_of_them(reentrant: bool, preferred: list[int]) -> None:
    def losses_and_gradients(checkpointed: bool) -> list[torch.Tensor]:
        model = timed(wide(dropout=0.2))
        if checkpointed:
            checkpoint_blocks(model, reentrant)
        torch.manual_seed(8)
        return train(model, "SequenceClassification", "cuda", BF16, steps=2)

    with_trial, without = losses_and_gradients(True), losses_and_gradients(False)
    assert len(preferred) == 2 * 2 * 2 + 2 * 2
    assert_close(with_trial, without, SAME_BF16)


@pytest.mark.gpu
def test_nor_where_some_outputs_are_kept(preferred: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective checkpointing listens to operators, and takes what it has heard for what is computed again."""
    monkeypatch.setattr(attention_trial._Trial, "times", lambda self, p: (0.2, 0.1))  # flash attention it is

    def policy(ctx, op, *args, **kwargs):
        kept = op is torch.ops.aten._flash_attention_forward.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    layer = timed(wide(dropout=0.3)).bert.encoder.layer[0].attention.self
    packing = Packing.of(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in (torch.ones(2, 20), [20, 20])))

    def gradient() -> torch.Tensor:
        hidden = torch.linspace(-1, 1, 40 * 32, device="cuda").view(40, 32).requires_grad_()
        torch.manual_seed(4)
        with torch.autocast("cuda", BF16):
            out = checkpoint(
                lambda x: layer(x, packing)[0],
                hidden,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )
        out.float().square().sum().backward()
        return hidden.grad.double().cpu()

    with_trial = gradient()
    assert len(attention_trial._VERDICTS) == 1 and not preferred
    assert_close([with_trial], [gradient()], SAME_BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["model", "layers"])
def test_a_graph_has_it(scope: str, preferred: list[int]) -> None:
    def losses_and_gradients(recorded: bool) -> list[torch.Tensor]:
        model = timed(wide())
        apply_last_layer_subset(model)
        assert not recorded or apply_cuda_graphs(model, scope=scope)
        found = train(model, "SequenceClassification", "cuda", BF16)
        assert not recorded or graphs_of(model).replayed >= 3
        return found

    one_by_one = losses_and_gradients(False)
    assert len(preferred) == 5, "the last layer has one query a text, and flash attention"
    assert_close(losses_and_gradients(True), one_by_one, SAME_BF16)
    assert 5 < len(preferred) < 10, "replays call nothing"


@pytest.mark.gpu
def test_the_evidence_has_both_times(make_trainer, preferred: list[int]) -> None:
    algorithm, model = Unpadding(timed_attention=True), wide()
    trainer = make_trainer(
        [MixedPrecision("bf16"), algorithm],
        model=HuggingFaceModel(model),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train_dataloader=DataLoader(BatchDataset(24), batch_size=8),
        device="gpu",
    )
    trainer.fit()
    said = algorithm.evidence["trials"]
    assert re.fullmatch(r"\d+ tokens, up to \d+ a sequence: Triton: 0.100 ms by Triton, 0.200 ms by .*", said)
    assert len(preferred) == 2 * 3


def test_on_a_cpu_nothing_is_tried(make_trainer) -> None:
    algorithm = Unpadding(timed_attention=True)
    make_trainer([algorithm]).fit()
    assert "trials" not in algorithm.evidence and algorithm.evidence["kernel"].startswith("per sequence")


@pytest.mark.parametrize("value", [1, "yes", None])
def test_nothing_is_changed_by_a_wrong_value(value: object, tiny_bert: torch.nn.Module) -> None:
    with pytest.raises(TypeError, match="timed_attention must be true or false, got"):
        apply_unpadding(tiny_bert, timed_attention=value)
    assert apply_unpadding(tiny_bert) == 2
