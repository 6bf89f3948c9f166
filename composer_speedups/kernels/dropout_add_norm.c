/* LayerNorm(dropout(x + x_bias) + residual) over rows of n, forward and backward, each in one pass over memory.

   The dropout mask is that of fast_dropout.c over the whole tensor; backward makes it again, and the sum, too.
   Sums are in float32. dropout_add_norm.py has the same in PyTorch operations. */
#include <stdlib.h>

#include "native.h"

#define PARALLEL 8192 /* elements below which waking threads costs more than it saves */
#define AHEAD 2 /* rows by which reading goes ahead of computing */
#define PER_COLUMN 8 /* bytes of a thread's own memory: a float, half a word and its lanes */

/* z = dropout(x + x_bias) + residual, and its lanes for the mask; element 0 of the row is number `first` of the tensor. */
#define SUM(TYPE)                                                                                            \
  static inline int16_t *sum_##TYPE(float *z, uint32_t *words, const TYPE *x, const float *x_bias,           \
                                    const TYPE *residual, int64_t first, int64_t n, uint32_t k0,             \
                                    uint32_t k1, int32_t least, float scale) {                               \
    int16_t *lanes = (int16_t *)(words + n / 2 + 2);                                                         \
    const int64_t bytes = n * (int64_t)sizeof(TYPE);                                                         \
    fetch(x, AHEAD * bytes, bytes), fetch(residual, AHEAD * bytes, bytes);                                   \
    if (least == INT16_MIN) {                                                                                \
      for (int64_t i = 0; i < n; i++) z[i] = widen_##TYPE(x[i]) + x_bias[i] + widen_##TYPE(residual[i]);     \
      return lanes;                                                                                          \
    }                                                                                                        \
    int64_t odd = first & 1;                                                                                 \
    draw(lanes, words, (uint32_t)(first / 2), (n + odd + 1) / 2, k0, k1);                                    \
    lanes += odd;                                                                                            \
    for (int64_t i = 0; i < n; i++)                                                                          \
      z[i] = (lanes[i] >= least ? (widen_##TYPE(x[i]) + x_bias[i]) * scale : 0.0f)                           \
             + widen_##TYPE(residual[i]);                                                                    \
    return lanes;                                                                                            \
  }

SUM(float)
SUM(uint16_t)

/* y [rows, n]; mean and rstd [rows]. `least` of -32768 drops none. */
#define FORWARD(NAME, TYPE)                                                                                  \
  void NAME(const TYPE *x, const float *x_bias, const TYPE *residual, const float *weight,                   \
            const float *bias, TYPE *y, float *mean, float *rstd, int64_t rows, int64_t n, uint32_t k0,      \
            uint32_t k1, int32_t least, float scale, float eps, int threads) {                               \
    (void)threads;                                                                                           \
    _Pragma("omp parallel num_threads(threads) if (rows * n > PARALLEL)") {                                  \
      float *z = malloc((size_t)n * PER_COLUMN + 64);                                                        \
      _Pragma("omp for schedule(static)") for (int64_t r = 0; r < rows; r++) {                               \
        TYPE *out = y + r * n;                                                                               \
        sum_##TYPE(z, (uint32_t *)(z + n), x + r * n, x_bias, residual + r * n, r * n, n, k0, k1, least,     \
                   scale);                                                                                   \
        float total = 0.0f, left = 0.0f, squares = 0.0f;                                                     \
        _Pragma("omp simd reduction(+ : total)") for (int64_t i = 0; i < n; i++) total += z[i];              \
        float m = total / (float)n;                                                                          \
        _Pragma("omp simd reduction(+ : left, squares)") for (int64_t i = 0; i < n; i++) {                   \
          z[i] -= m;                                                                                         \
          left += z[i];                                                                                      \
          squares += z[i] * z[i];                                                                            \
        }                                                                                                    \
        left /= (float)n;                                                                                    \
        if (left * left * (float)n > squares * 1e-7f) { /* nearly constant: m was rounded by as much */      \
          squares = 0.0f;                                                                                    \
          _Pragma("omp simd reduction(+ : squares)") for (int64_t i = 0; i < n; i++) {                       \
            z[i] -= left;                                                                                    \
            squares += z[i] * z[i];                                                                          \
          }                                                                                                  \
          m += left;                                                                                         \
        }                                                                                                    \
        float s = 1.0f / __builtin_sqrtf(squares / (float)n + eps);                                          \
        for (int64_t i = 0; i < n; i++) out[i] = narrow_##TYPE(z[i] * s * weight[i] + bias[i]);              \
        mean[r] = m;                                                                                         \
        rstd[r] = s;                                                                                         \
      }                                                                                                      \
      free(z);                                                                                               \
    }                                                                                                        \
  }

/* dx (not written if none are dropped: it is dresidual) and dresidual [rows, n]; dweight and dbias [chunks, n], each
   the sum over one chunk of rows, so that the result does not depend on the number of threads; dx_bias likewise, if it
   is asked for. */
#define BACKWARD(NAME, TYPE)                                                                                 \
  void NAME(const TYPE *dy, const TYPE *x, const float *x_bias, const TYPE *residual, const float *weight,   \
            const float *mean, const float *rstd, TYPE *dx, TYPE *dresidual, float *dweight, float *dbias,   \
            float *dx_bias, int64_t rows, int64_t n, int64_t chunks, uint32_t k0, uint32_t k1,               \
            int32_t least, float scale, int threads) {                                                       \
    const int64_t bytes = n * (int64_t)sizeof(TYPE);                                                         \
    (void)threads;                                                                                           \
    _Pragma("omp parallel num_threads(threads) if (rows * n > PARALLEL)") {                                  \
      float *h = malloc((size_t)n * PER_COLUMN + 64);                                                        \
      _Pragma("omp for schedule(static)") for (int64_t c = 0; c < chunks; c++) {                             \
        float *dw = dweight + c * n, *db = dbias + c * n, *dxb = dx_bias ? dx_bias + c * n : NULL;           \
        memset(dw, 0, (size_t)n * sizeof *dw);                                                               \
        memset(db, 0, (size_t)n * sizeof *db);                                                               \
        if (dxb) memset(dxb, 0, (size_t)n * sizeof *dxb);                                                    \
        for (int64_t r = rows * c / chunks; r < rows * (c + 1) / chunks; r++) {                              \
          const TYPE *d = dy + r * n;                                                                        \
          fetch(d, AHEAD * bytes, bytes);                                                                    \
          TYPE *to_x = dx + r * n, *to_residual = dresidual + r * n;                                         \
          const int16_t *lanes = sum_##TYPE(h, (uint32_t *)(h + n), x + r * n, x_bias, residual + r * n,     \
                                            r * n, n, k0, k1, least, scale);                                 \
          float m = mean[r], s = rstd[r], by_variance = 0.0f, by_mean = 0.0f;                                \
          _Pragma("omp simd reduction(+ : by_variance, by_mean)") for (int64_t i = 0; i < n; i++) {          \
            float grown = widen_##TYPE(d[i]) * weight[i];                                                    \
            h[i] = (h[i] - m) * s;                                                                           \
            by_variance += grown * h[i];                                                                     \
            by_mean += grown;                                                                                \
          }                                                                                                  \
          by_variance /= (float)n;                                                                           \
          by_mean /= (float)n;                                                                               \
          _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                              \
            float grown = widen_##TYPE(d[i]);                                                                \
            dw[i] += grown * h[i];                                                                           \
            db[i] += grown;                                                                                  \
            h[i] = (grown * weight[i] - h[i] * by_variance - by_mean) * s;                                   \
            to_residual[i] = narrow_##TYPE(h[i]);                                                            \
          }                                                                                                  \
          if (least != INT16_MIN)                                                                            \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                            \
              h[i] = lanes[i] >= least ? h[i] * scale : 0.0f;                                                \
              to_x[i] = narrow_##TYPE(h[i]);                                                                 \
            }                                                                                                \
          if (dxb)                                                                                           \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) dxb[i] += h[i];                              \
        }                                                                                                    \
      }                                                                                                      \
      free(h);                                                                                               \
    }                                                                                                        \
  }

FORWARD(forward_float32, float)
FORWARD(forward_bfloat16, uint16_t)
BACKWARD(backward_float32, float)
BACKWARD(backward_bfloat16, uint16_t)
