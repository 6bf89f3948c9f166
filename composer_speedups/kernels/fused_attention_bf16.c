/* Attention over packed sequences in bfloat16, for CPUs with AVX512-BF16 (fused_attention_bf16.h has all but products).

   Measured on two cores of Zen 4: a tile 228 GFLOP/s a core, more than oneDNN's largest products; softmax with dropout
   0.3 ns and its gradient 0.17 ns an element. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define FORWARD 24  /* query rows of a block: their scores and the tile's keys fit the L1 cache */
#define BACKWARD 96 /* query rows of a block: their scores and gradients fit the L2 cache; a multiple of FORWARD */
#define DEEP 2
#include "fused_attention_bf16.h"

#define ROWS 6    /* of a tile of sums in registers, */
#define COLUMNS 4 /* and its vectors of 16: with 4 vectors of the second factor, 28 of 32 registers */

/* out[rows, 16 columns] (+)= a b. A row of `a` is words, pairs along the summed index, `depth` of them, `step` bytes
   apart and rows `row` bytes; b's vectors are `down` words apart along the summed index and `across` along columns. */
INLINE void tile(const int rows, const int columns, float *out, int64_t stride, const char *a, int64_t row,
                 int64_t step, int64_t depth, const uint32_t *b, int64_t down, int64_t across, int add) {
  __m512 sum[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++)
    sum[r][c] = add ? _mm512_loadu_ps(out + r * stride + c * 16) : _mm512_setzero_ps();
  for (int64_t i = 0; i < depth; i++) {
    __m512i second[COLUMNS];
    UNROLL for (int c = 0; c < columns; c++) second[c] = _mm512_loadu_si512(b + i * down + c * across);
    UNROLL for (int r = 0; r < rows; r++) {
      int32_t pair;
      memcpy(&pair, a + i * step + r * row, sizeof pair);
      __m512i first = _mm512_set1_epi32(pair);
      UNROLL for (int c = 0; c < columns; c++)
        sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)first, (__m512bh)second[c]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++)
    _mm512_storeu_ps(out + r * stride + c * 16, sum[r][c]);
}

/* As `tile`, for any number of rows and of vectors of columns. */
static void tiles(float *out, int64_t stride, int64_t rows, int64_t vectors, const void *a, int64_t row, int64_t step,
                  int64_t depth, const uint32_t *b, int64_t down, int64_t across, int add) {
  for (int64_t c = 0; c < vectors; c += COLUMNS)
    for (int64_t r = 0; r < rows; r += ROWS) {
      int64_t height = rows - r < ROWS ? rows - r : ROWS, wide = vectors - c < COLUMNS ? vectors - c : COLUMNS;
      const char *from = (const char *)a + r * row;
#define CASE(R, C)                                                                                              \
  case R * 8 + C:                                                                                               \
    tile(R, C, out + r * stride + c * 16, stride, from, row, step, depth, b + c * across, down, across, add); \
    break;
#define HEIGHT(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)
      switch (height * 8 + wide) { HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6) }
    }
}

static void product(float *out, int64_t stride, int64_t rows, int64_t vectors, const void *a, int64_t row,
                    int64_t depth, const uint32_t *b, int64_t down, int64_t across, int add) {
  tiles(out, stride, rows, vectors, a, row, 4, depth, b, down, across, add);
}

INLINE const uint16_t *first_factor(uint16_t *own, const uint16_t *x, int64_t stride, int64_t rows, int64_t width,
                                    int64_t *row) {
  (void)own, (void)rows, (void)width;
  *row = stride * 2;
  return x;
}

static void sum_rows(float *out, int64_t wide, int64_t from, int64_t n, const uint32_t *b, const uint32_t *a,
                     uint32_t *own, int64_t rows, int64_t width, int add) {
  (void)own;
  tiles(out + from * width, width, n, width / 16, b, 4, wide * 4, (rows + 1) / 2, a, width, 16, add);
}

static void round_sums(uint16_t *to, int64_t stride, const float *out, int64_t wide, int64_t keys, int64_t width) {
  (void)wide;
  round_rows(to, stride, out, keys, width, 0);
}

INLINE void begin(void) {}
INLINE void end(void) {}

#else /* this CPU is not for it */
int forward(const void *c) { return (void)c, -1; }
int backward(const void *c) { return (void)c, -1; }
#endif
