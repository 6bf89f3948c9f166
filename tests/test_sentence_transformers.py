"""Models of Sentence Transformers, where that is installed.

It brings scikit-learn, for which every import of transformers takes a second longer: so it is none of the tests' own
packages, and without it these are skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_encoder import write_encoder

pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
pytestmark = pytest.mark.filterwarnings("default")  # its own, and those of what it imports

from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer  # noqa: E402
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402

from composer_speedups import (  # noqa: E402
    apply_fast_dropout,
    apply_fused_bias_gelu,
    apply_fused_dropout_add_norm,
    apply_gradient_checkpointing,
    apply_last_layer_subset,
    apply_torch_compile,
    apply_unpadding,
)

QUERIES = ["the cat sat", "a dog ran under the tree", "fish", "the bird sat on the mat under a tree"]
DOCUMENTS = ["a cat on a mat", "tree", "the fish ran under the bird the bird ran", "a bird"]


@pytest.fixture
def folder(tmp_path: Path):
    """Write an encoder of a family without dropout, and a tokenizer."""

    def folder(family: str, auto: str = "Model", dropout: float = 0.0) -> str:
        return write_encoder(tmp_path / family, family, auto, dropout)

    return folder


def speed_up(model: torch.nn.Module) -> None:
    assert apply_unpadding(model) == 2
    apply_fused_dropout_add_norm(model)
    apply_fused_bias_gelu(model)
    apply_fast_dropout(model)
    assert apply_gradient_checkpointing(model) == 2


@pytest.mark.parametrize("loss", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("family", ["Bert", "MPNet", "DistilBert"])
def test_embeddings_losses_and_gradients(family: str, pooling: str, loss: str, folder) -> None:
    path, found = folder(family), []
    for fast in (False, True):
        model = SentenceTransformer(
            modules=[Transformer(path), Pooling(32, pooling_mode=pooling)], device="cpu"
        ).double()
        if fast:
            speed_up(model)
            assert apply_last_layer_subset(model) == 0, "the pooling may read all tokens"
        embeddings = torch.from_numpy(model.encode(QUERIES))
        model.train()
        options = {"mini_batch_size": 3} if loss.startswith("Cached") else {}
        value = getattr(losses, loss)(model, **options)([model.preprocess(QUERIES), model.preprocess(DOCUMENTS)], None)
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((embeddings, value.detach(), gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


def test_what_is_computed_again_has_the_same_masks(folder) -> None:
    """The cached losses compute embeddings twice, and the second time as the first: dropout, too."""
    from sentence_transformers.sentence_transformer.losses import cached_multiple_negatives_ranking as cached

    modules = [Transformer(folder("Bert", dropout=0.1)), Pooling(32, pooling_mode="mean")]
    model = SentenceTransformer(modules=modules, device="cpu").train()
    speed_up(model)
    batch = model.preprocess(QUERIES)
    context = cached.RandContext(*batch.values())
    first = model(dict(batch))["sentence_embedding"]
    torch.rand(5)
    with context:
        again = model(dict(batch))["sentence_embedding"]
    assert torch.equal(again, first) and not torch.equal(model(dict(batch))["sentence_embedding"], first)


def test_a_batch_that_goes_through_the_model_twice(folder, caplog) -> None:
    """It has then what was made of it the first time; MPNet takes any keyword."""
    model = SentenceTransformer(modules=[Transformer(folder("MPNet")), Pooling(32)], device="cpu")
    speed_up(model)
    batch = model.preprocess(QUERIES)
    model(batch)
    model(batch)
    assert "padded forward pass" not in caplog.text


def test_the_layers_of_a_cross_encoder(folder) -> None:
    """It is a `Sequential` of one module."""
    model = CrossEncoder(folder("Bert", "ForSequenceClassification"), device="cpu")
    speed_up(model)
    assert apply_last_layer_subset(model) == 1
    assert apply_torch_compile(model, scope="block", backend="eager") == 2


@pytest.mark.parametrize("attend", [False, True])
def test_colbert_reads_what_the_mask_leaves_out(attend: bool, folder) -> None:
    path, found = folder("Bert"), []
    for fast in (False, True):
        expansion = {"strategy": "fixed", "attend": attend, "length": 16}
        modules = [Transformer(path, query_expansion=expansion), MultiVectorMask()]
        model = MultiVectorEncoder(modules=modules, device="cpu").double()
        assert not fast or apply_unpadding(model) == (2 if attend else 0)
        found.append([torch.as_tensor(one) for one in model.encode_query(QUERIES)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
