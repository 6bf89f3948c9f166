"""What the doctor says of machines that we have not, of this one, and of models."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, DistilBertConfig, GPT2Config, ViTConfig

from composer_speedups import hardware, registry
from composer_speedups.cli import main
from composer_speedups.doctor import capabilities, examine, memory_need, sizes
from composer_speedups.measurement import memory
from composer_speedups.recipes import load_recipe
from composer_speedups.training.run import run as train

# A size rounded to nothing, which says nothing: "0.00 GiB", not the end of "20.00 GiB".
NOTHING = re.compile(r"(?<![\d,.])0\.00 ")


def machine(capability: str | None = None, flags: tuple[str, ...] = (), kind: str = "x86_64") -> dict:
    gpus = [{"name": "a GPU", "capability": capability, "memory_bytes": 2**34}] if capability else []
    return {"hardware": "cuda" if gpus else "cpu", "gpus": gpus, "cpu": {"flags": list(flags), "machine": kind}}


@pytest.mark.parametrize(
    ("facts", "works"),
    [
        (machine("7.0"), {"fp16"}),
        (machine("8.0"), {"fp16", "bf16", "TF32"}),
        (machine("9.0"), {"fp16", "bf16", "TF32", "fp8"}),
        (machine(), set()),
        (machine(flags=("avx512_bf16",)), {"bf16"}),
        (machine(flags=("amx_bf16", "avx2")), {"bf16"}),
        (machine(flags=("bf16",), kind="aarch64"), {"bf16"}),
    ],
    ids=["V100", "A100", "H100", "old CPU", "Zen 4", "Sapphire Rapids", "Graviton"],
)
def test_precisions_of_machines(facts: dict, works: set[str]):
    found = {f.name: f for f in capabilities(facts)}
    assert {name for name in ("TF32", "bf16", "fp16", "fp8") if found[name].works} == works
    assert all(f.works or f.detail for f in found.values()), "what does not work says why"


@pytest.mark.parametrize("linked", [True, False])
def test_links_between_gpus(linked: bool, monkeypatch: pytest.MonkeyPatch):
    facts = machine("9.0")
    assert "links between GPUs" not in {f.name for f in capabilities(facts)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: linked or {a, b} != {0, 2})
    found = {f.name: f for f in capabilities(facts | {"gpus": 3 * facts["gpus"]})}["links between GPUs"]
    assert found.works == linked and (linked or "slow DDP" in found.detail)


def test_what_to_switch_on_first_fits_the_model(tmp_path: Path):
    for family, config in (("bert", BertConfig()), ("distilbert", DistilBertConfig()), ("gpt2", GPT2Config())):
        config.save_pretrained(tmp_path / family)
        first = examine(str(tmp_path / family)).first
        assert ("unpadding" in first) == (family != "gpt2") != ("length_grouped_batches" in first)
        assert ("fast_dropout" in first) == (not torch.cuda.is_available())


def test_sizes_that_miss_their_multiples():
    found = {f.name: f for f in sizes(BertConfig())}
    assert not found["vocab_size"].works and "30522 -> 30528" in found["vocab_size"].detail
    assert found["hidden_size"].works and found["intermediate_size"].works and found["head size"].works
    odd = {f.name: f for f in sizes(SimpleNamespace(vocab_size=30528, hidden_size=770, num_attention_heads=11))}
    assert odd["vocab_size"].works and not odd["hidden_size"].works and not odd["head size"].works
    assert "intermediate_size" not in odd


@pytest.mark.parametrize("content", ["", "import pyramid_of_another_project"], ids=["empty", "cannot be imported"])
def test_the_other_project_called_apex_is_not_taken_for_it(tmp_path: Path, monkeypatch, content: str):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    found = {one.name: one for one in capabilities(machine())}["Apex"]
    assert not found.works and found.detail.startswith("not installed: build it from github.com/NVIDIA/apex")


@pytest.mark.parametrize(
    ("flags", "multiplies", "word"),
    [
        (("avx512_bf16",), True, "native: avx512_bf16"),
        (("avx512_bf16",), False, "emulated, so slower than fp32: the CPU has avx512_bf16, and this PyTorch does not"),
        ((), True, "native"),  # not Linux, where no flags are told
        ((), False, "emulated, so slower than fp32: this CPU has no bf16 products"),
    ],
)
def test_doctor_says_of_bf16_what_speed_ups_go_by(flags: tuple[str, ...], multiplies: bool, word: str, monkeypatch):
    found = {one.name: one for one in capabilities(machine(flags=flags), multiplies)}["bf16"]
    assert found.works is multiplies and found.detail.startswith(word)
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda: multiplies)
    if not torch.cuda.is_available():
        assert {one.name: one for one in examine().capabilities}["bf16"].works is multiplies


def test_this_machine():
    found = examine()
    device = torch.device(found.environment["hardware"])
    names = {f.name.partition(" ")[0] for f in found.speedups}
    assert names == set(registry.keys()), "every speed-up has its line"
    assert all(f.works or f.detail for f in found.speedups)
    assert found.first and len(found.first) == len(found.reasons)
    for key, arguments in found.first.items():  # what it advises can be switched on
        assert registry.build(key, **arguments).unavailable(device) is None


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    BertConfig(vocab_size=1001).save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "1001 -> 1024" in text and "fused_adamw" in text and "speedups:" in text
    assert max(map(len, text.splitlines())) <= 120


def test_memory_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    BertConfig(num_hidden_layers=1, hidden_size=256, num_attention_heads=4).save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--batch", "16", "--length", "128"]) == 0
    text = capsys.readouterr().out
    need = memory_need(str(tmp_path), batch=16, length=128)
    # Wherever the line was broken, which depends on the folder's name.
    assert f"{tmp_path},batch16of128tokens,float32withAdamW" in "".join(text.split())
    for name, size in need.memory.kinds().items():
        line = next(line for line in text.splitlines() if line.startswith(name))
        wanted = f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.1f} MiB"
        assert wanted in line and not NOTHING.search(line)
    assert "fits; the largest batch that fits is " in text and need.fits and need.largest >= 16


def test_memory_of_a_model_that_fits_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(memory, "free_memory", lambda device: 20 * 2**30)  # "20.00 GiB" is not nothing
    tiny = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16}
    BertConfig(vocab_size=64, **tiny).save_pretrained(tmp_path)
    assert main(["doctor", "--model", str(tmp_path), "--batch", "8", "--length", "8"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "free here 20.00 GiB" in text and NOTHING.search("weights 0.00 GiB")
    assert "fits; so do 16,384 samples, and more were not tried" in text and not NOTHING.search(text)


@pytest.fixture
def one_layer(tmp_path: Path):
    """Write a recipe like a shipped one, of one layer and few texts: a step is dry-run eight times for an answer."""

    def write(base: str, more: str = "") -> str:
        path = tmp_path / f"{base.replace('/', '_')}{len(more)}.yaml"
        path.write_text(
            f"extends: {base}\nmodel: {{config: {{num_hidden_layers: 1}}}}\ntask: {{train_samples: 256}}\n{more}"
        )
        return str(path)

    return write


def test_a_recipe_of_known_weights_that_are_not_here_is_predicted(one_layer) -> None:
    """Offline: its sizes are known. `train` still says that the weights are not to be had."""
    pretrained = memory_need(recipe=one_layer("finetune/fp32"), batch=2, length=16)
    assert pretrained.what.startswith("bert-base-uncased, batch 2 of 16 tokens")
    assert pretrained.memory.weights > 4 * 30_000_000  # of the 30,522 x 768 embeddings and a layer


def test_memory_that_is_not_there(one_layer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    recipe = one_layer("demo/fp32")
    need = memory_need(recipe=recipe)
    monkeypatch.setattr(memory, "free_memory", lambda device: need.memory.peak - 1)
    assert main(["doctor", "--recipe", recipe]) == 0
    text = capsys.readouterr().out
    assert "bert-base-uncased, batch 32 of 128 tokens, demo_fp32" in text
    assert "does not fit; the largest batch that fits is 24" in text
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    assert not memory_need(recipe=recipe, batch=2).fits
    assert main(["doctor", "--recipe", recipe]) == 0
    assert "does not fit; not even one sample does" in capsys.readouterr().out


def test_the_batch_that_was_asked_for_counts_where_it_fits(one_layer, monkeypatch: pytest.MonkeyPatch):
    """Sizes are looked for in steps of eight: twelve lies between two of them."""
    need = memory_need(recipe=one_layer("demo/fp32"), batch=12)
    monkeypatch.setattr(memory, "free_memory", lambda device: need.memory.peak)
    assert memory_need(recipe=one_layer("demo/fp32"), batch=12).largest == 12
    assert memory_need(recipe=one_layer("demo/fp32"), batch=13).largest == 8


def test_accumulation_is_told(one_layer, capsys: pytest.CaptureFixture[str]):
    for more, words in (("", "they come as activations go"), ("microbatch_size: 8\n", "kept from one")):
        assert main(["doctor", "--recipe", one_layer("demo/fp32", more)]) == 0
        assert words in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("gradients"))


def test_a_token_budget_is_told_in_rows(one_layer):
    recipe = one_layer("demo/fp32", "speedups: {token_budget_batches: {tokens_per_batch: 5120}}\n")
    need = memory_need(recipe=recipe)
    assert "batch 40 of 128 tokens" in need.what and any("as full" in note for note in need.memory.notes)
    assert "batch 2 of 128 tokens" in memory_need(recipe=recipe, batch=2).what


@pytest.mark.elsewhere
def test_a_recipe_needs_less_with_its_speed_ups(one_layer):
    plain, packed = (memory_need(recipe=one_layer(f"cpu/{name}"), batch=8).memory for name in ("fp32", "fastest"))
    assert packed.activations < 0.5 * plain.activations


def test_memory_of_each_of_two_ranks(one_layer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """As `predict` has it of their shares; `test_study_of_ranks.py` measures what it predicts."""
    monkeypatch.setenv("WORLD_SIZE", "1")  # which the command sets for its own process
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * 2**30)
    recipe = one_layer("demo/fp32")
    assert main(["doctor", "--recipe", recipe, "--ranks", "2"]) == 0
    text = capsys.readouterr().out
    assert "of each of 2 ranks: bert-base-uncased, batch 32 of 128 tokens, demo_fp32" in text
    assert "free for each 1.00 GiB fits; the largest batch" in " ".join(text.split())
    assert re.search(r"^gradient_as_bucket_view +yes", text, re.M) and re.search(r"^gradient_release +no", text, re.M)
    need = memory_need(recipe=recipe, ranks=2)
    assert need.memory.buckets == need.memory.gradients > 0 and need.memory.buckets // 2**20 > 0
    assert re.search(rf"^buckets +{need.memory.buckets / 2**20:.1f} MiB", text, re.M)
    assert need.memory.activations == memory_need(recipe=recipe, batch=16).memory.activations
    viewed = memory_need(recipe=one_layer("demo/fp32", "speedups: {gradient_as_bucket_view: {}}\n"), ranks=2)
    assert viewed.memory.peak == need.memory.peak - need.memory.buckets
    assert need.largest % 2 == 0 and need.largest > 32


def test_ranks_that_cannot_share_a_batch_or_are_too_many(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["doctor", "--batch", "33", "--ranks", "2"]) == 2
    assert "batch_size 33 cannot be shared by 2 ranks: choose a multiple of 2" in capsys.readouterr().err
    assert main(["doctor", "--ranks", "5000"]) == 2
    assert re.fullmatch(r"error: 5000 ranks need a (core|GPU) each, .*\n", capsys.readouterr().err)


def test_real_tokens_only_are_counted_with_the_tasks_own_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Against what a step of the recipe then kept, as a run's own look inside measures it."""
    sizes = "{num_hidden_layers: 2, hidden_size: 64, num_attention_heads: 2, intermediate_size: 128}"
    (tmp_path / "short.yaml").write_text(
        "extends: cpu/unpadding\n"
        "task: {name: dummy, max_length: 128, mean_length: 40, length_std: 10, vocabulary: 512, train_samples: 128}\n"
        f"model: {{name: bert-base-uncased, pretrained: false, config: {sizes}}}\n"
        "batch_size: 32\nduration: 12ba\nevaluate: false\n"
        "speedups: {mixed_precision: null}\n"  # minutes on a CPU without bf16 products
    )
    short = str(tmp_path / "short.yaml")
    assert main(["doctor", "--recipe", short]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "batch 32 of 39 tokens (the task's mean), " in text and "counted as full" not in text
    typical, full = memory_need(recipe=short).memory, memory_need(recipe=short, length=128).memory
    assert typical.activations < 0.5 * full.activations and any("as full" in note for note in full.notes)
    measured = train(load_recipe(short), inspect=True).memory
    for kind, size in typical.kinds().items():
        assert measured[kind] == pytest.approx(size, rel=0.1), kind


def test_texts_that_are_not_here_are_counted_as_full(tmp_path: Path):
    (tmp_path / "away.yaml").write_text(
        "extends: cpu/unpadding\ntask: {name: text, path: /nowhere.csv, text_column: a, label_column: b}\n"
    )
    need = memory_need(recipe=str(tmp_path / "away.yaml"))
    assert "batch 32 of 256 tokens" in need.what and any("as full" in note for note in need.memory.notes)


def test_the_compiler_is_named():
    found = next(f for f in capabilities(hardware.environment()) if f.name == "torch.compile")
    path, _, said = found.detail.partition(" (")
    assert found.works and Path(path).is_file() and any(c.isdigit() for c in said)


def test_without_a_question_no_answer(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    assert "Memory of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", [["--recipe", "demo/none"], ["--batch", "0"], ["--length", "99999"], ["--length", "999"]]
)
def test_a_mistake_is_one_line(option: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *option]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err and out == ""


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--model", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_reads_no_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ViTConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64).save_pretrained(
        tmp_path
    )
    assert main(["doctor", "--model", str(tmp_path), "--batch", "4", "--length", "16"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    last = err.splitlines()[-1]
    assert (
        last.startswith("error: ") and "cannot be predicted (AttributeError: " in last and "BERT-like encoder" in last
    )


def test_weights_without_a_tokenizer_have_sizes(tmp_path: Path):
    BertConfig(vocab_size=1001).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # nobody looks into it
    assert "1001 -> 1024" in next(f.detail for f in examine(str(tmp_path)).model if f.name == "vocab_size")
