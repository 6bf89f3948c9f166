from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
import transformers

from composer_speedups.errors import TaskError
from composer_speedups.tasks import ModelSpec, TaskSpec, build_model, build_task, hub, model_sources, models

TINY = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
TINY_DISTILBERT = {"n_layers": 1, "dim": 16, "n_heads": 2, "hidden_dim": 32}


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path: Path):
    """An empty hub cache, and a hub that does not answer."""
    monkeypatch.setattr(hub, "unreachable", lambda: "no network in tests")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def dummy(objective: str = "classification", **changes):
    values = dict(name="dummy", max_length=16, train_samples=8, eval_samples=4, vocabulary=260, lowest_token=5)
    return TaskSpec(**(values | {"objective": objective} | changes))


def built(model: ModelSpec, task: TaskSpec | None = None, seed: int | None = 0):
    made = build_task(task or dummy(), model, seed=0)
    return build_model(model, made, seed=seed), made


def test_null_leaves_out_what_a_recipe_says_for_another_family():
    config = TINY_DISTILBERT | {"intermediate_size": None}
    model, _ = built(ModelSpec(name="distilbert-base-uncased", pretrained=False, config=config))
    assert not hasattr(model.config, "intermediate_size")


@pytest.mark.parametrize("objective", ["classification", "mlm"])
@pytest.mark.parametrize(
    "name",
    [
        "bert-base-uncased",
        "roberta-base",
        "distilbert-base-uncased",
        "prajjwal1/bert-mini",
        "answerdotai/ModernBERT-base",
        "microsoft/deberta-v3-base",
    ],
)
def test_known_models_are_built_without_the_hub(name: str, objective: str):
    config = TINY_DISTILBERT if "distil" in name else TINY
    model, task = built(ModelSpec(name=name, pretrained=False, config=config), dummy(objective, num_labels=3))
    assert model.config.vocab_size == 264 == model.get_input_embeddings().num_embeddings  # 260, up to a multiple of 8
    batch = task.collate_train([task.train[i] for i in range(4)])
    out = model(**batch)
    assert torch.isfinite(out.loss)
    assert out.logits.shape == ((4, 3) if objective == "classification" else (4, 16, 264))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not task.pretrained and model.config.pad_token_id == task.tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # Counted in the papers' checkpoints: BERT-base 110 M, large 335 M; DistilBERT 66 M; RoBERTa-base 125 M;
        # ModernBERT-base 149 M, large 395 M.
        ("bert-base-uncased", 109_482_240),
        ("google-bert/bert-large-uncased", 335_141_888),
        ("distilbert-base-uncased", 66_362_880),
        ("roberta-base", 124_645_632),
        ("google/bert_uncased_L-2_H-128_A-2", 4_385_920),
        ("answerdotai/ModernBERT-base", 149_014_272),
        ("answerdotai/ModernBERT-large", 394_781_696),
    ],
)
def test_known_models_have_the_size_of_the_originals(name: str, parameters: int):
    from transformers import AutoModel

    source = model_sources.resolve(ModelSpec(name=name, pretrained=False))
    with torch.device("meta"):
        model = AutoModel.from_config(model_sources.load_config(source))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_the_one_asked_for(attention: str):
    model, _ = built(ModelSpec(pretrained=False, config=TINY, attn_implementation=attention))
    assert model.config._attn_implementation == attention


def test_the_seed_decides_the_weights_and_leaves_torch_alone():
    spec = ModelSpec(pretrained=False, config=TINY)
    before = torch.random.get_rng_state()
    one, again, other = (built(spec, seed=s)[0] for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    key = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(one.state_dict()[key], again.state_dict()[key])
    assert not torch.equal(one.state_dict()[key], other.state_dict()[key])


def test_auto_falls_back_loudly(caplog):
    with caplog.at_level(logging.WARNING, "composer_speedups"):
        model, task = built(ModelSpec(config=TINY))
    assert not task.pretrained and model is not None
    assert "random ones" in task.notes[0] and "no network in tests" in task.notes[0]
    assert task.notes[0] in caplog.text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as `save_pretrained` writes it, weights in bf16 as some checkpoints are."""
    model, task = built(ModelSpec(pretrained=False, config=TINY))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    task.tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("pretrained", [True, "auto"])
def test_a_local_folder_gives_weights_and_tokenizer(folder: Path, pretrained):
    spec = ModelSpec(name=str(folder), pretrained=pretrained, config={"hidden_dropout_prob": 0.0})
    model, task = built(spec, dummy(vocabulary=None, num_labels=5))
    assert task.pretrained and task.notes == [] and len(task.tokenizer) == 260
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    key = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(model.state_dict()[key], stored[key].float())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.hidden_dropout_prob == 0.0 and model.config.num_labels == 5


def test_a_folder_without_weights_is_built_from_its_config(folder: Path, caplog):
    (folder / "model.safetensors").unlink()
    spec = ModelSpec(name=str(folder))
    model, task = built(spec)
    assert not task.pretrained and "no weights" in task.notes[0]
    assert model.config.hidden_size == 16
    with pytest.raises(TaskError, match=r"no weights.*set model.pretrained: false"):
        built(ModelSpec(name=str(folder), pretrained=True))


def test_pretrained_false_takes_a_folders_shape_but_not_its_weights(folder: Path):
    spec = ModelSpec(name=str(folder), pretrained=False)
    model, task = built(spec)
    reference, _ = built(ModelSpec(name=str(folder), pretrained=True))
    key = "bert.encoder.layer.0.output.dense.weight"
    assert not task.pretrained
    assert not torch.equal(model.state_dict()[key], reference.state_dict()[key])


def one_line(error) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(name="./no/such/folder"), "is not there"),
        (ModelSpec(name="/no/such/folder", pretrained=False), "is not there"),
        (ModelSpec(name="bert-base-uncased; rm -rf"), "is not there"),
        (ModelSpec(name="../not_there"), "is not there"),
        (ModelSpec(pretrained=True), "local model folder, or model.pretrained: false"),
        (ModelSpec(name="nobody/unknown"), "or to a model known here"),
        (ModelSpec(name="nobody/unknown", pretrained=False), "or to a model known here"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_clear_error(spec: ModelSpec, message: str):
    with pytest.raises(TaskError, match=re.escape(message)) as error:
        model_sources.resolve(spec)
    assert spec.name in one_line(error)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layer": 2}, "nearest: num_hidden_layers"),
        ({"of_no_model": 2}, "the names are those of its config.json; null leaves it out"),
        ({"num_hidden_layers": 2.5}, "must be of type int"),
        ({"num_hidden_layers": True}, "must be of type int"),
        ({"hidden_act": 3}, "must be of type str"),
        ({"hidden_act": "no_such"}, "cannot be built"),
        ({"hidden_size": 100, "num_attention_heads": 3}, "cannot be built"),
        ({"num_attention_heads": 0}, "num_attention_heads must be 1 or more, got 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be 1 or more, got -1"),
        ({"vocab_size": 100}, "set config.vocab_size to at least 260"),
        ({"max_position_embeddings": 8}, "max_length 16 exceeds the 8 positions"),
    ],
)
def test_a_bad_configuration_is_one_clear_error(config: dict, message: str):
    with pytest.raises(TaskError, match=re.escape(message)) as error:
        built(ModelSpec(pretrained=False, config=TINY | config))
    one_line(error)


@pytest.mark.parametrize(("name", "more"), [("roberta-base", 1), ("microsoft/mpnet-base", 2)])
def test_positions_may_start_behind_the_padding_id(name: str, more: int):
    """RoBERTa's behind the tokenizer's padding id, 0 here, MPNet's behind 1 whatever that is."""
    spec = ModelSpec(name=name, pretrained=False, config=TINY | {"max_position_embeddings": 16 + more})
    model, task = built(spec)
    full = task.collate_train([task.train[0]])
    full["input_ids"].fill_(7)
    model(**full | {"attention_mask": torch.ones_like(full["input_ids"])})
    assert full["input_ids"].shape[1] == 16
    with pytest.raises(TaskError, match="exceeds the 15 positions"):
        built(spec.model_copy(update={"config": TINY | {"max_position_embeddings": 15 + more}}))


def test_a_model_without_positions_takes_any_length(tmp_path: Path):
    transformers.XLNetConfig(d_model=32, n_layer=2, n_head=2, d_inner=64, vocab_size=272).save_pretrained(tmp_path)
    model, task = built(ModelSpec(name=str(tmp_path), pretrained=False))
    assert model.config.max_position_embeddings == -1 and task.max_length == 16
    assert model(**task.collate_train([task.train[0]])).logits.shape == (1, task.num_labels)


@pytest.mark.parametrize("config", [{"hidden_size": 32}, {"num_hidden_layers": 2}, {"vocab_size": 272}], ids=str)
def test_weights_that_do_not_fit_the_configuration_are_one_clear_error(folder: Path, config: dict):
    (name,) = config
    with pytest.raises(TaskError, match=rf"do not fit .* sets {name}\. Write model\.config={{}}") as error:
        built(ModelSpec(name=str(folder), pretrained=True, config=config))
    one_line(error)


def test_an_mlm_checkpoint_serves_classification(tmp_path: Path):
    model, task = built(ModelSpec(pretrained=False, config=TINY), dummy("mlm"))
    model.save_pretrained(tmp_path / "mlm")
    task.tokenizer.save_pretrained(tmp_path / "mlm")
    classifier, _ = built(ModelSpec(name=str(tmp_path / "mlm"), pretrained=True), dummy(vocabulary=None))
    key = "bert.encoder.layer.0.output.dense.weight"
    assert torch.equal(classifier.state_dict()[key], model.state_dict()[key])


@pytest.mark.parametrize("layers", [1, 5, 25])
def test_a_modernbert_of_other_depth_is_saved_and_loaded(tmp_path: Path, layers: int):
    """transformers 5 writes down a kind for each layer, and saves none whose kinds are of another number."""
    config = TINY | {"num_hidden_layers": layers}
    model, task = built(ModelSpec(name="answerdotai/ModernBERT-base", pretrained=False, config=config))
    model.eval().save_pretrained(tmp_path / "m")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
    batch = task.collate_train([task.train[i] for i in range(2)])
    assert torch.equal(again(**batch).logits, model(**batch).logits)
    if (kinds := getattr(again.config, "layer_types", None)) is not None:
        assert kinds == ["sliding_attention" if i % 3 else "full_attention" for i in range(layers)]


def classifier(folder: Path, names: list[str], family: str = "bert-base-uncased") -> torch.nn.Module:
    """A folder with a classifier of such classes, in that order."""
    model, task = built(ModelSpec(name=family, pretrained=False, config=TINY), dummy(num_labels=len(names)))
    model.config.id2label = dict(enumerate(names))
    model.save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    return model


def labelled(tmp_path: Path, names: list[str]) -> TaskSpec:
    rows = "".join(f"words number {i},{names[i % len(names)]}\n" for i in range(60))
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}")
    path = str(tmp_path / "rows.csv")
    return TaskSpec(name="text", path=path, text_column="text", label_column="label", max_length=16)


@pytest.mark.parametrize("family", ["bert-base-uncased", "roberta-base", "answerdotai/ModernBERT-base"])
def test_a_pretrained_heads_classes_are_the_tasks_whatever_their_order(tmp_path: Path, family: str, caplog):
    before = classifier(tmp_path / "m", ["Neutral", "contradiction", "entailment"], family).eval()
    spec = ModelSpec(name=str(tmp_path / "m"), pretrained=True)
    after, task = built(spec, labelled(tmp_path, ["entailment", "neutral", "contradiction"]))
    assert task.label_names == ["contradiction", "entailment", "neutral"]
    batch = {k: v for k, v in task.collate_train([task.train[i] for i in range(4)]).items() if k != "labels"}
    found, expected = after.eval()(**batch).logits, before(**batch).logits
    assert torch.equal(found, expected[:, [1, 2, 0]]) and not torch.equal(found, expected)
    assert after.config.id2label == dict(enumerate(task.label_names)) and "its head" not in caplog.text


@pytest.mark.parametrize(
    ("had", "names", "said", "kept"),
    [
        (
            ["anger", "joy"],
            ["ham", "spam"],
            "for anger, joy: for ham, spam the output layer begins at random",
            False,
        ),
        (["LABEL_0", "LABEL_1"], ["ham", "spam"], "no names: they are taken for ham, spam, in this order", True),
        (["LABEL_0", "LABEL_1"], ["0", "1"], "", True),
        (["ham", "spam"], ["ham", "spam"], "", True),
        (["anger", "fear", "joy"], ["ham", "spam"], "", False),  # another shape: transformers makes a new one
    ],
)
def test_a_pretrained_head_for_other_classes_is_not_trained_on(
    tmp_path: Path, had: list[str], names: list[str], said: str, kept: bool, caplog
):
    before = classifier(tmp_path / "m", had)
    after, _ = built(ModelSpec(name=str(tmp_path / "m"), pretrained=True), labelled(tmp_path, names))
    again, _ = built(ModelSpec(name=str(tmp_path / "m"), pretrained=True), labelled(tmp_path, names))
    assert torch.equal(after.classifier.weight, again.classifier.weight), "the seed decides"
    if kept:
        assert torch.equal(after.classifier.weight, before.classifier.weight)
    else:
        assert after.classifier.weight.shape[0] == 2 and 0 < after.classifier.weight.std() < 0.1
        assert len(had) != 2 or not torch.equal(after.classifier.weight, before.classifier.weight)
    key = "bert.pooler.dense.weight"
    assert torch.equal(after.state_dict()[key], before.state_dict()[key])
    assert said in caplog.text and bool(said) == ("its head" in caplog.text)


def test_a_heads_classes_may_be_numbers():
    from composer_speedups.tasks.heads import fit_head

    model, _ = built(ModelSpec(pretrained=False, config=TINY), dummy(num_labels=2))
    before = model.classifier.weight.detach().clone()
    assert fit_head(model, {"0": 0, "1": 1}, ["0", "1"], []) is None and torch.equal(model.classifier.weight, before)
    assert fit_head(model, {0: "LABEL_1", 1: "LABEL_0"}, ["0", "1"], []) is None
    assert torch.equal(model.classifier.weight, before.flip(0))
    assert fit_head(model, {0: "us", 1: "US"}, ["US", "us"], []) is None
    assert torch.equal(model.classifier.weight, before)
    assert "trained for a, b" in fit_head(model, {0: "a", 1: "b"}, ["US", "us"], [])
    assert fit_head(model, {0: "a", 1: "b"}, ["US", "us"], ["classifier.weight"]) is None, "it is new anyway"


@pytest.fixture
def deberta(tmp_path: Path) -> Path:
    """What DeBERTa-v3's repositories have: weights, a configuration, and a SentencePiece model."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path / "deberta"
    config = TINY | {"pooler_hidden_size": 16}
    model, _ = built(ModelSpec(name="microsoft/deberta-v3-xsmall", pretrained=False, config=config))
    model.save_pretrained(folder)
    (tmp_path / "words.txt").write_text("".join(f"words of number {i} and a few more of them\n" for i in range(300)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "words.txt"), model_prefix=str(folder / "spm"), vocab_size=50, minloglevel=2,
        pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]",
        unk_piece="[UNK]",
    )  # fmt: skip
    (folder / "spm.vocab").unlink()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "DebertaV2Tokenizer"}')
    return folder


def as_in_the_hubs_cache(folder: Path, hub_cache: Path) -> None:
    snapshot = hub_cache / "models--microsoft--deberta-v3-xsmall" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")


def test_a_sentencepiece_model_alone_is_a_tokenizer(deberta: Path, tmp_path: Path):
    spec = ModelSpec(name=str(deberta), pretrained=True)
    model, task = built(spec, labelled(tmp_path, ["ham", "spam"]))
    assert not any("[UNK]" in note for note in task.notes), "words that it was trained on"
    assert torch.isfinite(model(**task.collate_train([task.train[i] for i in range(4)])).loss)
    as_in_the_hubs_cache(deberta, tmp_path / "hub")
    for pretrained in (True, "auto"):
        source = model_sources.resolve(ModelSpec(name="microsoft/deberta-v3-xsmall", pretrained=pretrained))
        assert source.pretrained and source.tokenizer and source.local_only and source.note is None


def test_what_reads_a_sentencepiece_model_is_named(deberta: Path, tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(model_sources.tokenizer_files, "is_installed", lambda module: module != "sentencepiece")
    said = "SentencePiece tokenizer, which cannot be read here: pip install sentencepiece"
    with pytest.raises(TaskError, match=said) as error:
        model_sources.resolve(ModelSpec(name=str(deberta), pretrained=True))
    one_line(error)
    as_in_the_hubs_cache(deberta, tmp_path / "hub")
    with pytest.raises(TaskError, match="in the cache, cannot be read: pip install sentencepiece") as error:
        model_sources.resolve(ModelSpec(name="microsoft/deberta-v3-xsmall", pretrained=True))
    source = model_sources.resolve(ModelSpec(name="microsoft/deberta-v3-xsmall"))
    assert not source.pretrained and "cannot be read: pip install sentencepiece" in caplog.text


def test_a_folder_that_asks_for_code_is_refused(folder: Path):
    import json

    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Config: pass\n")
    with pytest.raises(TaskError, match=r"cannot be loaded .* never run here: take a newer one"):
        built(ModelSpec(name=str(folder), pretrained=True))
    assert not (folder / "ran").exists()


def test_a_family_that_this_transformers_does_not_have_names_the_newer_stacks(folder: Path):
    (folder / "config.json").write_text('{"model_type": "of_tomorrow", "vocab_size": 64}')
    with pytest.raises(TaskError, match=r"this transformers has no such models: take a newer one.*README") as error:
        built(ModelSpec(name=str(folder), pretrained=True))
    one_line(error)


@pytest.mark.parametrize("config", ["{", "[]", "{}"])
def test_a_broken_config_file_is_one_clear_error(folder: Path, config: str):
    (folder / "config.json").write_text(config)
    with pytest.raises(TaskError, match="cannot be loaded") as error:
        built(ModelSpec(name=str(folder), pretrained=True))
    one_line(error)


def test_a_broken_weights_file_is_one_clear_error(folder: Path):
    (folder / "model.safetensors").write_bytes(b"\x00" * 50)
    with pytest.raises(TaskError, match="cannot be loaded") as error:
        built(ModelSpec(name=str(folder), pretrained=True))
    one_line(error)


def test_special_tokens_of_a_models_own_vocabulary_do_not_fit_a_smaller_one():
    """ModernBERT's are the last of 50,368; `doctor` builds models without a tokenizer that would have others."""
    from composer_speedups.measurement import memory
    from composer_speedups.recipes import load_recipe

    recipe = load_recipe("cpu/fp32", ["model.name=answerdotai/ModernBERT-base"])
    model = models.build_empty_model(recipe.model, memory._shape(recipe, 64))
    assert model.config.pad_token_id == 0 == model.get_input_embeddings().padding_idx
