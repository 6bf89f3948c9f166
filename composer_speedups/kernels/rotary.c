/* Rotary positions on the CPU: numbers i and i + width / 2 of a head are turned by one angle, in one pass over memory.

   x [tokens, heads, width] with strides, counted in elements; cosines and sines [tokens, width]; the result without
   gaps. Turned in float32 and rounded once. `back` is the gradient: the other way round. rotary.py has the same in
   PyTorch operations; the two agree bit for bit. */
#include "native.h"

#define PARALLEL (1 << 15) /* numbers below which waking threads costs more than it saves */

#define ROTATE(NAME, TYPE)                                                                                   \
  void NAME(const TYPE *x, int64_t token, int64_t head, const float *cosine, const float *sine, TYPE *out,   \
            int64_t tokens, int64_t heads, int64_t width, int back, int threads) {                           \
    const int64_t half = width / 2;                                                                          \
    (void)threads;                                                                                           \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (tokens * heads * width > PARALLEL)") \
    for (int64_t t = 0; t < tokens; t++)                                                                     \
      for (int64_t h = 0; h < heads; h++) {                                                                  \
        const TYPE *restrict a = x + t * token + h * head, *restrict b = a + half;                           \
        const float *restrict c = cosine + t * width, *restrict s = sine + t * width;                        \
        TYPE *restrict y = out + (t * heads + h) * width, *restrict z = y + half;                            \
        if (back)                                                                                            \
          for (int64_t i = 0; i < half; i++) {                                                               \
            float p = widen_##TYPE(a[i]), q = widen_##TYPE(b[i]);                                            \
            y[i] = narrow_##TYPE(p * c[i] + q * s[half + i]);                                                \
            z[i] = narrow_##TYPE(q * c[half + i] - p * s[i]);                                                \
          }                                                                                                  \
        else                                                                                                 \
          for (int64_t i = 0; i < half; i++) {                                                               \
            float p = widen_##TYPE(a[i]), q = widen_##TYPE(b[i]);                                            \
            y[i] = narrow_##TYPE(p * c[i] - q * s[i]);                                                       \
            z[i] = narrow_##TYPE(q * c[half + i] + p * s[half + i]);                                         \
          }                                                                                                  \
      }                                                                                                      \
  }

ROTATE(rotate_float32, float)
ROTATE(rotate_bfloat16, uint16_t)
