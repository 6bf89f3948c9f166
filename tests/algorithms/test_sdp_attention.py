from __future__ import annotations

import copy
import gc
import logging
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Callback
from composer.models import HuggingFaceModel
from model_check import check_model, random_weights
from small import BatchDataset, padded_batch

from composer_speedups import SDPAttention, apply_sdp_attention
from composer_speedups.algorithms import fused_layer_norm
from composer_speedups.algorithms import sdp_attention as module
from composer_speedups.errors import SpeedUpUnavailable
from composer_speedups.kernels.attention_kernels import watch_attention

# torch 2.11's, about what torchmetrics (imported with the first Trainer) and DeBERTa do when imported.

MODERN = int(transformers.__version__.split(".")[0]) >= 5
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = dict(
    vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=64, num_labels=3,
)  # fmt: skip
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GPT2 = dict(
    vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, num_labels=3, pad_token_id=0,
    bos_token_id=1, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip

# Family -> config class, its arguments, and how many layers are swapped (old stack, modern stack).
FAMILIES = {
    "Bert": (SHAPE | NO_DROPOUT, 2, 2),
    "Roberta": (SHAPE | NO_DROPOUT | dict(pad_token_id=0), 2, 2),
    "XLMRoberta": (SHAPE | NO_DROPOUT | dict(pad_token_id=0), 2, 2),
    "Electra": (SHAPE | NO_DROPOUT | dict(embedding_size=32), 0, 2),
    "DistilBert": (
        dict(vocab_size=128, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64, num_labels=3,
             dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0),
        2, 2,
    ),
    # The two layers are one module: ALBERT shares it.
    "Albert": (SHAPE | NO_DROPOUT | dict(embedding_size=16, classifier_dropout_prob=0.0), 1, 1),
    "GPT2": (GPT2, 2, 2),
    "MPNet": (SHAPE | NO_DROPOUT, 0, 0),
    "DebertaV2": (SHAPE | NO_DROPOUT | dict(type_vocab_size=0), 0, 0),
    "NomicBert": (SHAPE | NO_DROPOUT | dict(head_dim=8), 2, 2),
    "EuroBert": (SHAPE | dict(num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2), 2, 2),
}  # fmt: skip
FAMILIES = {name: case for name, case in FAMILIES.items() if hasattr(transformers, f"{name}Config")}
SWAPPED = [name for name, (_, old, new) in FAMILIES.items() if (new if MODERN else old)]
NOT_SWAPPED = [name for name in FAMILIES if name not in SWAPPED]


def eager(family: str = "Bert", **changes: object) -> torch.nn.Module:
    config = getattr(transformers, f"{family}Config")(**(FAMILIES[family][0] | changes))
    cls = getattr(transformers, f"{family}ForSequenceClassification")
    return random_weights(cls._from_config(config, attn_implementation="eager")).eval()


def batch_of(padded: bool) -> dict[str, torch.Tensor]:
    batch = padded_batch(rows=4)
    if not padded:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        batch["input_ids"] = torch.randint(5, 128, batch["input_ids"].shape)
    return batch


def kernels(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[str, ...]:
    with watch_attention() as watch, torch.no_grad():
        model(**batch)
    return watch.kernels


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
@pytest.mark.parametrize("family", SWAPPED)
def test_matches_float64(family: str, padded: bool) -> None:
    stock = eager(family)
    model, batch = copy.deepcopy(stock), batch_of(padded)
    assert apply_sdp_attention(model) == FAMILIES[family][2 if MODERN else 1]
    check_model(model, stock, batch)
    assert kernels(stock, batch) == ()
    assert kernels(model, batch) == ("flash",)  # the CPU's flash kernel, mask or not


@pytest.mark.parametrize("fault", ["mask ignored", "mask halved", "scale wrong", "key dropped"])
def test_the_check_finds_planted_faults(fault: str, monkeypatch) -> None:
    stock = eager()
    model = copy.deepcopy(stock)
    apply_sdp_attention(model)
    right = F.scaled_dot_product_attention

    def wrong(query, key, value, attn_mask=None, **kwargs):
        if fault == "mask ignored":
            attn_mask = None
        elif fault == "mask halved":
            attn_mask = attn_mask.clone()
            attn_mask[:, :, : attn_mask.shape[2] // 2] = attn_mask.amax()
        elif fault == "scale wrong":
            kwargs["scale"] = 0.9 * query.shape[-1] ** -0.5
        else:
            key = key * (torch.arange(key.shape[2]) > 0)[:, None].to(key.dtype)
        return right(query, key, value, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong)
    with pytest.raises(AssertionError, match="is off by"):
        check_model(model, stock, batch_of(padded=True))


def test_padding_is_without_influence() -> None:
    model, batch = eager(), batch_of(padded=True)
    apply_sdp_attention(model)
    changed = dict(batch, input_ids=torch.where(batch["attention_mask"] == 0, 77, batch["input_ids"]))
    assert not torch.equal(changed["input_ids"], batch["input_ids"])
    torch.testing.assert_close(model(**changed).logits, model(**batch).logits, rtol=0, atol=0)


def test_attention_dropout_is_kept(monkeypatch) -> None:
    model = eager(attention_probs_dropout_prob=0.25)
    apply_sdp_attention(model)
    seen, right = [], F.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append(kwargs["dropout_p"])
        return right(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model.train()(**batch_of(padded=True))
    model.eval()(**batch_of(padded=True))
    assert seen == [0.25, 0.25, 0.0, 0.0]


def test_same_parameters_same_keys_twice_is_once() -> None:
    model = eager()
    model.bert.embeddings.requires_grad_(False)
    parameters = [(n, id(p), p.requires_grad, p.dtype) for n, p in model.named_parameters()]
    keys, modules = list(model.state_dict()), list(map(id, model.modules()))
    assert apply_sdp_attention(model) == 2
    types = list(map(type, model.modules()))
    assert apply_sdp_attention(model) == 0
    assert list(map(type, model.modules())) == types
    assert [(n, id(p), p.requires_grad, p.dtype) for n, p in model.named_parameters()] == parameters
    assert list(model.state_dict()) == keys and list(map(id, model.modules())) == modules
    eager().load_state_dict(model.state_dict())  # strict


def test_saved_folder_is_plain(tmp_path) -> None:
    model = eager()
    apply_sdp_attention(model)
    model.save_pretrained(tmp_path)
    assert "sdpa" not in (tmp_path / "config.json").read_text().lower()
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    batch = batch_of(padded=True)
    torch.testing.assert_close(again(**batch).logits, model(**batch).logits, rtol=0, atol=0)


def test_can_be_copied_and_pickled() -> None:
    model, batch = eager(), batch_of(padded=True)
    apply_sdp_attention(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(map(type, other.modules())) == list(map(type, model.modules()))
        assert torch.equal(other(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("family", SWAPPED)
def test_attention_weights_are_right_or_refused(family: str, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    stock = eager(family)
    model, batch = copy.deepcopy(stock), batch_of(padded=True)
    apply_sdp_attention(model)
    if MODERN:
        with pytest.raises(SpeedUpUnavailable, match="SDPA computes no attention weights"):
            model(**batch, output_attentions=True)
        model(**batch)  # and goes on
        model.set_attn_implementation("eager")  # the remedy that the error names
    weights = model(**batch, output_attentions=True).attentions
    expected = stock(**batch, output_attentions=True).attentions
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_config_that_asks_for_weights_is_left_alone(make_trainer) -> None:
    model = eager()
    model.config.output_attentions = True
    with pytest.warns(NoEffectWarning, match="config.output_attentions is True"):
        make_trainer([SDPAttention()], model=model)
    assert model(**batch_of(padded=True)).attentions[0] is not None


@pytest.mark.skipif(MODERN, reason="transformers 5 has no relative positions in BERT")
@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_relative_positions_are_left_alone(make_trainer, kind: str) -> None:
    model = eager(position_embedding_type=kind)
    with pytest.warns(NoEffectWarning, match=f"position_embedding_type='{kind}'"):
        make_trainer([SDPAttention()], model=model)
    assert kernels(model, batch_of(padded=True)) == ()


def test_gpt2_scale_is_right_or_left_alone() -> None:
    stock = eager("GPT2", scale_attn_by_inverse_layer_idx=True)
    model = copy.deepcopy(stock)
    assert apply_sdp_attention(model) == (2 if MODERN else 0)
    check_model(model, stock, batch_of(padded=True))


@pytest.mark.parametrize("family", NOT_SWAPPED)
def test_families_without_sdpa_say_so(family: str, make_trainer) -> None:
    model = eager(family)
    with pytest.warns(NoEffectWarning, match=rf"transformers {transformers.__version__} has no SDPA for {family}"):
        make_trainer([SDPAttention()], model=model)


@pytest.mark.parametrize("family", ["ViT", "ModernBert"])
def test_other_inputs_and_masks(family: str) -> None:
    shape = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=3)
    if family == "ViT":
        config = transformers.ViTConfig(**shape, **NO_DROPOUT, image_size=8, patch_size=4)
        cls, batch = transformers.ViTForImageClassification, {"pixel_values": torch.randn(4, 3, 8, 8)}
    else:
        tokens = dict(vocab_size=128, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
        extra = {} if MODERN else {"reference_compile": False}
        config = transformers.ModernBertConfig(
            **shape, **tokens, local_attention=8, global_attn_every_n_layers=2, **extra
        )
        cls, batch = transformers.ModernBertForSequenceClassification, batch_of(padded=True)
    stock = random_weights(cls._from_config(config, attn_implementation="eager")).eval()
    model = copy.deepcopy(stock)
    assert apply_sdp_attention(model) == 2
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    exact = (
        copy.deepcopy(stock)
        .double()(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
        .logits
    )
    found, own = ((m(**inputs).logits - exact).abs().max() / exact.abs().max() for m in (model, stock))
    assert found <= 8 * own + 8 * torch.finfo(torch.float32).eps, (found, own)  # as in check_model
    assert kernels(model, inputs) == ("flash",) and kernels(stock, inputs) == ()


def test_trains_and_says_which_kernel_ran(make_trainer) -> None:
    for dropout, kernel in ((0.0, "flash"), (0.1, "math")):  # the CPU's flash kernel has no dropout
        algorithm = SDPAttention()
        model = eager(attention_probs_dropout_prob=dropout).train()
        make_trainer([algorithm], model=model).fit()
        assert algorithm.evidence == {
            "changed": 2, "backend": "auto", "already_sdpa": 0, "left_alone": 0,
            "left_alone_because": "", "kernel": kernel,
        }  # fmt: skip
        assert not torch.autograd._profiler_enabled()


# Dynamo of torch 2.11 itself reads `.grad` of the input of a compiled layer; a stock BERT warns as well.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_sees_the_kernel_of_a_compiled_model_without_recompiling(make_trainer) -> None:
    from torch._dynamo.utils import counters

    algorithm, model = SDPAttention(), eager()
    trainer = make_trainer([algorithm], model=model)
    torch._dynamo.reset()
    for layer in model.bert.encoder.layer:
        layer.compile(backend="aot_eager", dynamic=False)
    counters.clear()
    trainer.fit(duration="2ba")
    assert algorithm.evidence["kernel"] == "flash"
    graphs = counters["stats"]["unique_graphs"]
    trainer.fit(duration="2ba")
    assert 1 <= graphs == counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def test_leaves_the_users_profiler_alone(make_trainer) -> None:
    algorithm = SDPAttention()
    trainer = make_trainer([algorithm], model=eager())
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        trainer.fit(duration="1ba")
    assert profile.function_events and "kernel" not in algorithm.evidence
    trainer.fit(duration="1ba")  # the profiler is gone: now it can look
    assert algorithm.evidence["kernel"] == "flash"


def test_an_error_in_the_first_batch_leaves_nothing_behind(make_trainer, monkeypatch) -> None:
    algorithm, model, before = SDPAttention("math"), eager(), module.enabled_kernels()
    trainer = make_trainer([algorithm], model=model)

    def fail(*args, **kwargs):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(model.bert.embeddings, "forward", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            trainer.fit()
        assert not torch.autograd._profiler_enabled(), "at once: nobody may come to close the Trainer"
        with pytest.raises(RuntimeError, match="out of luck"):  # and again, with what the first left there
            trainer.fit()
    trainer.close()
    assert not trainer.state.model._forward_hooks
    assert module.enabled_kernels() == before and not torch.autograd._profiler_enabled()
    second = SDPAttention()
    make_trainer([second], model=eager()).fit()
    assert second.evidence["kernel"] == "flash" and not torch.autograd._profiler_enabled()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # as above
@pytest.mark.parametrize("whole", ["by the Trainer", "in place"])
def test_a_compiled_model_is_not_compiled_again_for_the_watch(make_trainer, whole: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    algorithm, composer_model = SDPAttention(), HuggingFaceModel(eager())
    compiled = {"backend": "aot_eager", "dynamic": False}
    if whole == "in place":
        composer_model.compile(**compiled)
    more = {"compile_config": compiled} if whole == "by the Trainer" else {}
    trainer = make_trainer([algorithm], model=composer_model, **more)
    counters.clear()
    trainer.fit(duration="3ba")
    assert algorithm.evidence["kernel"] == "flash" and counters["stats"]["unique_graphs"] >= 1
    graphs = counters["stats"]["unique_graphs"]
    trainer.fit(duration="2ba")
    assert graphs == counters["stats"]["unique_graphs"] and not composer_model._forward_hooks
    torch._dynamo.reset()


def test_warns_when_it_is_sdpa_already(make_trainer, tiny_bert) -> None:
    algorithm = SDPAttention()
    with pytest.warns(NoEffectWarning, match="all 2 attention layers use scaled_dot_product_attention already"):
        trainer = make_trainer([algorithm], model=tiny_bert)
    trainer.fit()
    assert algorithm.evidence["already_sdpa"] == 2 and algorithm.evidence["kernel"] == "flash"


def test_warns_when_there_is_no_attention(make_trainer) -> None:
    from composer.models import ComposerClassifier

    model = ComposerClassifier(torch.nn.Linear(2, 2), num_classes=2)
    with pytest.warns(NoEffectWarning, match="no Hugging Face attention layer in the model"):
        make_trainer([SDPAttention()], model=model)


def test_backend_holds_for_training_and_is_undone(make_trainer, tiny_bert) -> None:
    before = module.enabled_kernels()
    algorithm = SDPAttention(backend="math")
    trainer = make_trainer([algorithm], model=tiny_bert)  # SDPA already, and yet it changes something
    trainer.fit()
    assert algorithm.evidence["kernel"] == "math" and algorithm.evidence["changed"] == 2
    assert module.enabled_kernels() == before
    trainer.fit(duration="1ep")
    assert module.enabled_kernels() == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "second first"])
@pytest.mark.parametrize("fitted", [True, False])
def test_backends_of_two_trainers_are_both_undone(make_trainer, order: tuple[int, int], fitted: bool) -> None:
    class Watch(Callback):
        def after_forward(self, state, logger) -> None:
            self.seen = module.enabled_kernels()

    before, watches = module.enabled_kernels(), (Watch(), Watch())
    trainers = [
        make_trainer([SDPAttention(backend)], model=eager(), callbacks=[watch])
        for backend, watch in zip(("math", "flash"), watches, strict=True)
    ]
    for i in order if fitted else ():
        trainers[i].fit(duration="1ba")
    assert not fitted or [w.seen for w in watches] == [(False, False, False, True), (True, False, False, False)]
    for i in order:
        trainers[i].close()
    assert module.enabled_kernels() == before


def test_backend_holds_for_evaluation_and_is_undone(make_trainer) -> None:
    class Watch(Callback):
        def eval_after_forward(self, state, logger) -> None:
            self.seen = module.enabled_kernels()

    before, watch = module.enabled_kernels(), Watch()
    trainer = make_trainer([SDPAttention("math")], model=eager(), callbacks=[watch])
    trainer.fit(duration="1ba")
    trainer.eval(torch.utils.data.DataLoader(BatchDataset(8), batch_size=8))
    assert watch.seen == (False, False, False, True) and module.enabled_kernels() == before


def test_backend_is_undone_when_the_trainer_cannot_be_made_or_is_dropped(tmp_path) -> None:
    from composer import Trainer

    before = module.enabled_kernels()

    def make(**kwargs):
        Trainer(model=HuggingFaceModel(eager()), algorithms=[SDPAttention("math")], device="cpu", **kwargs)

    with pytest.warns(UserWarning, match="No optimizer"), pytest.raises(Exception, match="nowhere") as failed:
        make(load_path=str(tmp_path / "nowhere.pt"))
    assert module.enabled_kernels() == before, "at once: whoever has the error has its Trainer, too"
    del failed
    with pytest.warns(UserWarning, match="No optimizer"):
        make()
    gc.collect()
    assert module.enabled_kernels() == before


def test_backend_that_cannot_work_here_raises_before_training(make_trainer) -> None:
    for backend in ("efficient", "cudnn"):
        with pytest.raises(SpeedUpUnavailable, match=f"backend '{backend}' needs a CUDA device, the run is on cpu"):
            make_trainer([SDPAttention(backend)], model=eager())
    assert SDPAttention("flash").unavailable(CPU) is None


@pytest.mark.parametrize(("capability", "works"), [((7, 5), False), ((8, 0), True)])
def test_flash_needs_ampere(monkeypatch, capability, works: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    reason = SDPAttention("flash").unavailable(CUDA)
    assert (reason is None) == works
    assert works or "Tesla T4 has less; use backend='efficient'" in reason


@pytest.mark.parametrize(("backend", "error"), [("flush", ValueError), ("", ValueError), (None, TypeError)])
def test_bad_backend_names_the_choices(backend, error) -> None:
    with pytest.raises(error, match="auto, flash, efficient, cudnn, math"):
        SDPAttention(backend)


def test_repr_evaluates_back() -> None:
    assert repr(eval(repr(SDPAttention(backend="math")))) == "SDPAttention(backend='math')"


def test_examples_in_the_documentation_run() -> None:
    import doctest

    import composer_speedups.kernels.attention_kernels as watching

    for documented in (module, watching, fused_layer_norm):
        results = doctest.testmod(documented)
        assert results.attempted and not results.failed


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
def test_fused_kernels_run_on_the_gpu(padded: bool) -> None:
    model = eager(attention_probs_dropout_prob=0.1).train().cuda()
    apply_sdp_attention(model)
    batch = {k: v.cuda() for k, v in batch_of(padded).items()}
    with watch_attention() as watch, torch.autocast("cuda", dtype=torch.float16):
        model(**batch).loss.backward()
    assert set(watch.kernels) <= ({"memory-efficient", "cudnn"} if padded else {"flash", "cudnn"})
    assert watch.kernels
