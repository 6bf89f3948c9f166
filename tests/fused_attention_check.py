"""What the tests of attention in C share: inputs, masks by their definition, and libraries with a fault planted."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import torch

from composer_speedups.kernels import native as building
from composer_speedups.kernels.fast_dropout import keep_by_torch, realised
from composer_speedups.kernels.varlen_attention import Lengths, varlen_attention

HEADS, P, SCALE, SEEDS = 3, 0.25, 0.3, (0xDEADBEEF, 0x12345678)
SAME = ([7, 1, 0, 33, 16, 130], [7, 1, 0, 33, 16, 130])
SHAPES = {
    "as many queries as keys": SAME,
    "one query each": ([1, 1, 0, 1], [5, 131, 3, 1]),
    "no keys or no queries": ([3, 200, 0, 0], [0, 31, 4, 0]),
    "one long sequence": ([613], [613]),
    "nothing": ([], []),
}

WINDOWS = {  # keys to each side that a query sees, below and above the blocks of rows that kernels work on
    0: ([40, 1], [40, 1]),
    1: SAME,
    9: ([613, 25, 0, 10], [613, 25, 0, 10]),
    40: ([95, 97, 192, 41, 40], [95, 97, 192, 41, 40]),
    128: ([613, 130], [613, 130]),
}

Lists = tuple[list[int], list[int]]


def inputs(lengths: Lists, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output; k and v are views of one tensor, as a fused projection gives them."""
    queries, keys = (sum(x) for x in lengths)
    k, v = torch.randn(keys, 2, HEADS, width).to(dtype).unbind(1)
    q, gradient = torch.randn(2, queries, HEADS, width).to(dtype)
    return [q, k, v, gradient]


def masks(lengths: Lists, p: float) -> list[torch.Tensor]:
    """For each sequence [heads, queries, keys]: False where dropped, by the definition of the mask."""
    out, word = [], 0
    for n, m in zip(*lengths, strict=True):
        size = HEADS * n * m
        own = ((SEEDS[0] + word * 0x9E3779B9) % 2**32, SEEDS[1])
        keep = keep_by_torch(size, own, round(realised(p) * 65536)) if p else torch.ones(size, dtype=torch.bool)
        out.append(keep.view(HEADS, n, m))
        word += (size + 1) // 2
    return out


def seen(scores: torch.Tensor, window: int) -> torch.Tensor:
    """Scores, minus infinity for keys further away than `window`."""
    places = torch.arange(scores.shape[-1])
    return scores.masked_fill((places[:, None] - places).abs() > window, -math.inf)


_OWN_MEMORY = "failed |= !memory;"


def planted(folder: Path, name: str, old: str = "", new: str = "") -> None:
    """Write `mutant.c`: the kernel `name` with a fault, and NaN in all memory of its own before it is written."""
    home = Path(building.__file__).parent
    source = (home / f"{name}.c").read_text()
    for header in home.glob("*.h"):  # a fault may be planted in what the kernels share, too
        text = header.read_text()
        if old and not source.count(old) and text.count(old) == 1:
            text, old, new = text.replace(old, new), "", ""
        text = text.replace(_OWN_MEMORY, f"{_OWN_MEMORY} if (memory) memset(memory, 0xFF, (size_t)most);")
        (folder / header.name).write_text(text)
    assert not old or source.count(old) == 1, f"{old!r} is {source.count(old)} times in the kernel"
    (folder / "mutant.c").write_text(source.replace(old, new) if old else source)


def compiled(folder: Path, name: str, old: str = "", new: str = "", flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of the kernel `name`, with a fault planted."""
    planted(folder, name, old, new)
    quick = ["-O1" if flag == "-O3" else flag for flag in building._FLAGS]
    command = [shutil.which("cc") or "gcc", *quick, *flags, "-shared", "mutant.c", "-o", "mutant.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "mutant.so"))
    library.threaded = True  # as far as anybody asks
    return library


def run_with_guards(
    folder: Path, name: str, fault: tuple[str, str], element: str, fill: int, *flags: str, apart: bool = False
) -> str:
    """What the sanitizers say of both functions on arrays that end where a page begins that nobody may touch.

    "" where this compiler has no sanitizer, "done" if they found nothing. With `apart` each part of a task's own memory
    ends at such a page, too: sanitizers see neither what lies between parts of one array nor what tile instructions do.
    """
    compiler, checks = shutil.which("cc") or "gcc", ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    planted(folder, name, *fault)
    if apart:
        header = folder / "fused_attention.h"
        text = header.read_text()
        assert text.count(_TAKEN) == 1
        header.write_text(text.replace(_TAKEN, "extern char *apart(int64_t); char *here = apart(bytes);"))
    (folder / "harness.c").write_text(_HARNESS.replace("NUMBERS", element).replace("FILLED", str(fill)))
    build = [flag for flag in building._FLAGS if flag != "-O3"]
    command = [compiler, *build, *flags, "-g", *checks, "harness.c", "-o", "harness"]
    if subprocess.run(command, cwd=folder, capture_output=True).returncode:
        (folder / "empty.c").write_text("int main(void) { return 0; }")
        assert subprocess.run([compiler, *checks, "empty.c"], cwd=folder, capture_output=True).returncode, command
        return ""
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([folder / "harness"], capture_output=True, text=True, env=environment)
    assert done.returncode or done.stdout == "done\n", done
    return done.stdout.strip() or done.stderr


_TAKEN = "char *here = *memory;"
# The sanitizer does not see masked loads: hence the pages.
_HARNESS = """
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/mman.h>
#include "mutant.c"
static char *ending_at_a_page(int64_t bytes) {
  int64_t pages = (bytes + 4095) / 4096 * 4096;
  char *start = mmap(0, (size_t)pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mprotect(start + pages, 4096, PROT_NONE)) exit(4);
  return start + pages - bytes;
}
char *apart(int64_t bytes) { return memset(ending_at_a_page(up(bytes, 64)), 0xFF, (size_t)up(bytes, 64)); }
static NUMBER *numbers(int64_t n) {
  NUMBER *x = (NUMBER *)ending_at_a_page(n * (int64_t)sizeof(NUMBER));
  for (int64_t i = 0; i < n; i++) x[i] = NUMBERS;
  return x;
}
int main(void) {
  static const int32_t all[][4] = {{7, 7, 16, -1},    {1, 131, 32, -1},  {131, 1, 48, -1},
                                   {0, 5, 64, -1},    {5, 0, 16, -1},    {100, 33, 80, -1},
                                   {97, 64, 128, -1}, {131, 131, 48, 40}, {97, 97, 16, 3}};
  for (int i = 0; i < 9; i++) {
    /* a short sequence before it: memory must do for the longest */
    int32_t *queries = malloc(8), *keys = malloc(8);
    queries[0] = 3, keys[0] = all[i][3] < 0 ? 2 : 3, queries[1] = all[i][0], keys[1] = all[i][1];
    int64_t d = all[i][2], heads = 2, q = (queries[1] + 3) * heads * d, k = (keys[1] + keys[0]) * heads * d;
    int64_t wide = (keys[1] + FILLED - 1) / FILLED * FILLED, kept = queries[1] * wide + 3 * FILLED;
    Call c = {.q = numbers(q), .k = numbers(k), .v = numbers(k), .gradient = numbers(q), .out = numbers(q),
              .dq = numbers(q), .dk = numbers(k), .dv = numbers(k), .queries = queries, .keys = keys, .sequences = 2,
              .heads = heads, .width = d, .k0 = 1, .k1 = 2, .least = -30000, .threads = 1, .scale = 0.1f, .keep = 1.1f,
              .window = all[i][3],
              .probabilities = aligned_alloc(64, (size_t)(heads * kept) * sizeof(NUMBER)),
              .inverse = malloc((size_t)(heads * (queries[1] + 3)) * 4)};
    if (c.window < 0) {
      float *bias = (float *)ending_at_a_page(heads * kept * 4);
      for (int64_t j = 0; j < heads * kept; j++) bias[j] = 1.0f;
      c.bias = bias, c.dbias = numbers(heads * kept);
    }
    c.q_token = c.k_token = c.v_token = c.g_token = c.dq_token = c.dk_token = c.dv_token = heads * d;
    c.q_head = c.k_head = c.v_head = c.g_head = d;
    if (forward(&c) || backward(&c)) return 3;
  }
  puts("done");
  return 0;
}
"""


def check_far_scores(dtype: torch.dtype, allowed: float = 0.0) -> None:
    """exp would overflow, or all of it vanish, without the row's own largest score taken off.

    `allowed`: how far from its limit a result may be, where what is left of exp is not nothing.
    """
    q = torch.full((5, 1, 16), 1e4, dtype=dtype)
    v = torch.arange(5.0)[:, None, None].expand(5, 1, 16).to(dtype)
    for low, high in ((-1, 1), (-3, -1), (1, 3)):
        k = torch.linspace(low, high, 5)[:, None, None].expand(5, 1, 16).to(dtype)
        for sign, row in ((1, 4.0), (-1, 0.0)):
            out = varlen_attention(q, k, v, Lengths.of([5]), Lengths.of([5]), scale=sign * 0.25)
            assert ((out - row).abs() <= allowed).all(), f"far from zero: {out[0, 0, 0]} for {row}"


def odd_address(x: torch.Tensor) -> torch.Tensor:
    """At an address that is no multiple of a vector's size, with gaps between tokens and heads."""
    total, heads, width = x.shape
    step = width + 3
    memory = torch.full((total * (heads * step + 5) + 1,), math.nan, dtype=x.dtype)
    return memory[1:].as_strided(x.shape, (heads * step + 5, step, 1)).copy_(x)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def backwards(x: torch.Tensor) -> torch.Tensor:
    """The last dimension has a stride of its own."""
    return x.transpose(0, 2).contiguous().transpose(0, 2)
