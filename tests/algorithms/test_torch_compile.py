from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Event
from composer.models import ComposerClassifier, HuggingFaceModel
from small import BatchDataset, bert_config, padded_batch

from composer_speedups import LengthGroupedBatches, TorchCompile, apply_torch_compile, registry
from composer_speedups.compat import INDUCTOR_PRECOMPILES, compile_counters
from composer_speedups.compilation import compile_statistics
from composer_speedups.errors import ConflictError, SpeedUpUnavailable

# Dynamo of torch 2.11 looks for `.grad` where there is none, and hides the warning from all but "error" filters.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

LOADER = torch.utils.data.DataLoader(BatchDataset(16), batch_size=8)
SCOPES = ["model", "block"]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Compiled code outlives the model: without this, one test would run the code of another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def lower_limit():
    """Three compilations of one frame instead of eight."""
    before = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = 3
    yield
    torch._dynamo.config.recompile_limit = before


def bert(**changes: object) -> torch.nn.Module:
    from transformers import BertForSequenceClassification

    torch.manual_seed(3)
    return BertForSequenceClassification(bert_config(**changes))


def gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs.logits.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("place", ["0.output", "1.output", "1.attention.self.value"])
def test_a_hook_in_one_block_is_called_for_that_block_alone(place: str) -> None:
    model, seen = bert(num_hidden_layers=3), []
    model.bert.encoder.layer.get_submodule(place).register_forward_hook(lambda *_: seen.append(place))
    assert apply_torch_compile(model, scope="block", backend="aot_eager") == 2
    before = compile_counters()
    gradients(model, padded_batch())
    assert seen == [place] and compile_statistics(before)["graphs"] == 1


@pytest.mark.parametrize(("scope", "modules"), [("model", 1), ("block", 2)])
def test_matches_float64(scope: str, modules: int) -> None:
    model, exact, batch = bert(), bert().double(), padded_batch()
    assert apply_torch_compile(model, scope=scope, backend="aot_eager") == modules
    before = compile_counters()
    logits, grads = gradients(model, batch)
    reference, references = gradients(exact, batch)
    assert compile_statistics(before)["graphs"] >= 1
    # Float32 throughout: what a few hundred roundings of order-one values leave.
    torch.testing.assert_close(logits.double(), reference, rtol=1e-5, atol=1e-5)
    for grad, wanted in zip(grads, references, strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
def test_training_and_evaluation_run_compiled_code(make_trainer, scope: str) -> None:
    algorithm = TorchCompile(scope=scope, backend="aot_eager")
    trainer = make_trainer([algorithm], model=HuggingFaceModel(bert()), eval_dataloader=LOADER, eval_interval=0)
    keys = list(HuggingFaceModel(bert()).state_dict())
    assert list(trainer.state.model.state_dict()) == keys
    trainer.fit(duration="1ba")
    trained = algorithm.evidence["graphs"]
    assert trained >= 1
    trainer.eval()
    # Evaluation has graphs of its own: no dropout, no gradients.
    assert algorithm.evidence["graphs"] > trained
    assert algorithm.evidence["compile_seconds"] > 0
    assert algorithm.evidence["graph_breaks"] == 0
    assert algorithm.evidence["changed"] == (1 if scope == "model" else 2)


@pytest.mark.parametrize("scope", SCOPES)
def test_trains_as_without(make_trainer, scope: str) -> None:
    weights = []
    for algorithms in ([], [TorchCompile(scope=scope, backend="aot_eager")]):
        trainer = make_trainer(algorithms, model=HuggingFaceModel(bert()))
        trainer.fit()
        weights.append([p.detach().clone() for p in trainer.state.model.parameters()])
    start = list(bert().parameters())
    # AdamW moves a weight by up to lr=1e-3 a step, whatever the gradient's size: where a gradient is nothing
    # but rounding (keys' bias in attention), the two runs differ by that much. Hence the mean, not the most.
    differ = sum((a - b).abs().sum() for a, b in zip(*weights, strict=True))
    moved = sum((a - b).abs().sum() for a, b in zip(weights[0], start, strict=True))
    assert differ < 0.02 * moved


def test_layers_share_one_graph() -> None:
    # More layers than dynamo's limit of recompiles (8): if each one compiled anew, the last would run eagerly.
    model = bert(num_hidden_layers=10)
    before = compile_counters()
    assert apply_torch_compile(model, scope="block", backend="eager", fullgraph=True) == 10
    model(**padded_batch())["loss"].backward()
    statistics = compile_statistics(before)
    assert (statistics["graphs"], statistics["recompiles"], statistics["frames_over_limit"]) == (1, 0, 0)


def test_pytorchs_own_modules_are_compiled_too() -> None:
    # `Sequential.compile()` and `Linear.compile()` silently do nothing (torch 2.7 to 2.11).
    for scope in SCOPES:
        torch._dynamo.reset()
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        x = torch.randn(3, 4, requires_grad=True)
        eager, before = model(x), compile_counters()
        apply_torch_compile(model, scope=scope, backend="eager")
        torch.testing.assert_close(model(x), eager, rtol=0, atol=0)
        assert compile_statistics(before)["graphs"] == 1


def test_a_composer_models_parts_are_compiled() -> None:
    model = ComposerClassifier(torch.nn.Sequential(torch.nn.Linear(4, 3)), num_classes=3)
    assert apply_torch_compile(model, backend="eager") == 1
    batch = (torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
    before = compile_counters()
    with torch.no_grad():
        model.eval().eval_forward(batch)
    assert compile_statistics(before)["graphs"] == 1, "evaluation goes round the ComposerModel's __call__"


def test_counts_recompiles_and_warns_at_the_limit(make_trainer, lower_limit) -> None:
    algorithm = TorchCompile(scope="block", backend="eager", dynamic=False)
    trainer = make_trainer([algorithm], model=HuggingFaceModel(bert(num_hidden_layers=1)))
    trainer.fit(duration="1ba")
    assert algorithm.evidence["recompiles"] == 0
    for length in range(3, 8):
        trainer.state.model(padded_batch(length=length))
    with pytest.warns(UserWarning, match=r"recompile_limit.*Pad batches to few lengths"):
        trainer.fit(duration="1ba")
    assert algorithm.evidence["recompiles"] >= 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(duration="1ba")  # said once


@pytest.mark.parametrize(("multiple_of", "graphs"), [(16, 3), (1, None)])
def test_buckets_of_lengths_bound_the_recompiles(make_trainer, multiple_of: int, graphs: int | None) -> None:
    """Without `dynamic` each width is a graph: cut to multiples of 16, texts to 48 tokens have three."""
    rows = BatchDataset(96, length=48)
    algorithms = [LengthGroupedBatches(multiple_of=multiple_of), TorchCompile("block", backend="eager", dynamic=False)]
    trainer = make_trainer(
        algorithms,
        model=HuggingFaceModel(bert(num_hidden_layers=1)),
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=8, drop_last=True),
    )
    limit = nullcontext() if graphs else pytest.warns(UserWarning, match="recompile_limit")
    with limit:
        trainer.fit()
    found = algorithms[1].evidence
    assert found["graphs"] == found["recompiles"] + 1 == graphs if graphs else found["graphs"] > 6, found


def test_counts_graph_breaks() -> None:
    class Breaks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2

    model, before = Breaks(), compile_counters()
    apply_torch_compile(model, backend="eager")
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 4.0))
    statistics = compile_statistics(before)
    assert (statistics["graphs"], statistics["graph_breaks"]) == (2, 1)


@pytest.mark.parametrize("scope", SCOPES)
def test_checkpoints_travel_both_ways(make_trainer, tmp_path, scope: str) -> None:
    compiled = [TorchCompile(scope=scope, backend="eager")]
    first = make_trainer(compiled, model=HuggingFaceModel(bert()), run_name="a")
    first.fit(duration="1ba")
    first.save_checkpoint(str(tmp_path / "a.pt"))
    second = make_trainer([], model=HuggingFaceModel(bert()), load_path=str(tmp_path / "a.pt"), run_name="b")
    for mine, theirs in zip(first.state.model.parameters(), second.state.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    second.fit(duration="1ba")
    second.save_checkpoint(str(tmp_path / "b.pt"))
    again = [TorchCompile(scope=scope, backend="eager")]
    third = make_trainer(again, model=HuggingFaceModel(bert()), load_path=str(tmp_path / "b.pt"), run_name="c")
    third.fit(duration="1ba")
    assert third.state.timestamp.batch == 3


def test_plain_model_saves_as_ever(tmp_path) -> None:
    model = bert()
    apply_torch_compile(model, backend="eager")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_twice_is_once() -> None:
    model = bert()
    assert apply_torch_compile(model, scope="block", backend="eager") == 2
    assert apply_torch_compile(model, scope="block", backend="eager") == 0
    assert apply_torch_compile(model, scope="model", backend="eager") == 0
    assert apply_torch_compile(torch.compile(bert(), backend="eager"), backend="eager") == 0


def test_composers_own_compile_as_well_is_refused(make_trainer) -> None:
    trainer = make_trainer([TorchCompile(backend="eager")], compile_config={"backend": "eager"})
    for work in (trainer.fit, lambda: trainer.eval(LOADER)):
        with pytest.raises(ConflictError, match="torch_compile and the Trainer's compile_config"):
            work()


def test_model_given_compiled_is_refused(make_trainer) -> None:
    model = torch.compile(HuggingFaceModel(bert()), backend="eager")
    with pytest.raises(ConflictError, match="contradict"):
        make_trainer([TorchCompile(backend="eager")], model=model)


def test_warns_where_it_has_no_effect(make_trainer) -> None:
    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match="no ModuleList or Sequential of equal blocks"):
        make_trainer([TorchCompile(scope="block", backend="eager")], model=model)
    model = HuggingFaceModel(bert())
    apply_torch_compile(model.model, backend="eager")
    with pytest.warns(NoEffectWarning, match="compiled already"):
        make_trainer([TorchCompile(scope="block", backend="eager")], model=model)


def test_warns_when_nothing_was_compiled(make_trainer, monkeypatch) -> None:
    from composer_speedups.algorithms import torch_compile
    from composer_speedups.compat import CompileCounters

    trainer = make_trainer([TorchCompile(backend="eager")], model=HuggingFaceModel(bert()))
    monkeypatch.setattr(torch_compile, "compile_counters", CompileCounters)
    with pytest.warns(NoEffectWarning, match="compiled nothing by batch_end"):
        trainer.fit(duration="1ba")


def test_names_what_the_machine_lacks(make_trainer, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SpeedUpUnavailable, match=r"g\+\+ is not on the PATH. Run `apt-get install g\+\+`"):
        make_trainer([TorchCompile()])
    assert TorchCompile(backend="aot_eager").unavailable(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install triton" in TorchCompile().unavailable(torch.device("cuda"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scope": "layer"}, "scope='layer' is unknown. Use one of: model, block"),
        ({"backend": "indcutor"}, r"backend='indcutor' is unknown. There are: .*aot_eager.*eager_debug.*inductor"),
        ({"mode": "fast"}, "mode='fast' is unknown. Use one of: default, .*reduce-overhead"),
        ({"mode": "max-autotune", "backend": "eager"}, "mode='max-autotune' is for backend='inductor' only"),
        ({"cache_dir": " "}, "names no folder"),
    ],
    ids=str,
)
def test_unknown_values(arguments: dict[str, str], message: str) -> None:
    for make in (TorchCompile, lambda **kwargs: apply_torch_compile(torch.nn.Linear(2, 2), **kwargs)):
        with pytest.raises(ValueError, match=message):
            make(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"backend": print}, {"mode": 1}, {"dynamic": "yes"}, {"fullgraph": None}, {"cache_dir": 3}], ids=str
)
def test_wrong_types(arguments: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"has the wrong type\. Give "):
        TorchCompile(**arguments)


def test_a_cache_folder_that_cannot_be(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    model = torch.nn.Linear(2, 2)
    if not torch.cuda.is_available():
        with pytest.raises(SpeedUpUnavailable, match=r"break at the space in '.*/my cache'\. Name another"):
            apply_torch_compile(torch.nn.Linear(4, 4), cache_dir=str(tmp_path / "my cache"))
    with pytest.raises(SpeedUpUnavailable, match=r"cannot be made: .*Name another"):
        apply_torch_compile(model, cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(SpeedUpUnavailable, match=r"cache_dir='~nosuchuser/c' is in a home that nobody has\. Name"):
        apply_torch_compile(model, cache_dir="~nosuchuser/c")
    assert model._compiled_call_impl is None


def test_repr_and_registry() -> None:
    algorithm = registry.build("torch_compile", scope="block", dynamic=True, cache_dir="/tmp/x")
    assert repr(eval(repr(algorithm))) == repr(algorithm)
    assert "scope='block'" in repr(algorithm) and "dynamic=True" in repr(algorithm)


CACHED = """
import json, sys, torch
from composer_speedups.algorithms.torch_compile import apply_torch_compile
from composer_speedups.compilation import compile_statistics

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)))
x = torch.randn(4, 8, requires_grad=True)
eager = model(x)
apply_torch_compile(model, scope=sys.argv[2], cache_dir=sys.argv[1])
compiled = model(x)
compiled.sum().backward()
error = (compiled - eager).abs().max().item()
print(json.dumps(compile_statistics() | {"error": error}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scope", SCOPES)
def test_inductor_agrees_and_a_second_process_finds_its_code(tmp_path, scope: str) -> None:
    results = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CACHED, str(tmp_path / "cache"), scope], capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = results
    assert (cold["graphs"], cold["cache_hits"]) == (warm["graphs"], 0) and cold["cache_misses"] == 2
    assert (warm["cache_hits"], warm["cache_misses"]) == (2, 0), "forward and backward"
    for result in results:  # order-one values, eight products each
        assert result["error"] < 8 * torch.finfo(torch.float32).eps


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("scope", SCOPES)
def test_inductor_on_a_gpu(make_trainer, scope: str, mode: str | None) -> None:
    """Eight steps, of which CUDA graphs replay all but two, and evaluation between them: the same losses."""
    algorithm = TorchCompile(scope=scope, mode=mode)
    losses = []
    for algorithms in ([], [algorithm]):
        options = {"device": "gpu", "precision": "fp32", "eval_dataloader": LOADER, "max_duration": "2ep"}
        trainer = make_trainer(algorithms, HuggingFaceModel(bert()), **options)
        trainer.fit()
        # Not `state.loss`: evaluation has written over the memory of its graph.
        losses.append(float(trainer.state.total_loss_dict["loss/train/total"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert algorithm.evidence["graphs"] >= 2


@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("micro", [None, 4, 8])
@pytest.mark.parametrize("known", [True, False], ids=["loader with a batch size", "loader without"])
def test_cuda_graphs_with_microbatches_are_refused(mode, kind: str, micro: int | None, known: bool) -> None:
    state = SimpleNamespace(
        model=torch.nn.Linear(1, 1),
        device=SimpleNamespace(_device=torch.device(kind)),
        device_train_microbatch_size=micro,
        train_dataloader=SimpleNamespace(batch_size=8 if known else None),
    )
    algorithm = TorchCompile(mode=mode)

    def train() -> None:
        algorithm.on_event(Event.FIT_START, state, None)
        for _ in range(2):
            algorithm.on_event(Event.BEFORE_TRAIN_BATCH, state, None)
            for _ in range(8 // (micro or 8)):
                algorithm.on_event(Event.BEFORE_FORWARD, state, None)
            for _ in range(2):
                algorithm.on_event(Event.EVAL_BEFORE_FORWARD, state, None)

    wrong = mode in ("reduce-overhead", "max-autotune") and kind == "cuda" and micro == 4
    with pytest.raises(ConflictError, match="microbatches of 4") if wrong else nullcontext():
        train()


DYNAMIC = """
import copy, sys, torch, transformers
from composer_speedups import apply_torch_compile
from composer_speedups.compilation import compile_statistics

torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
stock = transformers.BertForSequenceClassification(config)
model = copy.deepcopy(stock)
assert apply_torch_compile(model, scope="block", dynamic=True, cache_dir=sys.argv[1]) == 2
for length in (5, 9):
    ids, mask = torch.randint(32, (3, length)), torch.ones(3, length, dtype=torch.long)
    mask[0, 3:] = 0
    results = []
    for which in (model, stock):
        out = which(ids, mask, labels=torch.tensor([0, 1, 0]))
        results.append((out.logits, *torch.autograd.grad(out.loss, list(which.parameters()))))
    torch.testing.assert_close(*results)
print(compile_statistics()["graphs"])
"""


def test_a_modules_integer_is_a_constant_where_sizes_are_dynamic(tmp_path) -> None:
    """PyTorch 2.7 makes a symbol of a head's width, and cannot write down its guard."""
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    done = subprocess.run([sys.executable, "-c", DYNAMIC, str(tmp_path)], capture_output=True, text=True, env=own)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr[-3000:]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="with an accelerator the workers have work")
@pytest.mark.skipif(INDUCTOR_PRECOMPILES, reason="versions after 2.7 start them with Triton's first kernel")
def test_without_an_accelerator_no_compile_workers_are_started():
    code = """
import sys
sys.modules["peft"] = None  # Composer imports it, and it, through others, Inductor
import psutil, torch
assert "torch._inductor.async_compile" not in sys.modules  # which starts them
from composer_speedups.compilation import prepare_inductor
prepare_inductor()
x = torch.ones(2, 2)
assert torch.equal(torch.compile(lambda x: x @ x)(x), 2 * x)  # nothing for a compiler to do
print([" ".join(p.cmdline()[:4]) for p in psutil.Process().children() if "compile_worker" in " ".join(p.cmdline())])
"""
    own = {name: value for name, value in os.environ.items() if name != "TORCH_WARM_POOL"}
    quiet = own | {"PYTHONWARNINGS": "", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, env=quiet)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python before 3.12 starts threads while it ends")
@pytest.mark.parametrize("woken", [False, pytest.param(True, marks=pytest.mark.slow)])  # True: without a job since
def test_a_process_does_not_wait_minutes_for_its_compile_workers(woken):
    code = f"""
import time
from composer_speedups.compilation import prepare_inductor
prepare_inductor()  # as apply_torch_compile does
from torch._inductor.async_compile import AsyncCompile, _pool_set
AsyncCompile().use_process_pool()
[pool] = _pool_set
if {woken}:
    while not AsyncCompile().use_process_pool():
        time.sleep(0.1)
    pool.quiesce()
    pool.wakeup()
import atexit
atexit.register(print, "ends")
"""
    own = {name: value for name, value in os.environ.items() if name != "TORCH_WARM_POOL"}
    command = [sys.executable, "-c", code]
    quiet = own | {"PYTHONWARNINGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=quiet)  # it was 300 s
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
