"""Memory by kind: the prediction against what real steps keep, and the counting itself."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from contract import OPTIMIZERS, USABLE, case

from composer_speedups import apply_gradient_release, compat
from composer_speedups.algorithms import sdp_attention
from composer_speedups.errors import ConflictError, UserError
from composer_speedups.gradient_buckets import gradients_at_most
from composer_speedups.measurement import memory
from composer_speedups.measurement.memory import largest_batch, predict
from composer_speedups.measurement.memory_meters import SavedForBackward, tensor_bytes
from composer_speedups.recipes import Recipe, load_recipe
from composer_speedups.tasks import models

LENGTHS = [64, 31, 20, 5, 64, 17, 32, 16]


def load(name: str, *overrides: str) -> Recipe:
    """The recipe, of 64 tokens where it is one of the demo's: whatever those are scaled to."""
    return load_recipe(name, ["task.max_length=64", *overrides] if name.startswith("demo/") else overrides)


def really_kept(recipe: Recipe, lengths: list[int]) -> tuple[int, int, int]:
    """Activations, gradients and weights of a real forward and backward pass of the recipe's model."""
    length = recipe.task.max_length
    model = models.build_empty_model(recipe.model, memory._shape(recipe, length)).train()
    state = memory._state(memory._Wrapped(model), torch.device("cpu"))
    with memory._as_before(), memory._quiet():
        memory._apply(recipe.algorithms(), state, [])
        batch = memory._batch(lengths, length, recipe, model.config.num_labels, torch.device("cpu"))
        with SavedForBackward(state.model) as saved:
            loss = state.model.loss(state.model(batch), batch)
        loss.backward()
    parameters = list(state.model.parameters())
    return saved.bytes, tensor_bytes(p.grad for p in parameters), tensor_bytes([*parameters, *state.model.buffers()])


@pytest.mark.parametrize(
    "recipe",
    [
        ("demo/fp32",),
        ("demo/fp32", "model.attn_implementation=eager"),
        ("demo/bf16",),
        ("demo/fp32", "task.objective=mlm"),
        ("demo/bf16", "task.objective=mlm", "speedups.masked_token_head={}"),
        ("demo/fp32", "speedups.unpadding={}"),
        ("cpu/fastest", "task.max_length=64"),
        ("demo/fp32", "model.name=roberta-base", "speedups.last_layer_subset={}"),
        ("demo/fp32", "speedups.gradient_checkpointing={}"),
        ("demo/bf16", "speedups.gradient_checkpointing={every: 2}", "speedups.fused_dropout_add_norm={}"),
        ("cpu/fastest", "task.max_length=64", "speedups.gradient_checkpointing={}"),
        ("cpu/fastest", "task.max_length=64", "model.name=answerdotai/ModernBERT-base"),
        ("demo/fp32", "task={name: dummy, objective: multi_label, max_length: 64, num_labels: 30}"),
        ("demo/fp32", "task={name: dummy, objective: regression, max_length: 64}"),
        ("demo/fp32", "task={name: dummy, objective: token_classification, max_length: 64, num_labels: 9}"),
    ],
    ids=[
        *("fp32", "eager", "bf16", "mlm", "masked head", "unpadding", "fastest", "RoBERTa"),
        *("checkpointing", "every second block", "fastest and checkpointing", "ModernBERT"),
        *("multi-label", "regression", "classes of tokens"),
    ],
)
def test_a_dry_run_keeps_what_a_real_one_keeps(recipe: tuple[str, ...]):
    found = load(*recipe)
    predicted = predict(found, lengths=LENGTHS, length=64)
    kept, gradients, weights = really_kept(found, LENGTHS)
    assert predicted.activations == pytest.approx(kept, rel=0.01), "the same operations keep the same tensors"
    assert (predicted.gradients, predicted.weights) == (gradients, weights)
    # More than one kind is there at once: the fullest moment is at least weights, states and activations.
    assert predicted.peak >= predicted.weights + predicted.optimizer + max(kept, gradients)
    assert predicted.temporary < predicted.peak / 3


def test_a_dry_run_follows_the_surgery():
    def kept(lengths: list[int], name: str, *more: str) -> int:
        return predict(load(name, *more), lengths=lengths, length=64).activations

    full, half = [64] * 16, [32] * 16
    assert kept(half, "demo/fp32") == kept(full, "demo/fp32"), "padding is kept as everything else is"
    # Half of what is kept for every token; a quarter of every score.
    ratio = kept(half, "demo/fp32", "speedups.unpadding={}") / kept(full, "demo/fp32", "speedups.unpadding={}")
    assert 0.4 < ratio < 0.53
    assert kept(full, "demo/low_precision_norm") < 0.9 * kept(full, "demo/bf16") < 0.85 * kept(full, "demo/fp32")


@pytest.mark.parametrize("key", [None, *OPTIMIZERS])
def test_states_of_the_optimizer(key: str | None):
    model = ("model.pretrained=false", "model.config={num_hidden_layers: 1, hidden_size: 128, "
             "num_attention_heads: 2, intermediate_size: 256, vocab_size: 30522}")  # fmt: skip
    recipe = load("demo/fp32", f"speedups={{{key}: {{}}}}" if key else "speedups={}", *model)
    model = models.build_empty_model(recipe.model, memory._shape(recipe, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for speedup in recipe.algorithms():
        if hasattr(speedup, "convert"):
            speedup.convert(optimizer, model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert memory.optimizer_bytes(recipe.algorithms(), model, model.parameters()) == tensor_bytes(states)


def test_a_model_without_a_padding_token_is_counted_too(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32}')
    recipe = load("demo/fp32", f"model.name={tmp_path}", "model.pretrained=false", "model.config={}")
    assert predict(recipe, lengths=LENGTHS).activations > 0


def test_a_recipes_speed_ups_are_built_once(monkeypatch):
    build, built = Recipe.algorithms, []
    monkeypatch.setattr(Recipe, "algorithms", lambda recipe: built.append(recipe) or build(recipe))
    predict(load("demo/fused_adamw"), lengths=LENGTHS)
    assert len(built) == 1


def test_checkpointing_keeps_the_inputs_of_blocks():
    """Measured and predicted, the peak falls with what is kept; the recomputed block is part of the peak."""

    def measured(*more: str) -> int:
        return really_kept(load("demo/fp32", *more), LENGTHS)[0]

    plain, checkpointed = predict(load("demo/fp32"), lengths=LENGTHS), predict(
        load("demo/fp32", "speedups.gradient_checkpointing={}"), lengths=LENGTHS
    )  # fmt: skip
    assert plain.activations == pytest.approx(measured(), rel=0.1)
    assert checkpointed.activations == pytest.approx(measured("speedups.gradient_checkpointing={}"), rel=0.1)
    assert checkpointed.activations < plain.activations / 8
    blocks = 4 * len(LENGTHS) * 64 * 256 * 4  # four inputs [rows, 64, 256] in float32
    assert blocks < checkpointed.activations < 3 * blocks
    assert checkpointed.gradients == plain.gradients and checkpointed.peak < plain.peak


def test_the_leanest_recipe_needs_less_than_a_sixth():
    """At the same batch, by prediction for BERT-large; issue 4 asks for a third."""
    recipes = {name: load(f"memory/{name}", "model.pretrained=false") for name in ("fp32", "leanest")}
    assert recipes["fp32"].batch_size == recipes["leanest"].batch_size == 4
    found = {name: predict(recipe) for name, recipe in recipes.items()}
    assert found["leanest"].peak < found["fp32"].peak / 6
    # Its weights, in float32, are three quarters of that; of the gradients the word embeddings' are there.
    assert 0.7 * found["leanest"].peak < found["leanest"].weights == found["fp32"].weights
    assert 30522 * 1024 * 4 <= found["leanest"].gradients < found["fp32"].gradients / 10
    assert found["leanest"].optimizer < found["fp32"].optimizer / 500
    # The source counts 14,949 MB, CUDA's own half a GB or so and the allocator's gaps included.
    assert 0.75 * 14949 * 2**20 < found["fp32"].peak < 14949 * 2**20


@pytest.mark.parametrize("tied", [False, True], ids=["classification", "mlm"])
def test_released_gradients_are_counted_as_they_are_there(tied: bool):
    task = ("task.objective=mlm",) if tied else ()
    plain = predict(load("demo/fp32", *task), lengths=LENGTHS)
    recipe = load("demo/fp32", *task, "speedups.gradient_release={bucket_mb: 1}")
    found = predict(recipe, lengths=LENGTHS)
    model = models.build_empty_model(recipe.model, memory._shape(recipe, 64)).train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    apply_gradient_release(optimizer, bucket_mb=1)
    model(**memory._batch(LENGTHS, 64, recipe, model.config.num_labels, torch.device("cpu")))["loss"].backward()
    assert found.gradients == gradients_at_most([optimizer]) < 0.7 * plain.gradients
    assert (found.weights, found.optimizer, found.activations) == (plain.weights, plain.optimizer, plain.activations)
    assert found.peak <= plain.peak
    # Next to no activations: then the gradients are what the fullest moment has, or has not.
    short = [
        predict(load("demo/fp32", *task, *more), lengths=[4], length=8).peak
        for more in ((), ("speedups.gradient_release={bucket_mb: 1}",))
    ]
    embeddings = 8192 * 256 * 4
    assert short[0] - short[1] == pytest.approx(plain.gradients - max(found.gradients, embeddings), rel=0.1)


def test_gradients_stay_from_one_microbatch_to_the_next():
    whole, parts = load("demo/fp32", "batch_size=32"), load("demo/fp32", "batch_size=32", "microbatch_size=8")
    found, alone = predict(parts), predict(whole, batch_size=8)
    assert found.accumulated and not alone.accumulated
    assert found.kinds() == alone.kinds(), "each kind at its most is the same"
    assert found.peak >= sum(found.kinds().values()) > alone.peak
    assert found.peak == sum(found.kinds().values()) + found.temporary
    assert predict(load("demo/fp32", "batch_size=32", "microbatch_size=32")) == predict(whole)


def test_ranks_have_buckets_unless_gradients_lie_in_them():
    """And a batch that one process takes in two parts is two ranks' at once."""
    recipe = load("demo/fp32", "batch_size=8", "microbatch_size=4")
    alone, one_of_two, one_of_four = (predict(recipe, batch_size=4, ranks=ranks) for ranks in (1, 2, 4))
    assert (alone.accumulated, one_of_two.accumulated) == (True, False)
    assert alone.buckets == 0 and "buckets" not in alone.kinds()
    assert one_of_two.buckets == one_of_two.gradients > 0 and one_of_two.kinds()["buckets"] == one_of_two.buckets
    assert one_of_two == one_of_four
    assert predict(recipe, ranks=2) == one_of_two and predict(recipe, ranks=4).activations < one_of_two.activations
    inside = predict(load("demo/fp32", "batch_size=8", "speedups.gradient_as_bucket_view={}"), batch_size=4, ranks=2)
    assert inside.buckets == 0 and one_of_two.peak - inside.peak == one_of_two.buckets


def test_a_token_budget_decides_how_many_rows_there_are():
    budget = "speedups.token_budget_batches={tokens_per_batch: %d}"
    recipe = load("demo/fp32", "batch_size=8", budget % 4096)
    found, plain = predict(recipe), load("demo/fp32", "batch_size=8")
    assert found.activations == predict(plain, batch_size=64).activations, "of 64 tokens each"
    assert memory.rows_per_pass(load("demo/fp32", "batch_size=8", budget % 4097)) == 65
    assert memory.rows_per_pass(recipe, 128) == 32
    assert memory.rows_per_pass(load("demo/fp32", "batch_size=8", "microbatch_size=4", budget % 4096)) == 4
    assert predict(recipe, batch_size=8).activations == predict(plain).activations, "who says a size means it"
    assert memory.rows_per_pass(load("demo/fp32", "batch_size=8", "speedups.token_budget_batches={}")) == 8


@pytest.mark.parametrize("key", ["token_budget_batches", "length_grouped_batches"])
def test_rows_that_are_regrouped_are_said_to_be_counted_as_full(key: str):
    recipe = load("demo/fp32", f"speedups.{key}={{}}")
    assert [note for note in predict(recipe, batch_size=2).notes if key in note and "as full" in note]
    assert not predict(recipe, lengths=[64, 8]).notes, "these are the rows that there are"
    assert not predict(load("demo/fp32"), batch_size=2).notes


def test_speed_ups_that_contradict_each_other():
    recipe = load_recipe("demo/fp32", ["speedups={fused_adamw: {}, adamw_8bit: {}}"], check_arguments=False)
    with pytest.raises(ConflictError, match="fused_adamw and adamw_8bit contradict each other"):
        predict(recipe, batch_size=1)


def test_nothing_is_left_behind():
    def settings() -> tuple[object, ...]:
        return torch.get_float32_matmul_precision(), sdp_attention.enabled_kernels()

    before, seed = settings(), torch.random.get_rng_state()
    small = ["model.config={num_hidden_layers: 1}", "model.pretrained=false"]
    predict(load("finetune/tf32", *small, "speedups.sdp_attention={backend: math}"), batch_size=1)
    assert settings() == before
    assert torch.equal(torch.random.get_rng_state(), seed)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_are_as_precise_as_before(precision: str, monkeypatch: pytest.MonkeyPatch):
    """Of a Trainer on a GPU the device itself turns TF32 on, and a speed-up gives back what it has found."""

    class AsOnGpu(memory.DeviceCPU):
        def __init__(self) -> None:
            super().__init__()
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    monkeypatch.setattr(memory, "DeviceCPU", AsOnGpu)
    before = compat.read_float32_precision()
    predict(load("demo/fp32", f"speedups.matmul_precision={{precision: {precision}}}"), batch_size=1)
    gc.collect()
    assert compat.read_float32_precision() == before


def test_shared_memory_is_counted_once():
    x = torch.zeros(100, requires_grad=True)
    with SavedForBackward(torch.nn.Module()) as saved:
        y = x.exp()  # keeps its result
        z = (y * y).view(10, 10).sin()  # keeps y twice, then the product
    assert saved.bytes == 2 * 400
    z.sum().backward()
    assert torch.allclose(x.grad, 2 * z.new_ones(100).cos()), "what is counted is kept as it is"


def test_parameters_are_no_activations():
    layer = torch.nn.Linear(10, 20)
    with SavedForBackward(layer) as saved:
        layer(torch.zeros(3, 10, requires_grad=True)).sum()
    assert saved.bytes == 3 * 10 * 4, "the input, not the weight"


@pytest.mark.elsewhere
def test_the_largest_batch_that_fits():
    recipe = load("demo/fp32")
    at = {size: predict(recipe, batch_size=size).peak for size in (40, 48)}
    assert largest_batch(recipe, at[40]) == 40
    assert largest_batch(recipe, at[48] - 1) == 40
    assert largest_batch(recipe, at[48]) == 48
    assert largest_batch(recipe, 1000) == 0
    long = load("demo/fp32", "task.max_length=512")
    assert largest_batch(long, predict(long, batch_size=5).peak) == 5, "below the multiple, any number"


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="nothing"):
        predict(load("demo/fp32", f"model.name={tmp_path / 'nothing'}"))


@pytest.mark.parametrize("key", USABLE)
def test_every_speed_up_can_be_predicted(key: str) -> None:
    """It is installed on a model without numbers: kernels that read pointers must answer with shapes there."""
    known = case(key)
    objective = "mlm" if known.head == "mlm" else "classification"
    found = load("demo/fp32", f"speedups.{key}={json.dumps(known.kwargs)}", f"task.objective={objective}")
    predicted = predict(found, lengths=LENGTHS, length=64)
    assert predicted.peak > predicted.weights + predicted.gradients > 0 and predicted.activations > 0


def test_the_optimizers_step_may_be_the_fullest_moment():
    """One row of a few tokens keeps next to nothing: the gradients, and what the update of the embeddings needs."""
    found = predict(load("demo/fp32"), lengths=[4], length=8)
    largest = 8192 * 256 * 4  # the embeddings: their denominator, and their update
    assert found.peak == found.weights + found.optimizer + found.gradients + 2 * largest
    assert found.temporary == 2 * largest


def test_memory_that_is_given_out_again_is_counted_again():
    x = torch.zeros(100, requires_grad=True)
    with SavedForBackward(torch.nn.Module()) as saved:
        for _ in range(20):
            (x * 2).sin()  # keeps the product, as long as the result is there
    assert saved.bytes == 20 * 400
