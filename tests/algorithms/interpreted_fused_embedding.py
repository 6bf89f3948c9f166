"""FusedEmbedding with its real kernels, on the CPU: `test_interpreted.py` runs this file."""

from __future__ import annotations

import copy

import pytest
import torch
from model_check import check_model, random_weights
from small import padded_batch

from composer_speedups import apply_fused_embedding, apply_unpadding
from composer_speedups.kernels import embedding_gradient

# Triton 3.3's interpreter turns arrays of one element into scalars in a way that NumPy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize("unpadded", [False, True])
def test_bert_matches_float64(tiny_bert: torch.nn.Module, unpadded: bool) -> None:
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    assert apply_fused_embedding(changed) == 3
    assert not unpadded or apply_unpadding(changed)
    check_model(changed, stock, padded_batch(rows=2, length=6))


def test_the_check_finds_a_planted_fault(tiny_bert: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = random_weights(tiny_bert).eval()
    changed = copy.deepcopy(stock)
    apply_fused_embedding(changed)
    exact = embedding_gradient._gradient
    monkeypatch.setattr(embedding_gradient, "_gradient", lambda dy, *more: exact(dy * 1.001, *more))
    with pytest.raises(AssertionError, match="is off by"):
        check_model(changed, stock, padded_batch(rows=2, length=6))


def in_use(table: torch.nn.Embedding) -> bool:
    """Whether its gradient would be the kernel's."""
    y = table(torch.tensor([1, 2]))
    return type(y.grad_fn).__name__ == "_EmbeddingBackward"


def test_what_the_kernel_does_not_compute_is_pytorchs() -> None:
    tables = torch.nn.ModuleList([torch.nn.Embedding(5, 4) for _ in range(4)])
    assert apply_fused_embedding(tables) == 4
    assert all(map(in_use, tables))
    tables[0].double()
    tables[1].sparse = True
    tables[2].max_norm = 1.0
    tables[3].scale_grad_by_freq = True
    assert not any(map(in_use, tables))


def test_deterministic_algorithms_are_pytorchs() -> None:
    table = torch.nn.Embedding(5, 4)
    apply_fused_embedding(table)
    torch.use_deterministic_algorithms(True)
    try:
        assert not in_use(table)
    finally:
        torch.use_deterministic_algorithms(False)
    assert in_use(table)


def test_compiles_without_a_graph_break() -> None:
    table, ids = torch.nn.Embedding(5, 4), torch.tensor([1, 2, 2])
    apply_fused_embedding(table)
    torch.compile(table, backend="aot_eager", fullgraph=True)(ids).sum().backward()
    assert table.weight.grad[:, 0].tolist() == [0, 1, 2, 0, 0]
