"""Checkpoints converted between optimizers: moments, decay and place come along; what cannot be is one clear line."""

from __future__ import annotations

import copy
import os
import re
import resource
import shlex
import signal
import zipfile
from pathlib import Path

import pytest
import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from composer.optim import DecoupledAdamW, LinearScheduler
from contract import bert, loader

import composer_speedups
from composer_speedups.cli import main
from composer_speedups.errors import CheckpointError, ConflictError
from composer_speedups.optim.convert import OPTIMIZERS, convert_checkpoint, convert_optimizer_state
from composer_speedups.optim.states import read_moments

EPS = torch.finfo(torch.float32).eps
KINDS = ["adamw", "decoupled_adamw", "bnb_adamw", "adamw_8bit"]  # each with the speed-up that trains it
SPEEDUPS = {"adamw": None, "decoupled_adamw": None, "bnb_adamw": "bnb_adamw", "adamw_8bit": "adamw_8bit"}
NESTED = "__bnb_optimizer_quant_state__"
# Of 8 bits: half a gap of the code book next to the maximum of a block of 256, see test_optimizer_states.
SIGNED, UNSIGNED = 1.01 * 0.9 / 64 / 2, 1.01 * 0.9 / 128 / 2
DECAY = 0.1


def train(
    kind: str, load: Path | None = None, save: Path | None = None, speedup: str | None = None, head="classification"
):
    """Train four batches, or the rest of them after `load`; return the Trainer, closed."""
    # Wide enough that matrices are quantised (from 4096 elements), dropout so that the random state matters.
    model = HuggingFaceModel(
        bert(head, hidden_size=64, intermediate_size=128, hidden_dropout_prob=0.1), metrics=[], use_logits=True
    )
    if kind == "decoupled_adamw":
        optimizer = DecoupledAdamW(model.parameters(), lr=1e-3, weight_decay=DECAY * 1e-3, betas=(0.9, 0.999))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=DECAY, foreach=False)
    key = speedup or SPEEDUPS[kind]
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=LinearScheduler(),
        step_schedulers_every_batch=True,
        algorithms=[composer_speedups.build(key)] if key else [],
        train_dataloader=loader(head),
        max_duration="4ba",
        device="cpu",
        seed=7,
        progress_bar=False,
        loggers=[],
        load_path=None if load is None else str(load),
        save_folder=None if save is None else str(save),
        save_interval="2ba",
        save_overwrite=True,
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in trainer.state.model.parameters()])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, Trainer]]:
    """For each optimizer: the checkpoint after two of four batches, and the Trainer at the end."""
    folder = tmp_path_factory.mktemp("runs")
    return {k: (folder / k / "ep0-ba2-rank0.pt", train(k, save=folder / k)) for k in KINDS}


def optimizer_of(path: Path) -> dict:
    state = torch.load(path, map_location="cpu", weights_only=False)["state"]["optimizers"]
    [(name, content)] = state.items()
    return content | {"name": name}


def distance(one: Trainer, other: Trainer, start: Path) -> float:
    """How far apart two runs ended, relative to how far they went since the checkpoint."""
    began = torch.load(start, map_location="cpu", weights_only=False)["state"]["model"]
    apart = moved = 0.0
    for name, p in one.state.model.named_parameters():
        if not name.endswith("key.bias"):  # softmax does not see it: its gradient is nothing but rounding noise
            apart += (p - other.state.model.get_parameter(name)).double().norm().item() ** 2
            moved += (p - began[name]).double().norm().item() ** 2
    return (apart / moved) ** 0.5


# ---- what comes along


@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_training_goes_on_as_it_would_have(source, target, runs, tmp_path) -> None:
    if source == target:
        with pytest.raises(CheckpointError, match=f"is {target} already: load it as it is"):
            convert_checkpoint(runs[source][0], tmp_path / "new.pt", target)
        return
    done = convert_checkpoint(runs[source][0], tmp_path / "new.pt", target)
    assert (done.source, done.target, done.step) == (source, target, 2)
    new = optimizer_of(tmp_path / "new.pt")
    assert new["name"] == OPTIMIZERS[target]
    assert done.parameters == len(new["state"]) == len(optimizer_of(runs[source][0])["state"])
    resumed = train(target, load=tmp_path / "new.pt")
    optimizer = resumed.state.optimizers[0]
    assert {int(s["step"]) for s in optimizer.state.values()} == {4}
    # Two more steps, each a few roundings of the update and one of the weight; where a gradient is nearly 0 (as of
    # attention's key bias) they decide its sign, hence 1e-3 of the path and not 1e-6. With 8 bits on one side, half the
    # codes' gap of the largest moments, about 1 % in the mean; small moments are off by more.
    bound = 0.1 if "adamw_8bit" in (source, target) else 1e-3
    assert distance(runs[source][1], resumed, runs[source][0]) < bound


def test_without_moments_the_path_is_another(runs) -> None:
    """The test above can fail: a restart from the same weights goes another way, beyond its widest bound."""
    path, whole = runs["adamw"]
    content = torch.load(path, weights_only=False)
    for state in content["state"]["optimizers"]["AdamW"]["state"].values():
        state["exp_avg"].zero_()
    torch.save(content, path.parent / "lost.pt")
    assert distance(whole, train("adamw", load=path.parent / "lost.pt"), path) > 0.2


@pytest.mark.parametrize("through", ["bnb_adamw", "decoupled_adamw"])
def test_there_and_back_is_bit_for_bit(through, runs, tmp_path) -> None:
    path, whole = runs["adamw"]
    convert_checkpoint(path, tmp_path / "there.pt", through)
    convert_checkpoint(tmp_path / "there.pt", tmp_path / "back.pt", "adamw")
    old, new = optimizer_of(path), optimizer_of(tmp_path / "back.pt")
    for name, state in old["state"].items():
        for entry, value in state.items():
            assert torch.equal(value, new["state"][name][entry]), (name, entry)
            assert value.dtype == new["state"][name][entry].dtype
    [before], [after] = old["param_groups"], new["param_groups"]
    assert after.pop("weight_decay") == pytest.approx(before.pop("weight_decay"), rel=4e-16)  # * and / by the rate
    assert before | {"foreach": None} == after, "all but the choice of implementation must be as it was"
    if through == "bnb_adamw":
        assert torch.equal(weights(train("adamw", load=tmp_path / "back.pt")), weights(whole))


def test_8_bits_are_within_their_quantisation_error(runs, tmp_path) -> None:
    done = convert_checkpoint(runs["adamw"][0], tmp_path / "new.pt", "adamw_8bit")
    old, new = optimizer_of(runs["adamw"][0])["state"], optimizer_of(tmp_path / "new.pt")["state"]
    quantised = 0
    for name, state in old.items():
        stored = new[name][NESTED]
        found = read_moments({"step": new[name]["step"], **stored})
        if stored["state1"].dtype != torch.uint8:
            assert torch.equal(found.exp_avg, state["exp_avg"]) and torch.equal(found.exp_avg_sq, state["exp_avg_sq"])
            assert state["exp_avg"].numel() < 4096 or "embeddings" in name
            continue
        quantised += 1
        for value, result, bound in (
            (state["exp_avg"], found.exp_avg, SIGNED),
            (state["exp_avg_sq"], found.exp_avg_sq, UNSIGNED),
        ):
            for a, b in zip(value.flatten().split(256), result.flatten().split(256), strict=True):
                assert (a - b).abs().max() <= a.abs().max() * bound
    assert quantised == done.in_8_bits > 0
    assert f"{quantised} of them in 8 bits" in str(done)


def test_the_decay_is_converted_with_the_initial_learning_rate(runs, tmp_path) -> None:
    """The rate at the checkpoint is another one, and the decay that it gives is, too."""
    convert_checkpoint(runs["decoupled_adamw"][0], tmp_path / "torch.pt", "adamw")
    [group] = optimizer_of(tmp_path / "torch.pt")["param_groups"]
    assert group["lr"] == pytest.approx(7.5e-4) and group["initial_lr"] == 1e-3
    assert group["weight_decay"] == pytest.approx(DECAY, rel=1e-15)
    convert_checkpoint(runs["adamw"][0], tmp_path / "decoupled.pt", "decoupled_adamw")
    [group] = optimizer_of(tmp_path / "decoupled.pt")["param_groups"]
    assert group["weight_decay"] == pytest.approx(DECAY * 1e-3, rel=1e-15)


def test_all_else_in_the_file_stays(runs, tmp_path) -> None:
    convert_checkpoint(runs["adamw"][0], tmp_path / "new.pt", "bnb_adamw")
    old, new = (torch.load(p, weights_only=False) for p in (runs["adamw"][0], tmp_path / "new.pt"))
    assert list(old) == list(new) and list(old["state"]) == list(new["state"])
    for part in (old, new):
        del part["state"]["optimizers"]
    assert repr(old) == repr(new)
    for name, value in old["state"]["model"].items():
        assert torch.equal(value, new["state"]["model"][name])


def test_a_tied_embedding_is_kept_in_32_bits_by_any_of_its_names(tmp_path) -> None:
    train("adamw", save=tmp_path, head="mlm")
    convert_checkpoint(
        tmp_path / "ep0-ba2-rank0.pt", tmp_path / "new.pt", "adamw_8bit", keep_32_bit=["*.decoder.weight"]
    )
    state = optimizer_of(tmp_path / "new.pt")["state"]
    tied = [n for n in state if n.endswith(("word_embeddings.weight", "decoder.weight"))]
    assert len(tied) == 1
    assert state[tied[0]][NESTED]["state1"].dtype == torch.float32
    position = next(n for n in state if n.endswith("position_embeddings.weight"))
    assert state[position][NESTED]["state1"].dtype == torch.uint8, "only what was asked for stays in 32 bits"


# ---- the message of a mismatch is a command that works


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict:UserWarning")  # Composer's word for the same
@pytest.mark.parametrize(
    ("source", "speedup"),
    [
        ("adamw", "bnb_adamw"),
        ("adamw", "adamw_8bit"),
        ("bnb_adamw", "fused_adamw"),
        ("bnb_adamw", "adamw_8bit"),
        ("decoupled_adamw", "foreach_adamw"),
        ("adamw_8bit", "bnb_adamw"),
        ("adamw_8bit", "fused_adamw"),
    ],
)
def test_the_error_names_the_command_that_mends_it(source, speedup, runs, tmp_path, capsys) -> None:
    path = tmp_path / "a run's checkpoint.pt"
    path.write_bytes(runs[source][0].read_bytes())
    with pytest.raises(ConflictError) as caught:
        train("adamw", load=path, speedup=speedup)
    assert "\n" not in str(caught.value)
    command = shlex.split(re.search(r"`(.*)`", str(caught.value))[1])
    assert command[:2] == ["composer-speedups", "convert-checkpoint"]
    assert main(command[1:]) == 0
    assert f"{source} -> " in capsys.readouterr().out
    resumed = train("adamw", load=Path(command[3]), speedup=speedup)
    assert {int(s["step"]) for s in resumed.state.optimizers[0].state.values()} == {4}


# ---- plain PyTorch state dicts


def small(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    random = torch.Generator().manual_seed(2)
    return [torch.nn.Parameter(torch.randn(s, generator=random).to(dtype)) for s in [(64, 70), (33,)]]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    random = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=random).to(p.dtype)
    optimizer.step()


def make(kind: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import bitsandbytes.optim as bnb

    if kind == "decoupled_adamw":
        return DecoupledAdamW(params, lr=1e-2, weight_decay=1e-3, betas=(0.9, 0.999))
    cls = {"adamw": torch.optim.AdamW, "bnb_adamw": bnb.AdamW, "adamw_8bit": bnb.AdamW8bit}[kind]
    return cls(params, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("source", KINDS[:3])
@pytest.mark.parametrize("target", KINDS[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_state_dicts(source, target, dtype) -> None:
    params = small(dtype)
    one = make(source, params)
    for number in range(3):
        step(one, number)
    saved = copy.deepcopy(one.state_dict())
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = make(target, others)
    for group in other.param_groups:
        group["weight_decay"] = 0.9  # the file's must win
    other.load_state_dict(convert_optimizer_state(one.state_dict(), source, target, parameters=dict(enumerate(params))))
    assert repr(one.state_dict()) == repr(saved), "what is converted must not be changed"
    for number in range(3, 6):
        step(one, number)
        step(other, number)
    # Three steps of the same formula evaluated in another order: a rounding of the weight (order 1, up to 4) each; in
    # bf16 also of the moments where one side stores them so.
    limit = 3 * 4 * torch.finfo(dtype).eps * (1 if dtype == torch.float32 else 2)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=limit)


def test_a_bf16_models_moments_are_bf16_in_torch_and_float32_in_bitsandbytes() -> None:
    params = small(torch.bfloat16)
    optimizer = make("adamw", params)
    step(optimizer, 0)
    bnb = convert_optimizer_state(optimizer.state_dict(), "adamw", "bnb_adamw")
    assert bnb["state"][0][NESTED]["state1"].dtype == torch.float32
    again = convert_optimizer_state(bnb, "bnb_adamw", "adamw", parameters=dict(enumerate(params)))
    for key, state in optimizer.state_dict()["state"].items():
        assert torch.equal(again["state"][key]["exp_avg"], state["exp_avg"])  # bf16 -> float32 -> bf16 loses nothing
        assert again["state"][key]["exp_avg"].dtype == torch.bfloat16


def test_moments_that_float16_cannot_hold_are_refused_and_not_lost() -> None:
    params = small(torch.float16)
    optimizer = make("bnb_adamw", params)
    step(optimizer, 0)
    state = optimizer.state_dict()
    for packed in state["state"].values():
        packed[NESTED]["state2"].fill_(1e-3)
    convert_optimizer_state(state, "bnb_adamw", "adamw", parameters=dict(enumerate(params)))
    state["state"][0][NESTED]["state2"][0] = 1e-9  # a gradient of 1e-3, after its first step
    with pytest.raises(ConflictError, match=r"float16 parameter of shape \(.*would be kept in float16.*in float32"):
        convert_optimizer_state(state, "bnb_adamw", "adamw", parameters=dict(enumerate(params)))
    wide = dict(enumerate(small(torch.float32)))
    assert convert_optimizer_state(state, "bnb_adamw", "adamw", parameters=wide)["state"][0]["exp_avg_sq"].min() > 0


def test_groups_keep_what_is_the_users_own() -> None:
    first, second = small()
    optimizer = torch.optim.AdamW(
        [{"params": [first], "name": "matrix", "lr": 5e-3, "betas": (0.8, 0.9)}, {"params": [second], "eps": 1e-5}]
    )
    step(optimizer, 0)
    for target in ("bnb_adamw", "decoupled_adamw"):
        one, two = convert_optimizer_state(optimizer.state_dict(), "adamw", target)["param_groups"]
        assert (one["name"], one["lr"], one["betas"], one["params"]) == ("matrix", 5e-3, (0.8, 0.9), [0])
        assert (two["eps"], two["params"]) == (1e-5, [1])
        assert set(make(target, small()).param_groups[0]) <= set(one), "every entry that the target reads"


def test_apex_keeps_one_step_for_a_group() -> None:
    params = small()
    optimizer = make("adamw", params)
    step(optimizer, 0)
    apex = convert_optimizer_state(optimizer.state_dict(), "adamw", "apex_fused_adamw")
    assert apex["param_groups"][0]["step"] == 1 and apex["param_groups"][0]["bias_correction"] is True
    assert set(apex["state"][0]) == {"exp_avg", "exp_avg_sq"}
    again = convert_optimizer_state(apex, "apex_fused_adamw", "adamw")
    assert again["state"][1]["step"].item() == 1 and "bias_correction" not in again["param_groups"][0]
    assert torch.equal(again["state"][0]["exp_avg"], optimizer.state[params[0]]["exp_avg"])
    optimizer.state[params[0]]["step"] += 1
    with pytest.raises(CheckpointError, match=r"one step for a group, its parameters are at the steps \[1, 2\]"):
        convert_optimizer_state(optimizer.state_dict(), "adamw", "apex_fused_adamw")


def test_amsgrad_goes_where_it_exists() -> None:
    optimizer = torch.optim.AdamW(small(), lr=1e-2, amsgrad=True)
    step(optimizer, 0)
    there = convert_optimizer_state(optimizer.state_dict(), "adamw", "decoupled_adamw")
    assert there["param_groups"][0]["amsgrad"] is True and "max_exp_avg_sq" in there["state"][0]
    with pytest.raises(CheckpointError, match="bnb_adamw has no amsgrad=True"):
        convert_optimizer_state(optimizer.state_dict(), "adamw", "bnb_adamw")


# ---- what cannot be converted is one line, and changes nothing


def refuse(source: Path, match: str, target: Path, to: str = "bnb_adamw", **kwargs) -> str:
    before = sorted(target.parent.iterdir())
    with pytest.raises(CheckpointError, match=match) as caught:
        convert_checkpoint(source, target, to, **kwargs)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert sorted(target.parent.iterdir()) == before, "nothing may be left behind"
    return str(caught.value)


def test_no_such_file(tmp_path) -> None:
    refuse(tmp_path / "none.pt", "there is no checkpoint .*none.pt", tmp_path / "new.pt")
    refuse(tmp_path, "is a folder", tmp_path / "new.pt")


def test_a_file_cut_anywhere(runs, tmp_path) -> None:
    whole = runs["adamw"][0].read_bytes()
    cut = tmp_path / "cut.pt"
    for share in (0, 1e-5, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999):
        cut.write_bytes(whole[: int(len(whole) * share)])
        refuse(cut, "cut off|no checkpoint", tmp_path / "new.pt")


def test_a_file_with_a_flipped_byte_is_noticed(runs, tmp_path) -> None:
    data = bytearray(runs["adamw"][0].read_bytes())
    with zipfile.ZipFile(runs["adamw"][0]) as file:
        largest = max(file.infolist(), key=lambda i: i.file_size)
    data[largest.header_offset + 200 + largest.file_size // 2] ^= 0x40
    (tmp_path / "flipped.pt").write_bytes(data)
    refuse(tmp_path / "flipped.pt", "damaged", tmp_path / "new.pt")


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"PK\x03\x04", os.urandom(5000)], ids=["empty", "text", "PK", "noise"]
)
def test_no_checkpoint_at_all(content, tmp_path) -> None:
    (tmp_path / "file.pt").write_bytes(content)
    refuse(tmp_path / "file.pt", "no checkpoint|cut off", tmp_path / "new.pt")


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"state": {}},
        {"state": {"model": {}, "optimizers": {}}},
        {"state_dict": {"w": torch.zeros(2)}},
        torch.zeros(3),
    ],
    ids=str,
)
def test_no_composer_checkpoint(content, tmp_path) -> None:
    torch.save(content, tmp_path / "file.pt")
    refuse(tmp_path / "file.pt", "is no Composer checkpoint", tmp_path / "new.pt")


def altered(path: Path, target: Path, change) -> Path:
    content = torch.load(path, weights_only=False)
    change(content["state"])
    torch.save(content, target)
    return target


def test_weights_only(runs, tmp_path) -> None:
    path = altered(runs["adamw"][0], tmp_path / "a.pt", lambda s: s.pop("optimizers"))
    refuse(path, "holds no optimizer state", tmp_path / "new.pt")


def test_unknown_optimizers(runs, tmp_path) -> None:
    def rename(state) -> None:
        state["optimizers"]["Lion"] = state["optimizers"].pop("AdamW")

    path = altered(runs["adamw"][0], tmp_path / "a.pt", rename)
    refuse(path, "the optimizer Lion is not known here", tmp_path / "new.pt")
    refuse(runs["adamw"][0], "unknown optimizer 'lion': choose one of adamw, ", tmp_path / "new.pt", to="lion")


def test_the_state_of_another_model(runs, tmp_path) -> None:
    name = "model.classifier.weight"

    def reshape(state) -> None:
        moments = state["optimizers"]["AdamW"]["state"][name]
        moments |= {k: v[:2] for k, v in moments.items() if v.ndim}

    path = altered(runs["adamw"][0], tmp_path / "a.pt", reshape)
    refuse(path, rf"another model's: {name} is \(3, 64\), its moments are \(2, 64\)", tmp_path / "new.pt")
    path = altered(runs["adamw"][0], tmp_path / "b.pt", lambda s: s["model"].pop(name))
    refuse(path, f"another model's: the model has no parameter {name}", tmp_path / "new.pt")


@pytest.mark.parametrize(
    "damage",
    [
        lambda o: o.pop("param_groups"),
        lambda o: o["param_groups"][0].pop("lr"),
        lambda o: o["state"].update({"model.classifier.bias": 3}),
        lambda o: o["state"]["model.classifier.bias"].pop("exp_avg_sq"),
        lambda o: o["state"]["model.classifier.bias"].update(exp_avg="a"),
        lambda o: o["state"]["model.classifier.bias"].update(step="x"),
        lambda o: o.update(state=[1]),
        lambda o: o.update(param_groups=[3]),
    ],
)
def test_damaged_state(damage, runs, tmp_path) -> None:
    path = altered(runs["adamw"][0], tmp_path / "a.pt", lambda s: damage(s["optimizers"]["AdamW"]))
    refuse(path, "a.pt: ", tmp_path / "new.pt")


def test_damaged_8_bit_state(runs, tmp_path) -> None:
    def shorten(state) -> None:
        for moments in state["optimizers"]["AdamW8bit"]["state"].values():
            if "absmax1" in moments[NESTED]:
                moments[NESTED]["absmax1"] = moments[NESTED]["absmax1"][:1].clone()

    path = altered(runs["adamw_8bit"][0], tmp_path / "a.pt", shorten)
    refuse(path, "is damaged: .* elements in 8 bits need .* scales", tmp_path / "new.pt", to="adamw")


def test_nothing_is_overwritten_unasked(runs, tmp_path) -> None:
    target = tmp_path / "new.pt"
    target.write_text("precious")
    refuse(runs["adamw"][0], "exists: choose another name, or add --overwrite", target)
    assert target.read_text() == "precious"
    convert_checkpoint(runs["adamw"][0], target, "bnb_adamw", overwrite=True)
    convert_checkpoint(target, target, "adamw", overwrite=True)  # in place
    assert optimizer_of(target)["state"].keys() == optimizer_of(runs["adamw"][0])["state"].keys()
    assert list(tmp_path.iterdir()) == [target]
    assert target.stat().st_mode & 0o777 == runs["adamw"][0].stat().st_mode & 0o777


def test_a_full_disk_leaves_the_target_as_it_was(runs, tmp_path) -> None:
    target = tmp_path / "new.pt"
    target.write_text("precious")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as on a full disk, the write fails in the middle
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        refuse(runs["adamw"][0], "cannot be written: ", target, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert target.read_text() == "precious"


def test_no_folder_to_write_to(runs, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="cannot be written: there is no folder"):
        convert_checkpoint(runs["adamw"][0], tmp_path / "none/new.pt", "bnb_adamw")


class Evil:
    """Runs a command if it is unpickled."""

    def __reduce__(self):
        return os.system, (f"touch {os.environ['EVIL_MARK']}",)


class Note:
    """What a user's own callback may leave in a checkpoint."""

    def __init__(self) -> None:
        self.text = "hello"


def test_code_in_a_file_is_not_run(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EVIL_MARK", str(tmp_path / "ran"))
    path = tmp_path / "evil.pt"
    content = torch.load(runs["adamw"][0], weights_only=False)
    content["state"]["callbacks"]["evil"] = Evil()
    torch.save(content, path)
    refuse(path, r"holds objects of posix\.system, which may run code", tmp_path / "new.pt")
    assert not (tmp_path / "ran").exists()


def test_a_class_of_ones_own_can_be_allowed(runs, tmp_path) -> None:
    path = altered(runs["adamw"][0], tmp_path / "own.pt", lambda s: s["callbacks"].update(mine=Note()))
    name = f"{Note.__module__}.Note"
    assert f"--allow {name}" in refuse(path, "may run code", tmp_path / "new.pt")
    convert_checkpoint(path, tmp_path / "new.pt", "bnb_adamw", allow=[name])
    assert torch.load(tmp_path / "new.pt", weights_only=False)["state"]["callbacks"]["mine"].text == "hello"
    refuse(path, "--allow no.Such: no such class", tmp_path / "other.pt", allow=["no.Such"])


# ---- the command


def test_command(runs, tmp_path, capsys) -> None:
    source, target = str(runs["adamw"][0]), str(tmp_path / "new.pt")
    assert main(["convert-checkpoint", source, target, "--to", "adamw_8bit", "--min-8bit-size", "2048"]) == 0
    parameters = len(optimizer_of(runs["adamw"][0])["state"])
    out = capsys.readouterr().out
    assert out.startswith(f"{target}: adamw -> adamw_8bit: moments of {parameters} parameters")
    assert main(["convert-checkpoint", source, target, "--to", "adamw_8bit"]) == 2
    assert capsys.readouterr().err == f"error: {target} exists: choose another name, or add --overwrite\n"
    assert main(["convert-checkpoint", source, target, "--to", "adamw_8bit", "--overwrite", "--keep-32-bit", "*"]) == 0
    assert "0 of them in 8 bits" in capsys.readouterr().out
    assert main(["convert-checkpoint", source, target]) == 2
    assert "--to" in capsys.readouterr().err
    assert main(["convert-checkpoint", "--help"]) == 0
    assert "Example: composer-speedups convert-checkpoint" in capsys.readouterr().out
