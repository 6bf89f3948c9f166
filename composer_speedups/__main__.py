"""`python -m composer_speedups`, and `composer -n 2 -m composer_speedups train ...` for several ranks."""

from __future__ import annotations

import sys

from composer_speedups.cli import main

if __name__ == "__main__":
    sys.exit(main())
