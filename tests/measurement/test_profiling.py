"""Where a step's time goes: parts that sum to the whole, in the right kinds, with operators slowed down on purpose."""

from __future__ import annotations

import time
from types import ModuleType

import pytest
import torch
import torch.utils.checkpoint
from composer import Trainer
from small import BatchDataset, bert_config
from torch import nn

from composer_speedups.kernels import fast_dropout, fused_attention, per_sequence
from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention
from composer_speedups.measurement.operator_kinds import KINDS, classify
from composer_speedups.measurement.profiling import StepProfiler, profiled

CPU = torch.device("cpu")
# Seconds. Sleep is never shorter than asked for; and nothing else here takes as long, whatever else the machine does.
SLOW = 0.2


@torch.library.custom_op("planted::layer_norm", mutates_args=())
def slow_norm(x: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW)
    return x.clone()


@slow_norm.register_autograd
def _(ctx, gradient):
    time.sleep(SLOW)
    return gradient


@torch.library.custom_op("planted::stencil", mutates_args=())
def slow_stranger(x: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW)
    return x.clone()


slow_stranger.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("planted::gelu", mutates_args=())
def slow_activation(x: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW)
    return x.clone()


slow_activation.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("aten::mkldnn_linear", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_softmax", "attention"),
        ("aten::_log_softmax", "loss and head"),
        ("aten::bernoulli_", "dropout"),
        ("aten::native_layer_norm", "norm"),
        ("aten::gelu", "activation"),
        ("aten::embedding_dense_backward", "embedding"),
        ("aten::_to_copy", "copies"),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("c10d::allreduce_", "exchange"),
        ("torch::distributed::reducer::mul_out", "exchange"),
        ("torch.distributed.ddp.reducer::copy_bucket_to_grad", "exchange"),
        ("mine::nccl:", "other"),
        ("aten::_fused_adamw_", "optimizer"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data"),
        ("Torch-Compiled Region: 0/0", "compiled"),
        ("triton_poi_fused_native_dropout_3", "dropout"),  # a kernel's name tells more than who made it
        ("composer_speedups::varlen_attention", "attention"),
        ("_PackedAttentionBackward", "attention"),
        ("composer_speedups::varlen_attention_backward", "attention"),
        ("_PerSequenceBackward", "attention"),
        ("composer_speedups::layer_norm", "norm"),
        ("composer_speedups::layer_norm_backward", "norm"),
        ("composer_speedups::dropout_add_norm", "norm"),
        ("_DropoutBackward", "dropout"),
        ("_CrossEntropy", "loss and head"),
        ("planted::stencil", "other"),
        ("mine::topology", "other"),  # `to` is no part of a word
    ],
)
def test_kinds_by_name(name: str, kind: str):
    assert classify(name) == kind and kind in KINDS


def test_every_operator_of_this_package_has_a_kind():
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("composer_speedups::")]
    assert names, "imported above"
    assert {n: classify(n) for n in names if classify(n) == "other"} == {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.dense, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, ids: torch.Tensor, planted: torch.library.CustomOpDef | None) -> torch.Tensor:
        x = self.dense(self.embed(ids))
        x = x if planted is None else planted(x)
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        x = x + nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).transpose(1, 2).flatten(-2)
        x = nn.functional.gelu(nn.functional.dropout(self.norm(x), 0.1))
        return nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten() % 64)


def profile(planted: torch.library.CustomOpDef | None = None, steps: int = 2):
    model, ids = Net(), torch.randint(0, 100, (8, 32))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        model(ids, planted).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profiled(CPU, steps) as found:
        for _ in range(steps):
            step()
    return found.profile


def test_the_parts_sum_to_the_step():
    found = profile()
    assert sum(found.seconds.values()) == pytest.approx(found.step, rel=1e-6)
    assert all(seconds > 0 for seconds in found.seconds.values()) and set(found.seconds) <= set(KINDS)
    wanted = {"matmul", "attention", "norm", "dropout", "activation", "embedding", "loss and head", "optimizer", "loop"}
    assert wanted <= set(found.seconds)


def test_a_slow_operator_is_found_where_it_is():
    assert profile().seconds["norm"] < SLOW
    found = profile(slow_norm).seconds
    # Its forward and its backward, which autograd's number ties to it.
    assert found["norm"] >= 2 * SLOW and max(found, key=found.get) == "norm"


def test_a_stranger_is_shown_as_other_by_its_name():
    found = profile(slow_stranger)
    assert found.seconds["other"] >= SLOW and max(found.seconds, key=found.seconds.get) == "other"
    name, seconds = next(iter(found.other.items()))
    assert "stencil" in name and seconds >= SLOW


def test_a_slow_loop_is_the_loops():
    with profiled(CPU) as found:
        time.sleep(SLOW)
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert found.profile.seconds["loop"] >= SLOW


def test_the_backward_pass_counts_with_what_caused_it():
    x = torch.randn(64, 64, 64, requires_grad=True)
    with profiled(CPU) as found:
        nn.functional.dropout(x, 0.5).sum().backward()  # its backward is a plain product
    shares = found.profile.seconds
    assert "dropout" in shares and "backward of MulBackward0" not in found.profile.other


def test_what_a_checkpoint_computes_again_is_of_its_own_kind():
    """The norm's backward node is the first to ask for what was kept, and computes everything before it again."""
    x, norm = torch.randn(8, 32, 64, requires_grad=True), nn.LayerNorm(64)
    with profiled(CPU) as found:
        block = lambda y: norm(nn.functional.dropout(slow_activation(y), 0.1))  # noqa: E731
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum().backward()
    seconds = found.profile.seconds
    assert seconds["activation"] >= 2 * SLOW, "forward, and again"
    assert 0 < seconds["norm"] < SLOW and 0 < seconds["dropout"] < SLOW


def test_own_kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """Slow on purpose inside, forward and backward, where no operator of PyTorch runs."""

    def slowly(module: ModuleType, name: str) -> None:
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: time.sleep(SLOW) or kernel(*args, **kwargs))

    for module, names in ((per_sequence, ("_forward", "_backward")), (fused_attention, ("forward", "backward"))):
        for name in names:
            slowly(module, name)
    for width in (24, 32):  # by separate passes, and, where this CPU has it, by the kernel for multiples of 16
        x, lengths = torch.randn(60, 4, width, requires_grad=True), Lengths.of([20, 40])
        fused_attention.native(torch.float32)  # its own trial is no part of the step
        with profiled(CPU) as found:
            varlen_attention(x, x, x, lengths, lengths, 0.1).sum().backward()
        assert found.profile.seconds["attention"] >= 2 * SLOW
    slowly(fast_dropout, "_native" if fast_dropout.native() else "_by_torch")
    y = torch.randn(1000, requires_grad=True)
    with profiled(CPU) as found:
        fast_dropout.fast_dropout(y, 0.1).backward(torch.ones(1000))
    assert found.profile.seconds["dropout"] >= 2 * SLOW


def test_in_composers_loop_the_optimizer_is_not_the_whole_step():
    from composer.models import HuggingFaceModel
    from transformers import BertForSequenceClassification

    bert = BertForSequenceClassification(bert_config(hidden_size=64, intermediate_size=256))
    bert.bert.register_forward_pre_hook(lambda *_: time.sleep(SLOW))
    profiler = StepProfiler(bert, steps=2)
    trainer = Trainer(
        model=HuggingFaceModel(bert, use_logits=True, metrics=[]),
        train_dataloader=torch.utils.data.DataLoader(BatchDataset(), batch_size=8),
        optimizers=torch.optim.AdamW(bert.parameters(), lr=1e-4, foreach=False),
        max_duration="4ba",
        callbacks=[profiler],
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    found = profiler.profile
    assert sum(found.seconds.values()) == pytest.approx(found.step, rel=1e-6)
    # Composer calls forward and backward inside optimizer.step(closure).
    assert found.step >= SLOW > found.seconds["optimizer"]
    assert {"matmul", "attention", "norm", "data", "loss and head", "loop"} <= set(found.seconds)
    assert not bert.classifier._forward_hooks and not bert.classifier._forward_pre_hooks, "the marks are gone"
