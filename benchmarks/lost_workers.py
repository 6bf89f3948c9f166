"""A plugin of pytest for tests on a GPU: a worker of xdist that has lost its context of CUDA ends, and is replaced.

Every test that it still ran would fail, in no time, so that it would take more and more of them from the others. It
ends before xdist hears that the test is over: the one that is then said to have crashed is the one that did it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks import apart


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    done = yield
    if "PYTEST_XDIST_WORKER" in os.environ and apart.context_lost():
        os._exit(1)
    return done
