/* Dropout on the CPU: mask, scale and product in one pass over memory, without a stored mask.

   Bits come from a counter: word j of a mask is a hash of j and two keys, and serves elements 2j (low half) and
   2j + 1 (high half). fast_dropout.py has the same function in PyTorch operations; the two agree bit for bit. */
#include <stdint.h>
#include <string.h>

#define WORDS 256 /* a block: 1 KiB of bits on the stack, two elements a word */
#define BLOCK (2 * WORDS)
#define PARALLEL 16 /* blocks below which waking threads costs more than it saves */

static inline void draw(int16_t *lanes, uint32_t first, uint32_t k0, uint32_t k1) {
  uint32_t words[WORDS];
  for (uint32_t j = 0; j < WORDS; j++) {
    uint32_t h = (first + j) * 0x9E3779B9u + k0; /* odd: no two words of a mask start alike */
    h ^= h >> 16 ^ k1; /* by xor, not by sum: masks with other keys are no shifts of this one */
    h *= 0x7FEB352Du;  /* multipliers and shifts: Chris Wellons' lowbias32 */
    h ^= h >> 15;
    h *= 0x846CA68Bu;
    h ^= h >> 16;
    words[j] = h;
  }
  memcpy(lanes, words, sizeof words);
}

static inline float widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline uint16_t narrow(float f) { /* to nearest, ties to even; a NaN of bfloat16 stays one */
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

/* y[i] = lane i >= least ? value : 0, for i < n; `value` may use x[i] and scale. */
#define KERNEL(NAME, TYPE, VALUE)                                                                    \
  void NAME(const TYPE *x, TYPE *y, int64_t n, uint32_t k0, uint32_t k1, int16_t least, float scale, \
            int threads) {                                                                           \
    int64_t blocks = (n + BLOCK - 1) / BLOCK;                                                        \
    (void)x, (void)scale, (void)threads;                                                             \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (blocks > PARALLEL)")         \
    for (int64_t b = 0; b < blocks; b++) {                                                           \
      int16_t lanes[BLOCK];                                                                          \
      int64_t start = b * BLOCK, count = n - start < BLOCK ? n - start : BLOCK;                      \
      draw(lanes, (uint32_t)(start / 2), k0, k1);                                                    \
      for (int64_t i = 0; i < count; i++) {                                                          \
        int64_t at = start + i;                                                                      \
        TYPE kept = VALUE;                                                                           \
        y[at] = lanes[i] >= least ? kept : (TYPE)0;                                                  \
      }                                                                                              \
    }                                                                                                \
  }

KERNEL(dropout_float32, float, x[at] * scale)
KERNEL(dropout_bfloat16, uint16_t, narrow(widen(x[at]) * scale))
KERNEL(keep_mask, uint8_t, 1)
