/* Softmax with dropout between the two matrix products of attention, forward and backward, each in one pass.

   Scores are rows x n, of one sequence with all its heads; what is not to be seen is minus infinity. The dropout mask is
   that of fast_dropout.c: element i takes one half of a hash of i / 2 and two keys. A dropped probability is stored with
   its sign bit set, so that backward needs no mask. per_sequence.py has the same in PyTorch operations. */
#include <stdlib.h>

#include "native.h"

/* 0x80000000 where the element is dropped, for n elements from number `first` on; `least` of -32768 drops none. */
static inline void signs(uint32_t *sign, uint32_t *words, int16_t *lanes, int64_t first, int64_t n, uint32_t k0,
                         uint32_t k1, int32_t least) {
  int64_t odd = first & 1;
  draw(lanes, words, (uint32_t)(first / 2), (n + odd + 1) / 2, k0, k1);
  for (int64_t i = 0; i < n; i++) sign[i] = lanes[i + odd] < least ? 0x80000000u : 0u;
}

static inline float with_sign(float x, uint32_t sign) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits |= sign;
  memcpy(&x, &bits, sizeof bits);
  return x;
}

/* scores -> signed probabilities, in place; kept: probabilities after dropout, times `keep`. */
#define FORWARD(NAME, TYPE)                                                                                 \
  void NAME(TYPE *scores, TYPE *kept, int64_t rows, int64_t n, uint32_t k0, uint32_t k1, int32_t least,     \
            float scale, float keep, int threads) {                                                         \
    (void)threads;                                                                                          \
    _Pragma("omp parallel num_threads(threads) if (rows * n > 8192)") {                                     \
      float *e = malloc((size_t)n * 16 + 64);                                                               \
      uint32_t *sign = (uint32_t *)(e + n), *words = sign + n;                                              \
      int16_t *lanes = (int16_t *)(words + n / 2 + 2);                                                      \
      _Pragma("omp for schedule(static)") for (int64_t r = 0; r < rows; r++) {                              \
        TYPE *s = scores + r * n, *d = kept + r * n;                                                        \
        float top = -__builtin_inff(), sum = 0.0f;                                                          \
        for (int64_t i = 0; i < n; i++) e[i] = widen_##TYPE(s[i]) * scale;                                  \
        _Pragma("omp simd reduction(max : top)") for (int64_t i = 0; i < n; i++) top = e[i] > top ? e[i] : top; \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++) {                            \
          e[i] = e[i] < top - 87.0f ? 0.0f : power_of_e(e[i] - top);                                        \
          sum += e[i];                                                                                      \
        }                                                                                                   \
        float inverse = 1.0f / sum;                                                                         \
        signs(sign, words, lanes, r * n, n, k0, k1, least);                                                 \
        for (int64_t i = 0; i < n; i++) {                                                                   \
          float p = e[i] * inverse;                                                                         \
          s[i] = narrow_##TYPE(with_sign(p, sign[i]));                                                      \
          d[i] = narrow_##TYPE(sign[i] ? 0.0f : p * keep);                                                  \
        }                                                                                                   \
      }                                                                                                     \
      free(e);                                                                                              \
    }                                                                                                       \
  }

/* gradient of `kept` -> gradient of the scores, in place; kept: as in forward, from the signed probabilities. */
#define BACKWARD(NAME, TYPE)                                                                                \
  void NAME(TYPE *gradient, const TYPE *signed_p, TYPE *kept, int64_t rows, int64_t n, float scale,         \
            float keep, int threads) {                                                                      \
    (void)threads;                                                                                          \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (rows * n > 8192)")                  \
    for (int64_t r = 0; r < rows; r++) {                                                                    \
      TYPE *g = gradient + r * n, *d = kept + r * n;                                                        \
      const TYPE *p = signed_p + r * n;                                                                     \
      float dot = 0.0f;                                                                                     \
      _Pragma("omp simd reduction(+ : dot)") for (int64_t i = 0; i < n; i++) {                              \
        float x = widen_##TYPE(p[i]);                                                                       \
        float k = x > 0.0f ? x * keep : 0.0f;                                                               \
        d[i] = narrow_##TYPE(k);                                                                            \
        dot += k * widen_##TYPE(g[i]);                                                                      \
      }                                                                                                     \
      for (int64_t i = 0; i < n; i++) {                                                                     \
        float x = widen_##TYPE(p[i]), a = x > 0.0f ? x : -x;                                                \
        float through = x > 0.0f ? widen_##TYPE(g[i]) * keep : 0.0f;                                        \
        g[i] = narrow_##TYPE(a * (through - dot) * scale);                                                  \
      }                                                                                                     \
    }                                                                                                       \
  }

FORWARD(forward_float32, float)
FORWARD(forward_bfloat16, uint16_t)
BACKWARD(backward_float32, float)
BACKWARD(backward_bfloat16, uint16_t)
