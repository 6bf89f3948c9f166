from __future__ import annotations

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.models import ComposerClassifier

from composer_speedups import FusedEmbedding, apply_fused_embedding
from composer_speedups.algorithms import fused_embedding as module
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.kernels.embedding_gradient import embedding

CUDA = torch.device("cuda", 0)


@pytest.fixture
def pretend_cuda(monkeypatch):
    """Surgery alone can be looked at without a GPU; what the kernels compute cannot."""
    monkeypatch.setattr(module, "_unavailable", lambda device=None: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_cuda_it_says_so_before_training(make_trainer) -> None:
    with pytest.raises(SpeedUpUnavailable, match=r"needs a CUDA device.*remove it"):
        make_trainer([FusedEmbedding()])
    with pytest.raises(SpeedUpUnavailable, match="needs a CUDA device, and this machine has none"):
        apply_fused_embedding(torch.nn.Embedding(3, 2))


def test_missing_triton_names_the_remedy(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in FusedEmbedding().unavailable(CUDA)


def test_counts_what_it_leaves_alone(pretend_cuda, make_trainer) -> None:
    class Own(torch.nn.Embedding):
        pass

    of = torch.nn.Embedding
    tables = [of(3, 2), of(3, 2, sparse=True), of(3, 2, max_norm=1.0), of(3, 2, scale_grad_by_freq=True), Own(3, 2)]
    algorithm = FusedEmbedding()
    make_trainer([algorithm], model=ComposerClassifier(torch.nn.Sequential(*tables), num_classes=2))
    assert algorithm.evidence == {"changed": 1, "left_alone": 3}
    assert [type(t).__name__ for t in tables] == ["_FusedEmbedding", "Embedding", "Embedding", "Embedding", "Own"]


def test_same_parameters_same_keys_twice_is_once(pretend_cuda, tiny_bert) -> None:
    before = [(n, id(p), p.requires_grad) for n, p in tiny_bert.named_parameters()]
    keys = list(tiny_bert.state_dict())
    assert apply_fused_embedding(tiny_bert) == 3
    assert apply_fused_embedding(tiny_bert) == 0
    assert [(n, id(p), p.requires_grad) for n, p in tiny_bert.named_parameters()] == before
    assert list(tiny_bert.state_dict()) == keys


def test_a_cpus_tables_are_pytorchs(pretend_cuda) -> None:
    table, ids = torch.nn.Embedding(5, 2), torch.tensor([1, 4, 4])
    expected = torch.autograd.grad(table(ids).sum(), table.weight)[0]
    apply_fused_embedding(table)
    y = table(ids)
    assert type(y.grad_fn).__name__ == "EmbeddingBackward0"
    assert torch.autograd.grad(y.sum(), table.weight)[0].equal(expected)


def test_warns_when_nothing_fits(pretend_cuda, make_trainer) -> None:
    with pytest.warns(NoEffectWarning, match=r"no torch\.nn\.Embedding in the model"):
        make_trainer([FusedEmbedding()], model=ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2))


def test_repr_evaluates_back() -> None:
    assert repr(eval(repr(FusedEmbedding()))) == "FusedEmbedding()"


@pytest.mark.gpu
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("number", "width"), [(30522, 768), (512, 768), (2, 768), (40, 300)])
def test_matches_float64_on_the_gpu(number: int, width: int, ids: torch.dtype) -> None:
    """A rounding for each term at most, of all their sizes."""
    weight = torch.randn(number, width, device="cuda", requires_grad=True)
    tokens = torch.randint(0, number, (4, 700), device="cuda").to(ids)
    dy = torch.randn(4, 700, width, device="cuda")
    (found,) = torch.autograd.grad(embedding(tokens, weight, 1), weight, dy)
    wide, sizes = (torch.zeros(number, width, device="cuda", dtype=torch.float64) for _ in "ws")
    for sums, terms in ((wide, dy.double()), (sizes, dy.double().abs())):
        sums.index_add_(0, tokens.flatten().long(), terms.flatten(0, 1))
        sums[1] = 0
    assert ((found.double() - wide).abs() <= sizes * 2800 * torch.finfo(torch.float32).eps / 2).all()


@pytest.mark.gpu
def test_trains_on_the_gpu(make_trainer) -> None:
    algorithm = FusedEmbedding()
    make_trainer([algorithm], device="gpu", precision="amp_fp16").fit()
    assert algorithm.evidence["changed"] == 3
