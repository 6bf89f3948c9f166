"""`train` with what people do not mean: weights that are not finite, brackets in names, loggers that cannot start."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from composer.loggers import FileLogger
from hostile import TINY
from safetensors.torch import load_file, save_file

from composer_speedups.cli import main
from composer_speedups.errors import RecipeError
from composer_speedups.recipes import load_recipe
from composer_speedups.training.loggers import built_loggers
from composer_speedups.training.run import run

SHORT = [*TINY, "duration=2ba", "evaluate=false", "schedule.warmup=0ba"]
NO_DATA = ["task={name: text, path: ./nowhere}", *SHORT[1:]]  # what is told with it is told before any data is read


def cli(capsys, *arguments: str) -> tuple[int, str, list[str]]:
    capsys.readouterr()
    code = main(["train", "demo/fp32", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return code, captured.out, captured.err.splitlines()


def refused(*overrides: str, short: list[str] = SHORT) -> str:
    with pytest.raises(RecipeError) as caught:
        run(load_recipe("demo/fp32", [*short, *overrides]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_begins_at_random_weights_is_said_before_it_takes_its_time() -> None:
    from composer_speedups.commands.train import _plan

    text = _plan(load_recipe("cpu/fastest", check_arguments=False))
    assert text.startswith("bert-base-uncased (random weights, num_hidden_layers=4, hidden_size=256, ")
    own = ["model={name: ./encoder, pretrained: true, config: {}}"]
    assert _plan(load_recipe("cpu/fastest", own, check_arguments=False)).startswith("./encoder on docstrings")


def test_what_labels_were_taken_for_and_that_nothing_is_kept_is_told(tmp_path, capsys) -> None:
    """pandas has written a missing label as "nan", and someone gave half a star."""
    table = tmp_path / "a.csv"
    rows = [f"a text of {n} words and more,{('1', '2', 'nan', '4.5')[n % 4]}" for n in range(80)]
    table.write_text("\n".join(["text,label", *rows]))
    task = [f"task={{name: text, path: {table}, max_length: 16, vocabulary: 300}}", *SHORT[1:]]
    code, out, said = cli(capsys, *task)
    assert code == 0 and re.search(
        r"classes +4: 1 \(\d\d %\), 2 \(\d\d %\), 4\.5 \(\d\d %\),? +nan", " ".join(out.split())
    )
    assert "The model was not kept: --save DIR keeps it." in said
    for others in ([*task, "--save", str(tmp_path / "kept")], SHORT):  # of random tokens nobody wants it
        assert "not kept" not in " ".join(cli(capsys, *others)[2])


def test_what_has_no_effect_is_told_in_one_line_without_ours() -> None:
    words = ["-m", "composer_speedups", "train", "demo/fp32", *SHORT, "speedups.masked_token_head={}"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    told = [line for line in done.stderr.splitlines() if "NoEffectWarning" in line]
    assert done.returncode == 0 and len(told) == 1, done.stderr
    assert told[0].startswith("NoEffectWarning: MaskedTokenHead(capacity=None) changed nothing: no Hugging Face masked")
    assert ".py" not in done.stderr and "self.report" not in done.stderr


def test_a_model_that_is_not_finite_is_not_saved(tmp_path, capsys) -> None:
    """Eight bad steps are too few to be given up for their losses."""
    out = tmp_path / "o[/x]"
    words = ("learning_rate=1e30", "duration=8ba", "description='faster than [/notes] said, [wip] :bug:'")
    with pytest.warns(UserWarning, match="the weights are not finite"):
        code, _, lines = cli(capsys, *SHORT, *words, "--save", str(out))
    assert code == 1
    assert lines[0] == "demo/fp32  faster than [/notes] said, [wip] :bug:"
    assert lines[-1] == (
        "No model was saved: the weights are not finite: lower learning_rate 1e+30, or lengthen schedule.warmup 0ba"
    )
    assert [path.name for path in out.iterdir()] == ["checkpoints"] and not list(out.glob("checkpoints/*"))
    code, printed, lines = cli(capsys, *SHORT, *words)
    said = "the weights are not finite: lower learning_rate 1e+30, or lengthen schedule.warmup 0ba"
    assert code == 1 and said in printed + "\n".join(lines) and "No model" not in printed


def test_brackets_are_printed_and_weights_that_began_as_nan_are_not_saved(tmp_path, capsys, caplog) -> None:
    """A label in a note, and a folder, that look like rich's markup; then the model of that folder, spoilt."""
    for part, count in (("train", 32), ("test", 16)):
        rows = [
            f"text number {n} to {part},{'[/new]' if part == 'test' and not n else 'ab'[n % 2]}" for n in range(count)
        ]
        (tmp_path / f"{part}.csv").write_text("\n".join(["text,label", *rows]))
    task = f"task={{name: text, path: {tmp_path}, max_length: 16}}"
    short, out = [task, *SHORT[1:]], tmp_path / "o[lr=1e-3]"
    code, said, lines = cli(capsys, *short, "--save", str(out), "--resume")
    assert code == 0
    assert "that no text to train on has: '[/new]'" in re.sub(r"\s+", " ", said)
    assert lines[-1] == f"Model in {out}" and (out / "model.safetensors").exists()
    # Nothing was there to resume: a mistyped folder begins anew, too, but not without a word.
    assert f"nothing to resume in {out / 'checkpoints'}: starting anew" in caplog.messages

    weights = load_file(out / "model.safetensors")
    weights["bert.encoder.layer.0.output.dense.weight"][0, 0] = float("nan")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    second = tmp_path / "second"
    words = [task, *SHORT[2:], f"model={{name: '{out}', pretrained: true}}", "model.config={}", "--save", str(second)]
    with pytest.warns(UserWarning, match="the weights are not finite"):
        code, _, lines = cli(capsys, *words)
    assert code == 1 and not (second / "model.safetensors").exists()
    assert "No model was saved: the weights are not finite: the first loss was not finite already" in lines[-1]
    assert lines[-1].endswith(f"so look at the weights of {out}")


NOT_INSTALLED = {"CometMLLogger": "comet_ml", "MLFlowLogger": "mlflow", "NeptuneLogger": "neptune"}
NOT_INSTALLED |= {"SlackLogger": "slack_sdk", "WandBLogger": "wandb"}


@pytest.mark.parametrize("name", NOT_INSTALLED)
def test_a_logger_that_is_not_installed_is_one_line(name: str, monkeypatch) -> None:
    package = NOT_INSTALLED[name]
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there, whatever this machine has
    message = refused(f"loggers={{{name}: {{}}}}", short=NO_DATA)
    assert message == (
        f"command line: loggers.{name}: it needs {package}, which is not installed: pip install {package}"
    )


@pytest.mark.parametrize(
    ("logger", "expected"),
    [
        ("FileLogger: {file_name: x}", "loggers.FileLogger: unknown argument 'file_name'. Nearest: filename"),
        ("FileLogger: {filename: 5}", "loggers.FileLogger: it cannot start (AttributeError: "),
    ],
)
def test_wrong_arguments_of_a_logger_are_told_before_any_data(logger: str, expected: str) -> None:
    assert expected in refused(f"loggers={{{logger}}}", short=NO_DATA)


@pytest.mark.parametrize("logger", ["FileLogger: {filename: FILE/y}", "TensorboardLogger: {log_dir: FILE}"])
def test_a_place_that_a_logger_cannot_write_is_one_line(logger: str, tmp_path) -> None:
    """It finds out only when the Trainer starts it."""
    (tmp_path / "file").write_text("mine")
    message = refused(f"loggers={{{logger.replace('FILE', str(tmp_path / 'file'))}}}")
    assert f"loggers.{logger.partition(':')[0]}: it cannot start (" in message
    assert f"{tmp_path / 'file'}" in message and "Change what is given: {" in message
    assert (tmp_path / "file").read_text() == "mine"


def test_a_logger_that_can_start_writes(tmp_path) -> None:
    log = tmp_path / "log.txt"
    assert run(load_recipe("demo/fp32", [*SHORT, f"loggers={{FileLogger: {{filename: '{log}'}}}}"])).status == "ok"
    assert "loss/train/total" in log.read_text()


def test_a_file_logger_takes_no_output_when_its_run_is_over(capsys) -> None:
    """It takes it from when it is built, also where no Trainer comes to be that would close it."""
    with built_loggers(load_recipe("demo/fp32", ["loggers={FileLogger: {}}"])) as (logger,):
        assert isinstance(logger, FileLogger)
        print("kept")
    print("not any more")
    taken = "".join(logger._queue.queue)
    assert "kept" in taken and "not any more" not in taken


def test_a_name_too_long_to_be_written_says_nothing_of_what_was_saved(tmp_path, capsys) -> None:
    out = tmp_path / ("x" * 300)
    code, _, lines = cli(capsys, *SHORT, "--save", str(out))
    assert (code, lines[-1]) == (
        2,
        f"error: {out} cannot be written: File name too long: name another folder with --save",
    )
    assert not list(Path(tmp_path).iterdir())
