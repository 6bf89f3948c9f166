"""What a number was measured on: versions, processor, GPU, settings, and the speed of a plain matmul."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from composer_speedups import cgroup
from composer_speedups.installed import version

__all__ = [
    "X86_BF16",
    "environment",
    "hardware",
    "identity",
    "matmul_peak",
    "multiplies_bf16",
    "peaks_at_work",
    "resident_memory",
    "same_machine",
    "suite_section",
    "summary",
]

_PACKAGES = (
    "torch",
    "mosaicml",
    "transformers",
    "triton",
    "bitsandbytes",
    "apex",
    "torchao",
    "datasets",
    "tokenizers",
    "numpy",
    "composer_speedups",
)
# The facts of `environment` that two speeds must have in common to be compared.
_IDENTITY = ("hardware", "gpus", "driver", "cpu", "python", "versions", "threads", "ranks", "variables")
# What changes speed or numerics. Their values are recorded, and nothing else of the user's environment.
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "OMP_PROC_BIND",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "TORCHINDUCTOR_FREEZING",
    "TRITON_CACHE_DIR",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_MAX_CPU_ISA",
    "CC",
    "CXX",
    "COMPOSER_SPEEDUPS_NATIVE",
    "LD_PRELOAD",
)
# Instruction sets that decide how fast matmuls are.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_tile", "asimd", "sve", "bf16")
X86_BF16 = ("amx_bf16", "avx512_bf16")  # those that multiply bfloat16 on x86


@cache
def hardware() -> str:
    """`cuda` where PyTorch can use a GPU, else `cpu`. Answers without importing torch where there is none."""
    places = ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")
    if sys.platform == "linux" and not any(Path(p).exists() for p in places):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def multiplies_bf16() -> bool:
    """Whether PyTorch's product of bfloat16 matrices is faster on this CPU than that of float32 ones. Imports torch.

    oneDNN's is, with AVX512-BF16, AMX, or Arm's BF16. With other AVX-512 (Intel's servers from Skylake to Ice Lake) it
    widens what it multiplies, and takes more than twice as long as in float32, padded BERT 1.6 times as long
    (benchmarks/results/2026-11-24_cpu_emulated_avx512). Elsewhere, on most consumers' x86 CPUs and many virtual
    machines, PyTorch takes a plain loop, which is many times slower.
    """
    import torch

    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    told = _x86_multiplies_bf16(_cpu()["flags"])
    if told is None and platform.machine() in ("x86_64", "AMD64"):  # not Linux: PyTorch asks the CPU
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return told is not False


def _x86_multiplies_bf16(flags: Iterable[str]) -> bool | None:
    """Whether an x86 CPU with these of `_FLAGS` has instructions for it; None if there is none that tells."""
    if not {"avx2", "avx512f"}.intersection(flags):
        return None
    return not set(X86_BF16).isdisjoint(flags)


def suite_section() -> str:
    """Which section of a suite is meant for this machine: `cuda`, `cpu`, or `cpu_without_bf16`.

    Answers without importing torch where there is no GPU and Linux tells what an x86 CPU has.
    """
    if hardware() == "cuda":
        return "cuda"
    told = _x86_multiplies_bf16(_cpu()["flags"])
    multiplies = multiplies_bf16() if told is None else told
    return "cpu" if multiplies else "cpu_without_bf16"


def environment() -> dict[str, Any]:
    """All facts about this machine and installation that a number depends on. Imports torch."""
    import torch

    facts: dict[str, Any] = {
        "hardware": hardware(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: v for name in _PACKAGES if (v := version(name)) is not None},
        "cpu": _cpu(),
        "memory_bytes": _memory(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "commit": _commit(),
        "gpus": [],
    }
    if facts["hardware"] == "cuda":
        facts["cuda"] = torch.version.cuda or torch.version.hip
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["driver"] = _driver()
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts["gpus"].append(
                {
                    "name": gpu.name,
                    "capability": f"{gpu.major}.{gpu.minor}",
                    "memory_bytes": gpu.total_memory,
                    "multiprocessors": gpu.multi_processor_count,
                }
            )
    return facts


def _is_folder(variable: str) -> bool:
    return variable.endswith("_DIR")


def identity(facts: dict[str, Any]) -> dict[str, Any]:
    """What of an environment two speeds must have in common to be compared.

    Where a cache lies is no part of it: Inductor sets that variable itself as soon as something imports it.
    """
    found = {key: facts.get(key) for key in _IDENTITY}
    found["ranks"] = found["ranks"] or 1  # older environments tell of none
    if isinstance(found["variables"], dict):
        found["variables"] = {k: v for k, v in found["variables"].items() if not _is_folder(k)}
    return found


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first thing that makes speeds measured in two environments incomparable; empty if there is none.

    >>> same_machine({"python": "3.11.9"}, {"python": "3.12.1"})
    'python 3.11.9 there, 3.12.1 here'
    """
    there, here = identity(one), identity(other)
    for key in _IDENTITY:
        before, now = there[key], here[key]
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            for name in sorted(before.keys() | now.keys()):
                if name == "composer_speedups" or before.get(name) == now.get(name):
                    continue
                return f"{key} {name} {_show(before.get(name))} there, {_show(now.get(name))} here"
            continue
        return f"{key} {_show(before)} there, {_show(now)} here"
    return ""


def resident_memory(*, peak: bool = False) -> int | None:
    """Bytes of memory that this process holds now, or held at most; None where Linux's /proc does not tell."""
    field = "VmHWM:" if peak else "VmRSS:"
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(field)), None)
    except OSError:
        return None


def summary(facts: dict[str, Any]) -> str:
    """One line: what it ran on, and which variables held it back or helped it."""
    versions = facts.get("versions", {})
    software = ", ".join(
        f"{label} {versions[name]}"
        for name, label in (("torch", "torch"), ("mosaicml", "Composer"), ("transformers", "transformers"))
        if name in versions
    )
    gpus = facts.get("gpus") or []
    cpu = facts.get("cpu") or {}
    if gpus:
        first = gpus[0]
        count = f"{len(gpus)} x " if len(gpus) > 1 else ""
        machine = f"{count}{first['name']} ({first['memory_bytes'] / 2**30:.0f} GiB)"
    else:
        memory = facts.get("memory_bytes")
        size = f", {memory / 2**30:.0f} GiB" if memory else ""
        threads = facts.get("threads")
        machine = f"{cpu.get('model', 'CPU')}, {threads} thread{'' if threads == 1 else 's'}{size}, no GPU"
    # Where a cache lies is recorded, but says nothing to a reader of the line.
    shown = {name: v for name, v in (facts.get("variables") or {}).items() if not _is_folder(name)}
    variables = "".join(f"; {name}={value}" for name, value in shown.items())
    return f"{machine}; {software}, Python {facts.get('python')}{variables}"


_peaks: dict[tuple[str, str], float] = {}


def matmul_peak(device: str, precision: str = "fp32", *, seconds: float = 0.4) -> float:
    """FLOP/s of the fastest square matmul tried on `device`, measured now (once a process and precision).

    Model FLOPs over this number is the share of the attainable speed that a run used (MFU): the figure
    of a datasheet is seldom attainable.

    Args:
        device: `cpu` or `cuda`.
        precision: `fp32` (true float32), `tf32`, `bf16` or `fp16`.
        seconds: time spent on each size.
    """
    import torch

    from composer_speedups.compat import read_float32_precision, set_float32_precision, write_float32_precision

    if precision not in ("fp32", "tf32", "bf16", "fp16"):
        raise ValueError(f"precision must be fp32, tf32, bf16 or fp16, got {precision!r}")
    if (device, precision) in _peaks:
        return _peaks[device, precision]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    cuda = torch.device(device).type == "cuda"
    before = read_float32_precision()
    set_float32_precision("high" if precision == "tf32" else "highest", cudnn_tf32=bool(before.cudnn_tf32))
    best = 0.0
    try:
        for size in (4096, 8192) if cuda else (512, 1024, 2048):
            if best and 2 * size**3 / best > 4 * seconds:
                break  # emulated, such as float16 on most CPUs: a larger one would take minutes
            left = torch.randn(size, size, device=device).to(kind)
            right = torch.randn(size, size, device=device).to(kind)
            out = torch.empty_like(left)
            if cuda or size == 512:
                torch.mm(left, right, out=out)  # wakes the library, the threads and the clocks
            flops = 2 * size**3
            end, laps = time.perf_counter() + seconds, 0
            while laps == 0 or (time.perf_counter() < end and laps < 1000):
                # Several matmuls a lap on a GPU, so that waiting for it is a small share.
                count = 20 if cuda else 1
                _wait(cuda)
                start = time.perf_counter()
                for _ in range(count):
                    torch.mm(left, right, out=out)
                _wait(cuda)
                best = max(best, count * flops / (time.perf_counter() - start))
                laps += 1
    finally:
        write_float32_precision(before)
    _peaks[device, precision] = best
    return best


def peaks_at_work(peaks: Mapping[str, float], facts: dict[str, Any]) -> dict[str, float]:
    """`peaks`, of one GPU or of all threads, of all that is at work where there are ranks: a GPU for each; of a CPU
    their shares of the threads, of which each has one at least.

    >>> peaks_at_work({"bf16": 1e15}, {"hardware": "cuda", "ranks": 2})
    {'bf16': 2000000000000000.0}
    """
    ranks, threads = facts.get("ranks", 1), facts.get("threads") or 1
    if facts.get("hardware") == "cuda":
        share = float(ranks)
    else:
        share = ranks * max(1, threads // ranks) / threads if ranks > 1 else 1.0
    return {precision: share * peak for precision, peak in peaks.items()}


def _wait(cuda: bool) -> None:
    if cuda:
        import torch

        torch.cuda.synchronize()


def _cpu() -> dict[str, Any]:
    model, flags, cores = platform.processor() or platform.machine(), [], set()
    try:
        physical = "0"
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = (part.strip() for part in line.partition(":"))
            if key == "model name":
                model = value
            elif key == "physical id":
                physical = value
            elif key == "core id":
                cores.add((physical, value))
            elif key in ("flags", "Features") and not flags:
                present = set(value.split())
                flags = [flag for flag in _FLAGS if flag in present]
    except OSError:
        pass  # not Linux: the model's name is what can be told
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": model,
        "machine": platform.machine(),
        "cores": len(cores) or None,
        "logical": os.cpu_count(),
        "usable": usable,
        "flags": flags,
    }


def _memory() -> int | None:
    """Memory that this process may use: the machine's, or its control group's limit."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = cgroup.memory_limit()
    return total if limit is None else min(total, limit)


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    words = text.split()
    return next((word for word in words if word[:1].isdigit() and "." in word), text)


@cache
def _commit() -> dict[str, Any] | None:
    """The package's git commit and whether its files were changed; None where it is no checkout."""
    package = Path(__file__).resolve().parent
    git = ["git", "-C", str(package)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10, "stdin": subprocess.DEVNULL}
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", "hardware.py"], **options)
        head = subprocess.run([*git, "rev-parse", "HEAD"], **options)
        if tracked.returncode or head.returncode:
            return None  # not in a repository, or in somebody else's
        changed = subprocess.run([*git, "status", "--porcelain", "--", "."], **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"id": head.stdout.strip(), "clean": not changed.stdout.strip()}


def _show(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict) and "name" in value[0]:
        return ", ".join(str(item["name"]) for item in value)
    return "nothing" if value in (None, [], {}) else str(value)
