"""Whole recipes against the padded model in float64: what they do alone is tested elsewhere, here all at once.

On a GPU everything of `finetune/fastest`, `mlm/fastest` and their variants; on a CPU `cpu/fastest` and
`cpu/fastest_fp32`, and what it can do of the others.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from model_check import random_weights
from small import bert_config, padded_batch

from composer_speedups import registry
from composer_speedups.algorithms import cuda_graphs
from composer_speedups.recipes import load_recipe
from composer_speedups.speedup import Stage, algorithm_passes

gpu = pytest.mark.gpu
CASES = [
    pytest.param("cpu/fastest", "cpu", id="cpu/fastest on the CPU"),
    pytest.param("cpu/fastest_fp32", "cpu", id="cpu/fastest_fp32 on the CPU"),
    pytest.param("finetune/fastest", "cpu", id="finetune/fastest, what a CPU can do"),
    pytest.param("mlm/fastest", "cpu", id="mlm/fastest, what a CPU can do"),
    pytest.param("finetune/fastest", "cuda", marks=gpu, id="finetune/fastest"),
    pytest.param("finetune/fastest_eager", "cuda", marks=gpu, id="finetune/fastest_eager"),
    pytest.param("finetune/fastest_compiled", "cuda", marks=gpu, id="finetune/fastest_compiled"),
    pytest.param("mlm/fastest", "cuda", marks=gpu, id="mlm/fastest"),
    pytest.param("mlm/fastest_compiled", "cuda", marks=gpu, id="mlm/fastest_compiled"),
]


def small_model(objective: str, **config: int) -> torch.nn.Module:
    from transformers import BertForMaskedLM, BertForSequenceClassification

    # Heads of 64, as flash attention likes them; without dropout there is one right answer.
    config = bert_config(hidden_size=128, num_attention_heads=2, intermediate_size=256, **config)
    kind = BertForMaskedLM if objective == "mlm" else BertForSequenceClassification
    torch.manual_seed(3)
    model = kind._from_config(config, attn_implementation="eager")
    # A third of `random_weights`: in bf16 the loss of larger logits is all rounding.
    with torch.no_grad():
        for name, parameter in random_weights(model).named_parameters():
            if "LayerNorm" not in name:
                parameter.div_(3)
    return model.train()


def batch_of(objective: str) -> dict[str, torch.Tensor]:
    batch = padded_batch(rows=8, length=32)
    if objective == "mlm":
        # As the collator masks: about 15 % of the real tokens of each row, at least one.
        real = batch["attention_mask"].bool()
        chosen = torch.zeros_like(real)
        for row, length in enumerate(real.sum(1).tolist()):
            chosen[row, torch.randperm(length)[: max(1, round(0.15 * length))]] = True
        batch["labels"] = torch.where(chosen, batch["input_ids"], -100)
    return batch


def speed_up(model: torch.nn.Module, name: str, device: str) -> tuple[list[str], list[object]]:
    """Apply what `device` can do of the recipe's changes to the model; their keys, and what must be kept."""
    from composer.core import Event

    recipe, done, kept = load_recipe(name), [], []
    for algorithm in algorithm_passes(recipe.algorithms(), Event.INIT):
        key = algorithm.key()
        if algorithm.stage in (Stage.OPTIMIZER, Stage.LOOP) or key == "matmul_precision":
            continue  # not about loss and gradients, or about the whole process
        # Compiling is slow on a CPU, and for a GPU's sake.
        if algorithm.unavailable(torch.device(device)) or (key == "torch_compile" and device == "cpu"):
            continue
        kept.append(registry.function(key)(model, **recipe.speedups[key]))
        done.append(key)
    return done, kept


def results(model: torch.nn.Module, batch: dict[str, torch.Tensor], autocast: bool = False) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in batch.items()}
    model.zero_grad()
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    found = {n: p.grad.detach().double().cpu() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double().cpu(), **found}


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Of the loss and of each gradient, in the Euclidean norm: single entries are bf16's luck."""
    assert found.keys() == exact.keys()
    # A key's bias moves all scores of a row alike: its exact gradient is 0, and there is nothing to relate to.
    return {
        name: float((found[name] - value).norm() / value.norm()) for name, value in exact.items() if value.norm() > 1e-9
    }


def check(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], stock: torch.nn.Module, device: str, autocast: bool = True
) -> None:
    """Raise AssertionError unless `model` is about as near to float64 as the stock model in bf16 (in float32) is.

    Both round the same values as often, or the changed one less; in another order, and a mean over fewer tokens. The
    stock model's own errors are 0.3 to 3 % in bf16; allowed are twice the largest of them.
    """
    exact = results(copy.deepcopy(stock).double(), batch)
    allowed = 2 * max(errors(results(copy.deepcopy(stock).to(device), batch, autocast), exact).values())
    large = 0.1 if autocast else 1e-4
    assert allowed < large, f"the stock model itself is off by {allowed / 2:.2g}: the check would see nothing"
    found = errors(results(model, batch), exact)
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= allowed, f"{worst} is off by {found[worst]:.2g}, allowed are {allowed:.2g}"


@pytest.mark.parametrize(("name", "device"), CASES)
def test_loss_and_gradients_are_the_padded_models(name: str, device: str) -> None:
    recipe = load_recipe(name)
    stock, batch = small_model(recipe.task.objective), batch_of(recipe.task.objective)
    model = copy.deepcopy(stock).to(device)
    done, kept = speed_up(model, name, device)
    assert {"unpadding", "fused_dropout_add_norm"} <= set(done)
    autocast = "mixed_precision" in recipe.speedups
    assert ("mixed_precision" in done) == autocast != name.endswith("_fp32")
    if device == "cuda":
        assert "torch_compile" in done or "torch_compile" not in recipe.speedups
    if "cuda_graphs" in done:
        results(model, batch)  # of each shape the first batch runs kernel by kernel
    check(model, batch, stock, device, autocast)
    if "cuda_graphs" in done:
        assert cuda_graphs._GRAPHS[model].replayed == 1
    del kept


@pytest.mark.parametrize(("name", "graphs"), [("finetune/fastest_compiled", 2), ("mlm/fastest_compiled", 1)])
def test_layers_share_a_graph(name: str, graphs: int) -> None:
    """Compiling is most of the first step's time. A last layer for some of the tokens has a graph of its own."""
    from torch._dynamo.utils import counters

    objective = load_recipe(name).task.objective
    model, batch = small_model(objective, num_hidden_layers=4), batch_of(objective)
    _, kept = speed_up(model, name, "cpu")
    for layer in model.bert.encoder.layer:
        layer.compile(backend="aot_eager", dynamic=True)
    torch._dynamo.reset()  # layers of an earlier test share their code with these
    counters.clear()
    results(model, batch, autocast=True)
    assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()
    del kept


@pytest.mark.parametrize("name", ["cpu/fastest", "mlm/fastest"])
@pytest.mark.parametrize("fault", ["a bias is lost", "padding is seen", "a gradient is halved"])
def test_the_check_sees_a_planted_fault(name: str, fault: str) -> None:
    recipe = load_recipe(name)
    stock, batch = small_model(recipe.task.objective), batch_of(recipe.task.objective)
    model = copy.deepcopy(stock)
    speed_up(model, name, "cpu")
    if fault == "a bias is lost":
        with torch.no_grad():
            model.bert.encoder.layer[0].attention.output.dense.bias.zero_()
    elif fault == "a gradient is halved":
        model.bert.encoder.layer[0].output.LayerNorm.weight.register_hook(lambda gradient: gradient / 2)
    stock_batch = dict(batch)
    if fault == "padding is seen":
        model = copy.deepcopy(stock)
        model.bert.register_forward_pre_hook(_without_mask, with_kwargs=True)
    with pytest.raises(AssertionError, match="is off by"):
        check(model, stock_batch, stock, "cpu")


def _without_mask(module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return args, kwargs | {"attention_mask": None}


def test_recipes_for_a_gpu_are_all_here() -> None:
    shipped = {path.parent.name + "/" + path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*/*.yaml")}
    fastest = {name for name in shipped if name.split("/")[1].startswith("fastest")}
    assert fastest == {"demo/fastest", "demo/fastest_fp32", *(case.values[0] for case in CASES)}
