"""`make bench`: what is measured, each part into a folder of its own under benchmarks/results/.

    python -m benchmarks.run                      # against the peers
    python -m benchmarks.run growth compiling     # these parts
    python -m benchmarks.run peers --repetitions 5 --batches 8 --out my_results
    python -m benchmarks.run peers --only best fastest --set batch_size=16 model.config.hidden_size=768

    peers      against the Hugging Face Trainer, stock Composer and a bare loop: some 20 minutes on two cores
    limits     each kernel and optimizer against the measured matmul peak and bandwidth
    launches   on a GPU: how our Triton kernels are best launched
    profiles   where a step's time goes, on a GPU by kernel; on a CPU a study tells it for each recipe
    growth     the gain against the length of texts, batch, share of padding and depth
    compiling  seconds of compiling, whole model and repeated block, cold and warm cache
    verdicts   studies of recipes whose truth is known: are their verdicts to be believed?
    grouping   what batches of like lengths cost in quality, ours and the Hugging Face Trainer's

Where it was stopped, the table is of what had been measured; `python -m benchmarks.table FOLDER` prints it again.
Everything is interleaved, each training run in a fresh process; medians with their spread. On a machine that does other
work besides, the numbers are that work's, too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import compiling, grouping, growth, launches, limits, peers, profiles, verdicts
from benchmarks.harness import Part, new_folder, run
from composer_speedups.errors import UserError

# name -> its module, repetitions, batches that count
PARTS: dict[str, tuple[Part, int, int]] = {
    "peers": (peers, 5, 8),
    "limits": (limits, 5, 6),
    "launches": (launches, 3, 32),
    "profiles": (profiles, 1, 5),
    "growth": (growth, 5, 4),
    "compiling": (compiling, 5, 2),
    "verdicts": (verdicts, 6, 48),  # studies, steps of a run
    "grouping": (grouping, 5, 500),  # seeds, steps of a run
}
_CHANGED = ("peers", "grouping")  # whose recipes take changes
_NAMED = ("peers", "profiles", "launches", "compiling")  # of which some can be chosen by their names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: peers)")
    parser.add_argument("--repetitions", type=int, help="runs of each entry (default: the part's)")
    parser.add_argument("--batches", type=int, help="that count (default: the part's)")
    parser.add_argument("--only", nargs="*", default=(), help=f"{', '.join(_NAMED)}: parts of the names")
    parser.add_argument(
        "--set",
        nargs="*",
        default=(),
        metavar="KEY=VALUE",
        help=f"{', '.join(_CHANGED)}: changes to the recipe of every entry",
    )
    parser.add_argument("--out", type=Path, help="folder of the results, for one part")
    options = parser.parse_args(arguments)
    parts = options.parts or ["peers"]
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]}: no such part. There are: {', '.join(PARTS)}")
    if options.only and (len(parts) > 1 or parts[0] not in _NAMED):
        parser.error(f"--only is for {', '.join(_NAMED[:-1])} or {_NAMED[-1]} alone")
    if options.set and (len(parts) > 1 or parts[0] not in _CHANGED):
        parser.error(f"--set is for {' or '.join(_CHANGED)} alone")
    if options.out and len(parts) > 1:
        parser.error("--out is for one part")
    if min(options.repetitions or 1, options.batches or 1) < 1:
        parser.error("--repetitions and --batches must be positive")
    for name in parts:
        part, repetitions, batches = PARTS[name]
        more = {"only": tuple(options.only)} if name in _NAMED else {}
        more |= {"changes": tuple(options.set)} if name in _CHANGED else {}
        run(part, new_folder(name, options.out), options.repetitions or repetitions, options.batches or batches, **more)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; what was measured so far is kept")
