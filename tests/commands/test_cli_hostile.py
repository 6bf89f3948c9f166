"""The command line where the machine is not as it should be: closed folders, no folder, no memory, no Unicode."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from composer_speedups import doctor
from composer_speedups.ablation.aside import STORE
from composer_speedups.ablation.plan import PlannedRun
from composer_speedups.ablation.store import Store
from composer_speedups.cli import main
from composer_speedups.commands import doctor as doctor_command
from composer_speedups.errors import TaskError
from composer_speedups.measurement.results import RunResult
from composer_speedups.recipes import load_recipe

COMMAND = [sys.executable, "-m", "composer_speedups"]
# Root may look everywhere, unless it gives that up.
_AS_ANYBODY = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []

_SEVERAL = """
import json, sys
from composer_speedups.cli import main
print(json.dumps([main(words) for words in json.loads(sys.argv[1])]))
"""


def several(commands: list[list[str]], *before: str) -> tuple[list[int], list[str]]:
    """Exit codes and errors of commands that end early, in one process for all."""
    words = [*before, sys.executable, "-c", _SEVERAL, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr.splitlines()


def test_names_that_cannot_be_are_one_line(tmp_path) -> None:
    long = str(tmp_path / ("x" * 300))
    commands = {
        ("report", long): f"no study in {long}: File name too long",
        ("report", long, long): f"no study in {long}: File name too long",
        ("recipes", f"{long}=1"): f"name the recipe first: NAME {long}=1",
        ("convert-checkpoint", long, "to.pt", "--to", "adamw"): f"{long} cannot be read: File name too long",
    }
    codes, errors = several([[*words] for words in commands])
    errors = [line for line in errors if line.startswith("error: ")]
    assert codes == [2] * len(commands) and len(errors) == len(commands), errors
    for line, expected in zip(errors, commands.values(), strict=True):
        assert expected in line


def test_a_model_of_a_name_that_cannot_be_is_one_line(tmp_path) -> None:
    """What `doctor --model` looks at first."""
    for name in (str(tmp_path / ("x" * 300)), "~nobody_of_that_name/x"):
        with pytest.raises(TaskError, match="is not there"):
            doctor._config(name)


def test_doctor_prints_brackets_as_they_are(capsys) -> None:
    doctor_command._progress(Console(width=100))("reading [/the] texts of [mine] :bug:")
    assert capsys.readouterr().out == "reading [/the] texts of [mine] :bug:\n"


@pytest.mark.skipif(
    bool(_AS_ANYBODY) and shutil.which("setpriv") is None, reason="root needs setpriv to give up rights"
)
def test_places_that_nobody_may_look_at_are_one_line(tmp_path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    inside = str(closed / "x")
    commands = {
        ("report", inside): f"no study in {inside}: Permission denied",
        ("report", inside, inside): f"no study in {inside}: Permission denied",
        ("recipes", f"{inside}=1"): "name the recipe first: ",
        ("convert-checkpoint", inside, "to.pt", "--to", "adamw"): f"{inside} cannot be read: Permission denied",
    }
    codes, errors = several([[*words] for words in commands], *_AS_ANYBODY)
    errors = [line for line in errors if line.startswith("error: ")]
    assert codes == [2] * len(commands) and len(errors) == len(commands), errors
    for line, expected in zip(errors, commands.values(), strict=True):
        assert expected in line


def test_a_file_that_a_command_trips_over_is_named(capsys, monkeypatch, tmp_path) -> None:
    """Whatever its own code does not foresee; what has no name keeps its traceback."""
    from composer_speedups import recipes

    def trip(*_: object, **__: object) -> None:
        (tmp_path / "not there").read_text()

    monkeypatch.setattr(recipes, "load_recipe", trip)
    assert main(["recipes", "demo/fp32"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'not there'}: No such file or directory\n"


def test_too_little_address_space_for_pytorch_is_one_line() -> None:
    limit = 1_000_000 * 1024
    done = subprocess.run(
        [*COMMAND, "train", "demo/fp32"],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: PyTorch cannot be loaded: ") and "failed to map segment" in last
    assert last.endswith("Is there enough memory, or a limit on it (ulimit -v)?")


@pytest.fixture
def study(tmp_path) -> Path:
    """Of one run that shared the machine, which a dagger tells."""
    recipe = load_recipe("demo/fp32", check_arguments=False)
    with Store(tmp_path / STORE) as store:
        store.begin({"name": "mine", "baseline": recipe.name}, [(recipe.name, recipe.to_dict())])
        environment = store.add_environment({"hardware": "cpu"})
        store.plan([PlannedRun(recipe.name, 17, 0)])
        run = store.claim(environment)
        result = RunResult(recipe.name, 17, samples_per_second=100.0, final_loss=0.5, overlapped=True, losses=[0.5])
        store.finish(run, "ok", "", result.as_dict(), "")
    return tmp_path


def test_a_sign_that_the_output_has_no_letter_for(study) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*COMMAND, "report", str(study), "--no-write"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert b"? 1 run shared this machine with other work" in done.stdout


@pytest.mark.parametrize("words", [["recipes"], ["ablate", "demo"]])
def test_a_working_folder_that_is_gone_is_one_line(words: list[str], tmp_path) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    package = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": package}
    done = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, *words],
        cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "error: the working folder is gone: change to one that exists"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["train", "demo/fp32", "--save", ""],
        ["train", "demo/fp32", "--save="],
        ["ablate", "demo", "--dry-run", "--out", ""],
        ["recommend", "--out="],
        ["tune", "demo/fp32", "--out", ""],
    ],
)
def test_an_empty_name_of_a_folder_is_refused(words: list[str], tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    option = "--save" if words[0] == "train" else "--out"
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {option} is empty: name a place, such as {option} my_model\n"
    assert not list(tmp_path.iterdir())
