from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from composer_speedups.joint_linear import joint_linear
from composer_speedups.kernels import fused_attention
from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention

CLOSE = dict(rtol=1e-12, atol=1e-12)


class Calls(TorchDispatchMode):
    """Counts the calls of some operators within: matmuls, if nothing else is said."""

    def __init__(self, *operators) -> None:
        super().__init__()
        self.operators = operators or (torch.ops.aten.addmm, torch.ops.aten.mm)
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in self.operators
        return func(*args, **(kwargs or {}))


def layers(bias: bool = True) -> list[torch.nn.Linear]:
    return [torch.nn.Linear(6, width, bias, dtype=torch.float64) for width in (4, 2, 5)]


def compare(linear: list[torch.nn.Module], matmuls: int, shape: tuple[int, ...] = (7, 6)) -> None:
    """Outputs and gradients against the layers one by one, and how many matmuls forward and backward took."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weights = [p for m in linear for p in m.parameters()]
    expected = [m(x) for m in linear]
    gradients = [torch.randn_like(y) for y in expected]
    reference = torch.autograd.grad(expected, [x, *weights], gradients)
    with Calls() as counted:
        found = joint_linear(linear, x)
        torch.testing.assert_close(list(found), expected, **CLOSE)
        torch.testing.assert_close(torch.autograd.grad(found, [x, *weights], gradients), reference, **CLOSE)
    assert counted.count == matmuls


@pytest.mark.parametrize("shape", [(7, 6), (3, 7, 6), (0, 6)])
def test_one_matmul_and_two_for_the_gradients(shape: tuple[int, ...]) -> None:
    compare(layers(), 3, shape)


class Adapted(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_others_than_plain_linear_layers_are_called() -> None:
    compare([*layers()[:2], Adapted(6, 5, dtype=torch.float64)], 9)
    compare(layers(bias=False), 3)
    compare([*layers(bias=False)[:1], *layers()[1:]], 9)
    doubled = layers()
    parametrize.register_parametrization(doubled[1], "weight", torch.nn.Tanh())
    compare(doubled, 9)


def test_a_forward_of_its_own_is_called() -> None:
    """As Accelerate gives it, to bring weights from where it has put them, and some adapters."""
    linear = layers()
    plain = linear[1].forward
    linear[1].forward = lambda x: 2 * plain(x)
    compare(linear, 9)


class Quantised(torch.Tensor):
    """A weight that can do nothing but be multiplied with."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.cat:
            raise NotImplementedError("it cannot be put beside others")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_of_another_type_is_left_to_its_layer() -> None:
    linear = layers()
    linear[1].weight = torch.nn.Parameter(linear[1].weight.detach().as_subclass(Quantised))
    assert type(linear[1].weight) is Quantised
    x = torch.randn(7, 6, dtype=torch.float64)
    torch.testing.assert_close(list(joint_linear(linear, x)), [m(x) for m in linear], **CLOSE)


def test_compiled_without_a_break() -> None:
    linear, x = layers(), torch.randn(7, 6, dtype=torch.float64)
    compiled = torch.compile(lambda x: joint_linear(linear, x), backend="eager", fullgraph=True)
    torch.testing.assert_close(list(compiled(x)), [m(x) for m in linear], **CLOSE)
    torch._dynamo.reset()


def test_frozen_weights_have_no_gradient_and_the_others_theirs() -> None:
    linear, x = layers(), torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    linear[0].requires_grad_(False)
    linear[2].weight.requires_grad_(False)
    gradients = []
    for outputs in ([m(x) for m in linear], joint_linear(linear, x)):
        for tensor in (x, *(p for m in linear for p in m.parameters())):
            tensor.grad = None
        sum(y.sin().sum() for y in outputs).backward()
        gradients.append([p.grad for m in linear for p in m.parameters()] + [x.grad])
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(other, one, **CLOSE)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_layer_with_a_hook_is_called(kind: str) -> None:
    linear, seen = layers(), []
    getattr(linear[1], f"register_{kind}_hook")(lambda *_: seen.append(kind))
    y = joint_linear(linear, torch.randn(3, 6, dtype=torch.float64, requires_grad=True))
    y[1].sum().backward()
    assert seen == [kind]


def test_mixed_precision_gives_what_the_layers_give() -> None:
    """In bf16 with sums in float32: as close to float64 as the layers one by one."""
    torch.manual_seed(0)
    linear = [torch.nn.Linear(64, 64) for _ in range(3)]
    x = torch.randn(50, 64)
    exact = [torch.nn.functional.linear(x.double(), m.weight.double(), m.bias.double()) for m in linear]
    with torch.autocast("cpu", torch.bfloat16):
        apart, joint = [m(x) for m in linear], joint_linear(linear, x)
    for one, other, reference in zip(apart, joint, exact, strict=True):
        assert other.dtype == torch.bfloat16
        assert (other - reference).abs().max() <= 1.01 * (one - reference).abs().max()


def attended(x: torch.Tensor, projected: Sequence[torch.Tensor]) -> torch.Tensor:
    lengths = Lengths.of([len(x)])
    return varlen_attention(*(y.unflatten(-1, (2, 16)) for y in projected), lengths, lengths).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_attention_are_put_together_without_a_copy(dtype: torch.dtype) -> None:
    if fused_attention.native(dtype) is None:
        pytest.skip(f"no kernel of attention in {dtype} on this CPU")
    linear = [torch.nn.Linear(6, 32, dtype=dtype) for _ in range(3)]
    x = torch.randn(9, 6, dtype=dtype, requires_grad=True)
    with Calls(torch.ops.aten.cat) as counted:
        projected = joint_linear(linear, x)
        counted.count = 0
        attended(x, projected).sum().backward()
    assert counted.count == 0
    found = [x.grad, *(p.grad for m in linear for p in m.parameters())]
    expected = torch.autograd.grad(
        attended(x, [m(x) for m in linear]).sum(), [x, *(p for m in linear for p in m.parameters())]
    )
    allowed = 64 * torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= allowed * other.abs().max().clamp(min=1)


def test_somebody_else_who_reads_a_part_adds_to_its_gradient() -> None:
    """Then the parts lie apart, and a copy it is."""
    linear = [torch.nn.Linear(6, 32) for _ in range(3)]
    x = torch.randn(9, 6, requires_grad=True)
    gradients = []
    for make in (joint_linear, lambda layers, x: [m(x) for m in layers]):
        projected = make(linear, x)
        loss = attended(x, projected).sum() + projected[0].sin().sum() + projected[2].square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *(p for m in linear for p in m.parameters())]))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_gradient_of_the_gradient() -> None:
    """Also where the parts' gradients are parts of one tensor: they must know of it."""
    linear, x = layers(), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: joint_linear(linear, x), x)
    assert torch.autograd.gradgradcheck(lambda x: torch.cat(joint_linear(linear, x), -1), x)


def test_many_gradients_at_once() -> None:
    linear, x = layers(), torch.randn(1, 6, dtype=torch.float64)
    expected = torch.cat([m.weight for m in linear])[None, :, None]
    found = torch.autograd.functional.jacobian(lambda x: torch.cat(joint_linear(linear, x), -1), x, vectorize=True)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_trace_can_be_saved(tmp_path: Path) -> None:
    module = torch.nn.ModuleList(layers())
    module.forward = lambda x: joint_linear(list(module), x)
    x = torch.randn(3, 6, dtype=torch.float64)
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):  # of torch.jit, in newer versions
            warnings.simplefilter("ignore", kind)
        torch.jit.trace(module, x).save(tmp_path / "traced.pt")
        found = torch.jit.load(tmp_path / "traced.pt")(x)
    torch.testing.assert_close(list(found), list(joint_linear(list(module), x)), **CLOSE)


def test_transforms_of_functions() -> None:
    linear, x = layers(), torch.randn(3, 6, dtype=torch.float64)
    expected = torch.func.grad(lambda x: sum(m(x).sin().sum() for m in linear))(x)
    found = torch.func.grad(lambda x: sum(y.sin().sum() for y in joint_linear(linear, x)))(x)
    torch.testing.assert_close(found, expected, **CLOSE)
