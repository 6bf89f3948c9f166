/* GELU(x + bias) with the error function over rows of n, forward and backward, each in one pass over memory.

   Everything is in float32. bias_gelu.py says what is computed. */
#include "native.h"

#define PARALLEL 8192 /* elements below which waking threads costs more than it saves */

#if defined(__FMA__) || defined(__FP_FAST_FMAF)
#define TIMES_PLUS(a, b, c) __builtin_fmaf(a, b, c)
#else /* a call of a function that computes it bit by bit */
#define TIMES_PLUS(a, b, c) ((a) * (b) + (c))
#endif

static inline float power_of_two(float x) { /* x <= 0; relative error below 1e-7, and 0 below 2^-126 */
  float some = x < -126.0f ? -126.0f : x;
  float whole = (some + 12582912.0f) - 12582912.0f; /* to the nearest integer: 1.5 * 2^23 */
  float f = some - whole, y = 1.53458110e-4f;
  y = TIMES_PLUS(y, f, 1.33999309e-3f);
  y = TIMES_PLUS(y, f, 9.61848907e-3f);
  y = TIMES_PLUS(y, f, 5.55032864e-2f);
  y = TIMES_PLUS(y, f, 2.40226462e-1f);
  y = TIMES_PLUS(y, f, 6.93147182e-1f);
  y = TIMES_PLUS(y, f, 1.0f);
  uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return x < -126.0f ? 0.0f : y * power;
}

/* Of the standard normal distribution P(X <= h); and exp(-h^2 / 2). */
static inline float below(float h, float *density) {
  float t = 1.0f / TIMES_PLUS(0.231641888f, __builtin_fabsf(h), 1.0f); /* 0.3275911 / sqrt(2) */
  float tail = 0.5307027145f;
  tail = TIMES_PLUS(tail, t, -0.7265760135f);
  tail = TIMES_PLUS(tail, t, 0.7107068705f);
  tail = TIMES_PLUS(tail, t, -0.142248368f);
  tail = TIMES_PLUS(tail, t, 0.127414796f);
  *density = power_of_two(h * h * -0.7213475204f); /* log2(e) / 2 */
  tail = tail * t * *density;
  return h < 0.0f ? tail : 1.0f - tail;
}

/* y [rows, n] */
#define FORWARD(NAME, TYPE)                                                                                  \
  void NAME(const TYPE *x, const float *bias, TYPE *y, int64_t rows, int64_t n, int threads) {               \
    const int64_t bytes = n * (int64_t)sizeof(TYPE);                                                         \
    (void)threads;                                                                                           \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (rows * n > PARALLEL)")               \
    for (int64_t r = 0; r < rows; r++) {                                                                     \
      const TYPE *in = x + r * n;                                                                            \
      TYPE *out = y + r * n;                                                                                 \
      fetch(in, bytes, bytes);                                                                               \
      _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                  \
        float density, h = widen_##TYPE(in[i]) + bias[i];                                                    \
        out[i] = narrow_##TYPE(h * below(h, &density));                                                      \
      }                                                                                                      \
    }                                                                                                        \
  }

/* dx [rows, n]; dbias [chunks, n], each the sum over one chunk of rows, so that the result does not depend on the number
   of threads. */
#define BACKWARD(NAME, TYPE)                                                                                 \
  void NAME(const TYPE *dy, const TYPE *x, const float *bias, TYPE *dx, float *dbias, int64_t rows,          \
            int64_t n, int64_t chunks, int threads) {                                                        \
    const int64_t bytes = n * (int64_t)sizeof(TYPE);                                                         \
    (void)threads;                                                                                           \
    _Pragma("omp parallel for schedule(static) num_threads(threads) if (rows * n > PARALLEL)")               \
    for (int64_t c = 0; c < chunks; c++) {                                                                   \
      float *db = dbias + c * n;                                                                             \
      memset(db, 0, (size_t)n * sizeof *db);                                                                 \
      for (int64_t r = rows * c / chunks; r < rows * (c + 1) / chunks; r++) {                                \
        const TYPE *d = dy + r * n, *in = x + r * n;                                                         \
        TYPE *out = dx + r * n;                                                                              \
        fetch(in, bytes, bytes), fetch(d, bytes, bytes);                                                     \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                \
          float density, h = bias[i] + widen_##TYPE(in[i]);                                                  \
          float slope = below(h, &density);                                                                  \
          slope = TIMES_PLUS(0.3989422804f * h, density, slope); /* 1 / sqrt(2 pi) */                        \
          float g = widen_##TYPE(d[i]) * slope;                                                              \
          db[i] += g;                                                                                        \
          out[i] = narrow_##TYPE(g);                                                                         \
        }                                                                                                    \
      }                                                                                                      \
    }                                                                                                        \
  }

FORWARD(forward_float32, float)
FORWARD(forward_bfloat16, uint16_t)
BACKWARD(backward_float32, float)
BACKWARD(backward_bfloat16, uint16_t)
