"""Python's garbage collector is left out where it finds nothing, and nowhere else."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from composer_speedups.collector import importing


def python(code: str) -> str:
    environment = os.environ | {"PYTHONWARNINGS": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_before_afterwards_whatever_happened(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_speed_ups_are_imported_without_it() -> None:
    code = """
import gc, sys
from composer_speedups import registry
seen = []
gc.callbacks.append(lambda phase, info: seen.append(phase))
for key in registry.keys():
    registry.speedup_class(key)
print(len(seen), "composer" in sys.modules, gc.isenabled())
"""
    seen, loaded, enabled = python(code).split()
    assert (loaded, enabled) == ("True", "True")
    assert int(seen) < 500, "some between the imports; while Composer is imported it would be 3,000"


def test_a_process_ends_without_it_but_with_all_its_handlers() -> None:
    code = """
import atexit, sys
from composer_speedups.cli import main
class Loop:
    def __init__(self): self.me = self
    def __del__(self): print("collected", flush=True)
Loop()
main(["--version"])
atexit.register(print, "written")
"""
    assert python(code).splitlines()[-1] == "written"
    assert python(code.replace("main([", "print([")).splitlines()[-1] == "collected"
