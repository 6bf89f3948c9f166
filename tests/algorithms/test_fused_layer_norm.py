from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from composer.algorithms.warnings import NoEffectWarning

from composer_speedups import FusedLayerNorm, apply_fused_layer_norm
from composer_speedups.algorithms import fused_layer_norm as module
from composer_speedups.errors import SpeedUpUnavailable

CUDA = torch.device("cuda", 0)


@pytest.fixture
def pretend_cuda(monkeypatch):
    """Surgery alone can be looked at without a GPU; what the swapped class computes cannot."""
    monkeypatch.setattr(module, "_unavailable", lambda backend, device=None: None)


@pytest.fixture
def apex(monkeypatch, pretend_cuda):
    """A stand-in with the names and signatures of Apex's module; `calls` holds what it was called with."""
    fake = types.ModuleType("apex.normalization.fused_layer_norm")
    fake.calls = []

    def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        fake.calls.append((input.dtype, weight.dtype, bias.dtype))
        assert not torch.is_autocast_enabled("cpu")  # Apex would cast again
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    def fused_layer_norm(input, normalized_shape, eps=1e-6, memory_efficient=False):
        fake.calls.append((input.dtype,))
        return F.layer_norm(input, normalized_shape, None, None, eps)

    fake.fused_layer_norm_affine, fake.fused_layer_norm = fused_layer_norm_affine, fused_layer_norm
    monkeypatch.setattr(module, "_apex", lambda: fake)
    monkeypatch.setattr(module._FusedLayerNorm, "takes", lambda self, input: True)
    return fake


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("backend", ["auto", "triton", "apex"])
def test_without_cuda_it_says_so_before_training(make_trainer, backend: str) -> None:
    with pytest.raises(SpeedUpUnavailable, match=r"needs a CUDA device.*use low_precision_norm"):
        make_trainer([FusedLayerNorm(backend)])
    with pytest.raises(SpeedUpUnavailable, match="needs a CUDA device, and this machine has none"):
        apply_fused_layer_norm(torch.nn.LayerNorm(8), backend)


def test_missing_apex_names_the_remedy() -> None:
    if module._apex() is not None:
        pytest.skip("Apex is installed here")
    reason = FusedLayerNorm("apex").unavailable(CUDA)
    assert reason is not None and "https://github.com/NVIDIA/apex" in reason
    assert FusedLayerNorm("auto").unavailable(CUDA) is None


def test_missing_triton_names_the_remedy(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in FusedLayerNorm("triton").unavailable(CUDA)


@pytest.mark.parametrize("extension", [True, False])
def test_apex_counts_only_with_its_cuda_extension(monkeypatch, extension: bool) -> None:
    names = ["apex", "apex.normalization", "apex.normalization.fused_layer_norm"]
    for name in [*names, "fused_layer_norm_cuda"]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    if not extension:
        monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)  # import raises ImportError
    module._apex.cache_clear()
    try:
        assert module._choose("auto") == ("apex" if extension else "triton")
    finally:
        module._apex.cache_clear()


def test_apex_gets_the_autocast_dtype(apex) -> None:
    layer = torch.nn.LayerNorm(16)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(4, 16)
    expected = layer(x)
    assert apply_fused_layer_norm(layer) == 1
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    # Input, weight and output are rounded, each of order one: three times eps/2 of values up to about 4.
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    assert apex.calls == [(torch.float32,) * 3, (torch.bfloat16,) * 3]


def test_apex_without_weights_and_without_bias(apex) -> None:
    plain = torch.nn.LayerNorm(16, elementwise_affine=False)
    unbiased = torch.nn.LayerNorm(16, bias=False)
    assert apply_fused_layer_norm(torch.nn.Sequential(plain, unbiased)) == 1
    assert type(unbiased) is torch.nn.LayerNorm
    x = torch.randn(3, 16)
    torch.testing.assert_close(plain(x), F.layer_norm(x, (16,)), rtol=0, atol=0)
    assert apex.calls == [(torch.float32,)]


def test_counts_what_it_leaves_alone(pretend_cuda, make_trainer) -> None:
    class Own(torch.nn.LayerNorm):
        pass

    from composer.models import ComposerClassifier

    norms = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.LayerNorm(8193), torch.nn.LayerNorm((2, 4)), Own(8))
    algorithm = FusedLayerNorm("triton")
    make_trainer([algorithm], model=ComposerClassifier(norms, num_classes=2))
    assert algorithm.evidence == {"changed": 1, "backend": "triton", "left_alone": 2}
    assert [type(n).__name__ for n in norms] == ["_TritonLayerNorm", "LayerNorm", "LayerNorm", "Own"]


def test_same_parameters_same_keys_twice_is_once(pretend_cuda, tiny_bert) -> None:
    before = [(n, id(p), p.requires_grad) for n, p in tiny_bert.named_parameters()]
    keys = list(tiny_bert.state_dict())
    assert apply_fused_layer_norm(tiny_bert, "triton") == 5
    assert apply_fused_layer_norm(tiny_bert, "triton") == 0
    assert [(n, id(p), p.requires_grad) for n, p in tiny_bert.named_parameters()] == before
    assert list(tiny_bert.state_dict()) == keys


def test_cpu_inputs_go_to_torch(pretend_cuda) -> None:
    layer, x = torch.nn.LayerNorm(16), torch.randn(3, 16)
    expected = layer(x)
    apply_fused_layer_norm(layer, "triton")
    assert torch.equal(layer(x), expected)


def test_warns_when_nothing_fits(pretend_cuda, make_trainer) -> None:
    from composer.models import ComposerClassifier

    wide = ComposerClassifier(torch.nn.LayerNorm((2, 4)), num_classes=2)
    with pytest.warns(NoEffectWarning, match="none of its 1 nn.LayerNorm has a form that triton"):
        make_trainer([FusedLayerNorm("triton")], model=wide)
    with pytest.warns(NoEffectWarning, match=r"no torch\.nn\.LayerNorm in the model"):
        linear = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
        make_trainer([FusedLayerNorm("triton")], model=linear)


@pytest.mark.parametrize(
    ("backend", "error"), [("cuda", ValueError), ("", ValueError), (None, TypeError), (1, TypeError)]
)
def test_bad_backend_names_the_choices(backend, error) -> None:
    with pytest.raises(error, match="auto, apex, triton"):
        FusedLayerNorm(backend)


def test_repr_evaluates_back() -> None:
    assert repr(eval(repr(FusedLayerNorm(backend="triton")))) == "FusedLayerNorm(backend='triton')"


@pytest.mark.gpu
def test_trains_on_the_gpu(make_trainer) -> None:
    algorithm = FusedLayerNorm("triton")
    make_trainer([algorithm], device="gpu", precision="amp_fp16").fit()
    assert algorithm.evidence["changed"] == 5
