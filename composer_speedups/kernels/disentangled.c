/* DeBERTa's products with positions, over packed sequences: taken to where query and key are, and their gradients back.

   For each head and token `of_query` has the products of its query with all positions, and `of_key` those of its key:
   [heads, tokens, columns]. A query i and a key j of one sequence are place[i - j] apart, which is a column; `place`
   points to distance 0. What becomes of them is added to scores: for each sequence [heads, queries, keys filled up to a
   multiple of `fill`], as fused_attention.h has its bias; what fills up is neither written nor read. Sums are float32,
   in an order that depends on lengths alone. `of_key` may be null: then there are none of keys. disentangled.py has the
   same in PyTorch operations. */
#include <stdlib.h>

#include "native.h"

#define BLOCK 16 /* keys whose rows of products, or of their gradients, stay in the L1 cache */
#define WORTHWHILE (1 << 14) /* scores below which waking threads costs more than it saves */

typedef struct {
  const int32_t *place, *lengths;
  int64_t sequences, heads, tokens, columns, fill;
  int32_t threads;
} Shape;

typedef struct {
  int64_t token, first; /* of a sequence: its first token, and where its part of the bias begins */
} Start;

static int64_t filled(const Shape *s, int64_t n) { return (n + s->fill - 1) / s->fill * s->fill; }

/* Where each sequence begins, and how many scores there are in all; null if there is no memory. */
static Start *starts(const Shape *s, int64_t *scores) {
  Start *found = malloc((size_t)(s->sequences + 1) * sizeof *found), next = {0, 0};
  for (int64_t i = 0; found && i < s->sequences; i++) {
    const int64_t n = s->lengths[i];
    found[i] = next;
    next.token += n, next.first += s->heads * n * filled(s, n);
  }
  *scores = next.first;
  return found;
}

/* Of one head of a sequence of n tokens; `bias` has rows of `wide` columns. */
#define SPREAD_HEAD(NAME, TYPE)                                                                                  \
  static void NAME(const Shape *s, int64_t n, int64_t wide, const TYPE *of_query, const TYPE *of_key, float *bias) { \
    for (int64_t i = 0; i < n; i++) {                                                                            \
      const int32_t *place = s->place + i;                                                                       \
      const TYPE *query = of_query + i * s->columns;                                                             \
      for (int64_t j = 0; j < n; j++) bias[i * wide + j] = widen_##TYPE(query[place[-j]]);                       \
    }                                                                                                            \
    for (int64_t from = 0; of_key && from < n; from += BLOCK) {                                                  \
      const int64_t rows = n - from < BLOCK ? n - from : BLOCK;                                                  \
      for (int64_t i = 0; i < n; i++) {                                                                          \
        const int32_t *place = s->place + i - from;                                                              \
        const TYPE *key = of_key + from * s->columns;                                                            \
        float *out = bias + i * wide + from;                                                                     \
        for (int64_t j = 0; j < rows; j++) out[j] += widen_##TYPE(key[j * s->columns + place[-j]]);              \
      }                                                                                                          \
    }                                                                                                            \
  }

/* As that; `sums` is memory for BLOCK rows. */
#define COLLECT_HEAD(NAME, TYPE)                                                                                 \
  static void NAME(const Shape *s, int64_t n, int64_t wide, TYPE *of_query, TYPE *of_key, const TYPE *bias,      \
                   float *sums) {                                                                                \
    const int64_t columns = s->columns;                                                                          \
    for (int64_t i = 0; i < n; i++) {                                                                            \
      const int32_t *place = s->place + i;                                                                       \
      memset(sums, 0, (size_t)columns * sizeof *sums);                                                           \
      for (int64_t j = 0; j < n; j++) sums[place[-j]] += widen_##TYPE(bias[i * wide + j]);                       \
      for (int64_t c = 0; c < columns; c++) of_query[i * columns + c] = narrow_##TYPE(sums[c]);                  \
    }                                                                                                            \
    for (int64_t from = 0; of_key && from < n; from += BLOCK) {                                                  \
      const int64_t rows = n - from < BLOCK ? n - from : BLOCK;                                                  \
      memset(sums, 0, (size_t)(rows * columns) * sizeof *sums);                                                  \
      for (int64_t i = 0; i < n; i++) {                                                                          \
        const int32_t *place = s->place + i - from;                                                              \
        for (int64_t j = 0; j < rows; j++)                                                                       \
          sums[j * columns + place[-j]] += widen_##TYPE(bias[i * wide + from + j]);                              \
      }                                                                                                          \
      for (int64_t c = 0; c < rows * columns; c++) of_key[from * columns + c] = narrow_##TYPE(sums[c]);          \
    }                                                                                                            \
  }

/* `HEAD` for every head of every sequence; 0 if done, 1 if there was no memory. */
#define FOR_ALL(NAME, HEAD, GIVEN, BIAS, ROWS, ...)                                                              \
  int NAME(const Shape *s, GIVEN *of_query, GIVEN *of_key, BIAS *bias) {                                         \
    int64_t scores;                                                                                              \
    Start *start = starts(s, &scores);                                                                           \
    int failed = !start;                                                                                         \
    _Pragma("omp parallel num_threads(s->threads) if (scores > WORTHWHILE) reduction(| : failed)") {             \
      float *sums = malloc((size_t)(ROWS * s->columns + 1) * sizeof *sums);                                      \
      failed |= !sums;                                                                                           \
      _Pragma("omp for schedule(dynamic)") for (int64_t task = 0; task < s->sequences * s->heads; task++) {      \
        const int64_t i = task / s->heads, head = task % s->heads, n = s->lengths[i], wide = filled(s, n);       \
        if (!start || !sums) continue;                                                                           \
        const int64_t row = (head * s->tokens + start[i].token) * s->columns;                                    \
        GIVEN *keys = of_key ? of_key + row : NULL;                                                              \
        HEAD(s, n, wide, of_query + row, keys, bias + start[i].first + head * n * wide __VA_ARGS__);             \
      }                                                                                                          \
      free(sums);                                                                                                \
    }                                                                                                            \
    free(start);                                                                                                 \
    return failed;                                                                                               \
  }

#define KERNELS(NAME, TYPE)                                                                                      \
  SPREAD_HEAD(spread_head_##NAME, TYPE)                                                                          \
  COLLECT_HEAD(collect_head_##NAME, TYPE)                                                                        \
  FOR_ALL(spread_##NAME, spread_head_##NAME, const TYPE, float, 0, )                                       \
  FOR_ALL(collect_##NAME, collect_head_##NAME, TYPE, const TYPE, BLOCK, , sums)

KERNELS(float32, float)
KERNELS(bfloat16, uint16_t)
