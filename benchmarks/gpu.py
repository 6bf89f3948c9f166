"""Everything that waits for a GPU, as one command of at most eight minutes.

    PYTHONUNBUFFERED=1 python -m benchmarks.gpu --out results; code=$?; tar czf $OUT/results.tgz results; exit $code

(Eleven files; a lent machine gives eight back, hence the archive, also when a test has failed. A machine without a
package index: requirements/offline.txt.) Then, with what time is left, how the kernels are launched best here
(`launches.py`), and more repetitions of what decides:

    PYTHONUNBUFFERED=1 python -m benchmarks.gpu --parts launches training --first 6 --minutes 9 --out more

First the numerics of every CUDA path (the tests marked `gpu`: Triton kernels and variable-length attention against
float64, loss scaling, bitsandbytes, synchronisations, compile), as what is wrong need not be measured. Then each kernel
against the limits of the device, then whole training runs against the peers, as many repetitions as the time allows:
speeds, MFU on real tokens (of the matmul peak measured in the same run), and the peaks of memory. What decides about
the targets comes first, so that it has been run at least once where the time ends early.
What is done is on disk at any moment, and `python -m benchmarks.table FOLDER` makes a table of it. Without a GPU it
does the same on the CPU, as a rehearsal: the tests are skipped then, which is said.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from benchmarks import launches, limits, peers
from benchmarks.harness import new_folder, run
from composer_speedups.hardware import hardware, suite_section

PARTS = ("tests", "limits", "training")  # of the programme; "launches" is for what time is left
_TESTS = 180  # seconds that the tests may take
_FAILED = re.compile(r"(?:FAILED|ERROR) \S+\.py(?:::\S+)?")
_MARKED = re.compile(r"mark\.gpu|\bdevice: str")  # by itself, or by conftest's fixture
_ROOT = Path(__file__).parents[1]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="of all together (default: 8)")
    parser.add_argument("--batches", type=int, default=30 if hardware() == "cuda" else 2, help="that count")
    parser.add_argument("--workers", type=int, default=12, help="processes for the tests (default: 12)")
    parser.add_argument(
        "--parts", nargs="+", choices=(*PARTS, "launches"), default=PARTS, help="to do (default: all but launches)"
    )
    parser.add_argument("--first", type=int, help="training: so many entries, in order of what they decide")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or min(options.batches, options.workers, options.first or 1) < 1:
        parser.error("--minutes, --batches, --workers and --first must be positive")
    if "launches" in options.parts and hardware() != "cuda":
        parser.error("launches tries how kernels are launched on a GPU, and there is none: leave it out of --parts")
    deadline = time.monotonic() + 60 * options.minutes
    if hardware() != "cuda":
        print("no GPU here: a rehearsal on the CPU, whose numbers are the CPU's")
    options.out.mkdir(parents=True, exist_ok=True)
    passed = True
    if "tests" in options.parts:
        passed &= _test(options.out / "tests.txt", options.workers, min(_TESTS, 60 * options.minutes / 2))
    if "limits" in options.parts:
        passed &= _part(limits, options.out / "limits", deadline)
    if "launches" in options.parts:
        passed &= _part(launches, options.out / "launches", min(deadline, time.monotonic() + 30 * options.minutes))
    if "training" in options.parts:
        # The last training run begins half a minute before the end, at the latest; what takes longer is stopped.
        folder = new_folder("peers", options.out / "peers")
        first = tuple(peers.ENTRIES[suite_section()])[: options.first]
        run(peers, folder, 100, options.batches, deadline=deadline - 30, only=first)
    words = "no test was asked for" if "tests" not in options.parts else "all passed"
    words = words if passed else "tests or kernels FAILED"
    print(f"done with {deadline - time.monotonic():.0f} s left; {words}")
    return 0 if passed else 1


def _part(part: ModuleType, out: Path, deadline: float) -> bool:
    """Kernels, in this process; whether it went well. What is wrong with one costs the training runs nothing."""
    import torch

    try:
        run(part, new_folder(out.name, out), 3, 32 if hardware() == "cuda" else 1, deadline=deadline)
    except Exception:
        traceback.print_exc()
        return False
    finally:
        if hardware() == "cuda":
            gc.collect()
            with suppress(RuntimeError):  # an error of the device, of which these lines have told already
                torch.cuda.empty_cache()  # or this process would keep gigabytes from the training runs
    return True


def marked() -> list[str]:
    """The test files with tests for a GPU."""
    paths = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(_ROOT)) for path in paths if _MARKED.search(path.read_text())]


def _test(log: Path, workers: int, limit: float) -> bool:
    """Run the tests that need a GPU; whether all that ran passed."""
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
        "-v",  # a line a test, at once: where the time runs out, these lines tell what passed until then
        "-rs",
        "--durations=20",
        "--color=no",
        # On a stack that nobody has seen: a new warning, or a package too few, must not hide the numerics.
        "-W",
        "default",
        "--continue-on-collection-errors",
        *marked(),
    ]
    with log.open("w") as file:
        # Each worker's Inductor would start as many compilers as there are cores.
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        tests = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
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
    sys.exit(main())
