"""The table of a benchmark, made from the raw rows in its folder.

    python -m benchmarks.table benchmarks/results/2026-11-23_cpu_peers_5

Where the measurement was cut off (a lent machine's time was over), this also writes `table.md` and `plot.png` there;
those that are there stay as they are. Folders of studies hold `runs.sqlite`: `composer-speedups report FOLDER`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.harness import read
from benchmarks.run import PARTS
from composer_speedups.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of results")
    for folder in parser.parse_args(arguments).folders:
        part, _, _ = PARTS[read(folder).conditions["part"]]
        print(part.table(folder))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
