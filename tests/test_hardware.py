from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from composer_speedups import hardware


def test_environment_says_what_a_number_depends_on(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    facts = hardware.environment()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["hardware"] == hardware.hardware()
    assert torch.__version__.partition("+")[0] in facts["versions"]["torch"]
    assert {"mosaicml", "transformers", "composer_speedups"} <= facts["versions"].keys()
    assert facts["variables"]["OMP_NUM_THREADS"] == "1"
    assert "hidden" not in json.dumps(facts)
    assert facts["cpu"]["model"] and facts["memory_bytes"] > 2**28 and facts["threads"] >= 1
    assert facts["commit"] is None or len(facts["commit"]["id"]) == 40
    assert ", 1 thread," in hardware.summary(facts | {"threads": 1, "gpus": []})
    line = hardware.summary(facts | {"variables": facts["variables"] | {"TRITON_CACHE_DIR": "/cache"}})
    assert facts["versions"]["torch"] in line and "; OMP_NUM_THREADS=1" in line and "/cache" not in line


def test_peak_is_that_of_a_matmul(device: str):
    peak = hardware.matmul_peak(device, "fp32", seconds=0.2)
    size = 1024
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    best = float("inf")
    for _ in range(20):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    # Loose, as other processes may be at work: this is about units and orders of magnitude, not about speed.
    assert 2 * size**3 / best / 20 < peak < 20 * 2 * size**3 / best
    assert torch.get_float32_matmul_precision() == "highest"


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="fp8"):
        hardware.matmul_peak("cpu", "fp8")


def test_other_machines_are_told_apart():
    facts = hardware.environment()
    assert hardware.same_machine(facts, json.loads(json.dumps(facts))) == ""
    other = facts | {"versions": facts["versions"] | {"torch": "1.0"}}
    assert hardware.same_machine(facts, other).startswith("versions torch")
    other = facts | {"cpu": facts["cpu"] | {"model": "abacus"}}
    assert "abacus here" in hardware.same_machine(facts, other)
    assert hardware.same_machine(facts, facts | {"commit": {"id": "0" * 40, "clean": False}}) == ""
    slower = facts | {"variables": facts["variables"] | {"ONEDNN_MAX_CPU_ISA": "SSE41"}}
    assert hardware.same_machine(facts, slower) == "variables ONEDNN_MAX_CPU_ISA nothing there, SSE41 here"


def test_that_inductor_was_imported_makes_no_other_machine():
    """It puts the folder of its cache into the environment, whoever imports it."""
    code = """
import json
from composer_speedups import hardware
before = hardware.environment()
from torch._inductor.runtime.cache_dir_utils import cache_dir
folder = cache_dir()
after = hardware.environment()
assert after["variables"]["TORCHINDUCTOR_CACHE_DIR"] == folder
print(json.dumps([before["variables"].get("TORCHINDUCTOR_CACHE_DIR"), hardware.same_machine(before, after)]))
"""
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [None, ""]


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="x86 and Linux tell")
def test_bf16_products_need_instructions_for_them():
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    has = bool({"avx512_bf16", "amx_bf16"} & flags)
    assert hardware.multiplies_bf16() == has
    assert has == (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@pytest.mark.parametrize(
    ("machine", "flags", "supported", "instructions", "multiplies"),
    [
        ("x86_64", ["avx2", "avx512f", "avx512_bf16"], True, None, True),
        ("x86_64", ["avx2", "avx512f"], True, None, False),  # Skylake to Ice Lake: oneDNN takes them, and widens
        ("x86_64", ["avx2"], False, None, False),
        ("AMD64", [], True, True, True),  # Windows: only PyTorch can tell
        ("AMD64", [], True, False, False),
        ("aarch64", ["asimd", "bf16"], True, None, True),
        ("arm64", [], True, None, True),
        ("aarch64", ["asimd"], False, None, False),
    ],
)
def test_who_multiplies_bf16(machine, flags, supported, instructions, multiplies, monkeypatch):
    monkeypatch.setattr(hardware, "_cpu", lambda: {"flags": flags})
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported, raising=False)

    def ask() -> bool:
        return pytest.fail("asked") if instructions is None else instructions

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", ask)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", ask)
    assert hardware.multiplies_bf16.__wrapped__() is multiplies


@pytest.mark.parametrize(
    ("kind", "flags", "products", "section"),
    [
        ("cuda", [], False, "cuda"),
        ("cpu", ["avx2"], None, "cpu_without_bf16"),
        ("cpu", [], False, "cpu_without_bf16"),
        ("cpu", ["avx2", "avx512f"], None, "cpu_without_bf16"),
        ("cpu", ["avx2", "avx512f", "avx512_bf16"], None, "cpu"),
        ("cpu", ["asimd", "bf16"], True, "cpu"),
    ],
)
def test_sections_of_suites(kind: str, flags: list[str], products: bool | None, section: str, monkeypatch):
    monkeypatch.setattr(hardware, "hardware", lambda: kind)
    monkeypatch.setattr(hardware, "_cpu", lambda: {"flags": flags})
    # None: not to be asked, as it would import torch.
    monkeypatch.setattr(hardware, "multiplies_bf16", lambda: pytest.fail("asked") if products is None else products)
    assert hardware.suite_section() == section


def test_a_multiply_add_is_two_operations(monkeypatch) -> None:
    """As `flops.py` counts: else every MFU would be off by two. Each look at the clock is a second."""
    clock = itertools.count()
    monkeypatch.setattr(hardware, "_peaks", {})
    monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(torch, "mm", lambda left, right, out: out)
    assert hardware.matmul_peak("cpu", "fp32", seconds=20.0) == 2 * 2048**3
