"""What the documents tell the user to type works: every Python block runs, every command and recipe exists."""

from __future__ import annotations

import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from small_encoder import write_encoder
from typer.main import get_command

from composer_speedups import registry
from composer_speedups.cli import app
from composer_speedups.recipes import load_recipe
from composer_speedups.recipes.files import suite_names

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += [*sorted((ROOT / "benchmarks").glob("*.md")), ROOT / "benchmarks" / "results" / "README.md"]


def blocks(language: str) -> list[pytest.param]:
    """Each fenced block of `language`, named by its document and line."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 2
            found.append(pytest.param(document, line, match[1], id=f"{document.name}:{line}"))
    return found


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """Accelerate keeps its precision for the whole process: one block's must not reach the next one's."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("document", "line", "source"), blocks("python"))
def test_python_blocks_run(document: Path, line: int, source: str, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write where it stands
    if "sentence_transformers" in source:
        pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    if "./encoder" in source:
        write_encoder(tmp_path / "encoder")
    torch.manual_seed(0)
    code = compile("\n" * (line - 1) + source, str(document), "exec")  # tracebacks name the document's own line
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # Accelerate's and transformers' own; a speed-up without effect stays an error
        warnings.simplefilter("error", NoEffectWarning)
        warnings.filterwarnings("ignore", ".pin_memory. argument is set as true")  # the Hugging Face Trainer sets it
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")  # PEFT asks by an old name
        namespace = {"__name__": "__main__"}
        exec(code, namespace)
    if trainer := namespace.get("trainer"):
        trainer.close()
    for value in namespace.values():
        if isinstance(value, torch.nn.Module):
            assert all(p.isfinite().all() for p in value.parameters())


def commands() -> list[pytest.param]:
    """Each line of a shell block that calls this package's command, without what follows a `#`."""
    found = []
    for block in blocks("bash"):
        _, first, source = block.values
        for number, text in enumerate(source.splitlines()):
            words = shlex.split(text, comments=True)
            if words and words[0] == "composer-speedups":
                found.append(pytest.param(words[1:], id=f"{block.id.partition(':')[0]}:{first + number}"))
    return found


@pytest.mark.parametrize("words", commands())
def test_commands_exist_and_take_what_is_shown(words: list[str]) -> None:
    command = get_command(app).commands[words[0]]
    command.make_context(words[0], list(words[1:]))  # parses as the real call does, and runs nothing
    for word in words[1:]:
        if re.fullmatch(r"(finetune|mlm|memory|cpu|demo)/\w+", word):
            load_recipe(word)
    if words[0] == "ablate" and "/" not in words[1]:
        assert words[1] in suite_names()


def test_the_table_has_every_speed_up() -> None:
    table = re.search(r"<!-- algorithms -->\n(.*?)<!-- /algorithms -->", DOCUMENTS[0].read_text(), re.DOTALL)
    assert table is not None
    listed = re.findall(r"^\| `(\w+)` \|", table[1], re.MULTILINE)
    assert sorted(listed) == sorted(registry.keys()), "add a row: `key` | what | when | numerics | needs"
    assert f"{len(listed)} speed-ups, each" in DOCUMENTS[0].read_text(), "README's first lines count them"


def anchors(document: Path) -> set[str]:
    """What its headings are called in links."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_links_and_folders_of_results_are_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", text):
        file = document.parent / target if target else document
        assert target.startswith("http") or file.exists(), target
        assert not anchor or target.startswith("http") or anchor in anchors(file), f"{target}#{anchor}"
    for folder in re.findall(r"`(?:benchmarks/)?(?:results/)?(20\d\d-\d\d-\d\d_\w+)/?`", text):
        assert (ROOT / "benchmarks" / "results" / folder).is_dir(), folder


def test_every_folder_of_results_is_listed() -> None:
    text = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    folders = sorted(file.name for file in (ROOT / "benchmarks" / "results").iterdir() if file.is_dir())
    assert folders and [name for name in folders if f"`{name}`" not in text] == []
