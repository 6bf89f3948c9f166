/* Dropout on the CPU: mask, scale and product in one pass over memory, without a stored mask.

   Bits come from a counter: word j of a mask is a hash of j and two keys, and serves elements 2j (low half) and
   2j + 1 (high half). fast_dropout.py has the same function in PyTorch operations; the two agree bit for bit. */
#include "native.h"

#define WORDS 256 /* a block: 1 KiB of bits on the stack, two elements a word */
#define BLOCK (2 * WORDS)
#define PARALLEL 16 /* blocks below which waking threads costs more than it saves */

/* y[i] = lane i >= least ? value : 0, for i < n; `value` may use x[i] and scale. */
#define KERNEL(NAME, TYPE, VALUE)                                                                    \
  void NAME(const TYPE *x, TYPE *y, int64_t n, uint32_t k0, uint32_t k1, int16_t least, float scale, \
            int threads) {                                                                           \
    int64_t blocks = (n + BLOCK - 1) / BLOCK;                                                        \
    (void)x, (void)scale, (void)threads;                                                             \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (blocks > PARALLEL)")         \
    for (int64_t b = 0; b < blocks; b++) {                                                           \
      int16_t lanes[BLOCK];                                                                          \
      uint32_t words[WORDS];                                                                         \
      int64_t start = b * BLOCK, count = n - start < BLOCK ? n - start : BLOCK;                      \
      draw(lanes, words, (uint32_t)(start / 2), WORDS, k0, k1);                                      \
      for (int64_t i = 0; i < count; i++) {                                                          \
        int64_t at = start + i;                                                                      \
        TYPE kept = VALUE;                                                                           \
        y[at] = lanes[i] >= least ? kept : (TYPE)0;                                                  \
      }                                                                                              \
    }                                                                                                \
  }

KERNEL(dropout_float32, float, x[at] * scale)
KERNEL(dropout_bfloat16, uint16_t, narrow_uint16_t(widen_uint16_t(x[at]) * scale))
KERNEL(keep_mask, uint8_t, 1)
