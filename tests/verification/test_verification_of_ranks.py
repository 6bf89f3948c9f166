"""`verify` on two ranks: it holds where all is well, and sees what goes wrong only with several."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from contract import usable
from exchanges import worked
from verify_worker import FAULTS, SPEEDUPS, TRIES, in_bf16

from composer_speedups.cli import main
from composer_speedups.verification.findings import Verification

pytestmark = pytest.mark.timeout(600)
TOGETHER = {"gradient_as_bucket_view", "gradient_compression"}  # which one process cannot use
ALONE = {"gradient_release": "gradient_release is for one process: DDP keeps all gradients in its buckets"}
TINY = [
    "task={name: dummy, max_length: 32, mean_length: 16, length_std: 6, vocabulary: 256, train_samples: 64, "
    "eval_samples: 16}",
    "model.config={num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2, intermediate_size: 64}",
    "batch_size=8",
]
WELL = ("plain", "plain, accumulated", "plain mlm", "bf16", "views", "sent in bf16", "sent in fp16")
WELL += ("bf16, sent in bf16", "budget", "budget mlm", "budget mlm, every batch")
REFUSED = {
    "seven samples": "samples 7 cannot be shared by 2 ranks: choose a multiple of 2",
    "other models": "the ranks' models differ in model.bert.pooler.dense.bias: make them from one seed",
    "labels of tokens, accumulated": "microbatch_size is for models with one label a sample",
}
WRONG = {
    "a gradient of one rank": "bert.encoder.layer.1.output.dense.weight, step 1 in float32",
    "the loss of one rank": "loss, step 1 in float32",
    "the rate of one rank": "updates of torch AdamW",
    "the texts of the first rank": "step 1 in float32",
    "nothing is exchanged": "step 1 in float32",
    "a gradient after the exchange": "ranks have different weights after step 2",
    "a weight of one rank": "ranks have different weights after step 2",
    "a weight that is no number": "ranks have different weights after step 4",
    "an update that is no number": "updates of torch AdamW (for-loop): nan off AdamW's",
    "budget mlm, not weighed": "step 1 in float32",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> dict[str, list[Any]]:
    return torch.load(worked(tmp_path_factory, "verify_worker.py") / "results.pt")


@pytest.mark.elsewhere
@pytest.mark.parametrize("name", WELL)
def test_holds_on_two_ranks(name: str, two) -> None:
    first, second = two[name]
    assert first["wrong"] == [], first
    assert first == second, "all ranks find the same"
    assert first["tokens"] > 0 and 0 < first["padding"] < 1
    error, allowed = first["updates"]
    assert error <= allowed


@pytest.mark.elsewhere
@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_with_several_ranks_is_found(name: str, two) -> None:
    first, second = two[name]
    assert first["wrong"] == second["wrong"]
    assert any(WRONG[name] in line for line in first["wrong"]), first


@pytest.mark.elsewhere
@pytest.mark.parametrize("name", REFUSED)
def test_what_ranks_cannot_share_is_refused(name: str, two) -> None:
    assert two[name].startswith(f"UserError: {REFUSED[name]}"), two[name]


@pytest.mark.elsewhere
@pytest.mark.parametrize("key", SPEEDUPS)
def test_each_speed_up_holds_on_two_ranks(key: str, two) -> None:
    if key in ALONE or not (usable(key) or key in TOGETHER):
        assert two[key].startswith("SpeedUpUnavailable: ") and ALONE.get(key, "") in two[key], two[key]
        return
    first, second = two[key]
    assert first["wrong"] == second["wrong"] == [] and first["comparisons"] == second["comparisons"], first
    assert first["notes"] == [], "it changed nothing, and nothing is shown"


def test_all_that_was_tried_is_looked_at() -> None:
    assert {*WELL, *WRONG, *REFUSED, *SPEEDUPS} == {*TRIES} and {*FAULTS} < {*WRONG} and {*ALONE} < {*SPEEDUPS}


@pytest.mark.elsewhere
def test_what_is_rounded_on_its_way_is_compared_so_and_in_float32(two) -> None:
    def errors(name: str) -> dict[str, float]:
        return {precision: error for precision, step, _, error in two[name][0]["comparisons"] if step == 1}

    sent, plain = errors("sent in bf16"), errors("plain")
    assert [*sent] == ["float32, sent in bf16", "float32"] and [*plain] == ["float32"]
    # 2^-9 of each number at most, some of it rounded once more by the sum; in float32 nothing of that.
    assert 2**-11 < sent["float32, sent in bf16"] < 2**-8
    assert sent["float32"] < 4 * plain["float32"] < 1e-5
    assert [*errors("bf16, sent in bf16")] == ["bf16, sent in bf16", "float32"]


@pytest.mark.elsewhere
def test_under_ddp_it_is_seen_in_which_dtype_the_model_runs(two) -> None:
    """On a CPU autocast is a class of the model's, which is inside of DDP then."""
    kernel = in_bf16()["changed"]["unpadding"]["kernel"]
    assert two["bf16"][0]["changed"]["unpadding"]["kernel"] == kernel
    assert {precision for precision, *_ in two["bf16"][0]["comparisons"]} == {"bf16", "float32"}


def verified(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["verify", *words, *TINY])
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def test_the_command_on_two_ranks(capsys, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, said = verified(capsys, "cpu/fp32", "speedups.gradient_compression={}", "--ranks", "2")
    assert code == 0, said
    assert "8 texts of dummy" in said and "On 2 ranks of " in said and "float32, sent in bf16, step 4" in said
    assert said.endswith("yes: cpu/fp32 computes what its model does without speed-ups")


@pytest.mark.elsewhere
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cpu/fp32", "--ranks", "2", "--samples", "5"], "samples 5 cannot be shared by 2 ranks"),
        (["cpu/fp32", "--ranks", "2", "batch_size=7"], "batch_size 7 cannot be shared by 2 ranks"),
        (["cpu/fp32", "speedups.gradient_release={}", "--ranks", "2"], "gradient_release is for one process"),
        (["cpu/fp32", "--ranks", "4096"], "4096 ranks need a core each"),
        (["cpu/ranks"], "gradient_as_bucket_view cannot be used here: one process exchanges no gradients: start"),
    ],
)
def test_mistakes_with_ranks_are_one_line(words: list[str], message: str, capsys) -> None:
    recipe, *rest = words
    assert main(["verify", recipe, *TINY, *rest]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and message in last and "rank 1:" not in last


def test_under_a_launcher_it_starts_no_ranks_of_its_own(capsys, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, said = verified(capsys, "cpu/fp32", "--ranks", "2")
    assert code == 2 and "leave out composer -n or torchrun and use --ranks" in said


def test_what_was_found_comes_back_as_it_was() -> None:
    from dataclasses import asdict

    from composer_speedups.verification.findings import Comparison, Errors, Updates

    error = Errors(1e-7, 2e-7, {"w": float("inf")}, {"w": 0.5})
    for updates in (None, Updates("torch AdamW", 1e-6, None)):
        found = Verification([Comparison("bf16", 1, error, error, "w", 0.3)], updates, 12, 0.5, {"a": {}}, ["n"], ["w"])
        assert Verification.read(json.loads(json.dumps(asdict(found)))) == found
