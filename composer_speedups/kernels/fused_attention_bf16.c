/* Attention over packed sequences in bfloat16, for CPUs with AVX512-BF16 (fused_attention.h says what is asked).

   Keys and values are packed once a task for `vdpbf16ps`, which multiplies pairs of bfloat16 and sums in float32; then
   come blocks of query rows, whose scores stay in the cache, in float32. What forward leaves for backward is
   exp(score - the row's largest), in bfloat16, and for each row the inverse of their sum.

   Measured on two cores of Zen 4: a tile 228 GFLOP/s a core, more than oneDNN's largest products; softmax with dropout
   0.3 ns and its gradient 0.17 ns an element. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "native.h"

#define NUMBER uint16_t
#define FILL 32
#define FORWARD 24  /* query rows of a block: their scores and the tile's keys fit the L1 cache */
#define BACKWARD 96 /* query rows of a block: their scores and gradients fit the L2 cache; a multiple of FORWARD */
#include "fused_attention.h"
#include <immintrin.h>

#define ROWS 6    /* of a tile of sums in registers, */
#define COLUMNS 4 /* and its vectors of 16: with 4 vectors of the second factor, 28 of 32 registers */

INLINE __mmask16 below(int64_t n) { return n >= 16 ? 0xFFFF : n > 0 ? (__mmask16)((1u << n) - 1) : 0; }
INLINE __mmask16 between(int64_t from, int64_t to) { return below(to) & (__mmask16)~below(from); }

/* Words of sixteen columns: `a` in their low halves, `b` in the high ones; the columns from 16 on, if `upper`. */
INLINE __m512i pairs(__m512i a, __m512i b, const int upper) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i index = upper ? _mm512_add_epi16(low, _mm512_set1_epi16(16)) : low;
  return _mm512_permutex2var_epi16(a, index, b);
}

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m512 widen_low(__m512i x) { return widen(_mm512_castsi512_si256(x)); }
INLINE __m512 widen_high(__m512i x) { return widen(_mm512_extracti64x4_epi64(x, 1)); }
INLINE __m512i narrow(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

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
static void product(float *out, int64_t stride, int64_t rows, int64_t vectors, const void *a, int64_t row,
                    int64_t step, int64_t depth, const uint32_t *b, int64_t down, int64_t across, int add) {
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

/* x [rows, width] -> [rows / 16, width / 2, 16] words, pairs along the width; rows that are not there are zero. */
static void pack_across(uint32_t *to, const uint16_t *x, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r += 16)
    for (int64_t c = 0; c < width; c += 32) {
      __mmask16 some = below((width - c) / 2);
      __m512i a[16], b[16];
      UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_setzero_si512();
      for (int i = 0; i < 16 && r + i < rows; i++) a[i] = _mm512_maskz_loadu_epi32(some, x + (r + i) * stride + c);
      UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
      }
      UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
        a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
      }
      /* a[4 g + j] has word 4 l + j of the rows 4 g to 4 g + 3 in its quarter l */
      UNROLL for (int j = 0; j < 4; j++) {
        __m512i low = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x44), high = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xEE);
        __m512i low2 = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x44);
        __m512i high2 = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xEE);
        b[j] = _mm512_shuffle_i32x4(low, low2, 0x88), b[j + 4] = _mm512_shuffle_i32x4(low, low2, 0xDD);
        b[j + 8] = _mm512_shuffle_i32x4(high, high2, 0x88), b[j + 12] = _mm512_shuffle_i32x4(high, high2, 0xDD);
      }
      uint32_t *panel = to + (r / 16 * (width / 2) + c / 2) * 16;
      for (int i = 0; i < 16 && c + 2 * i < width; i++) _mm512_storeu_si512(panel + i * 16, b[i]);
    }
}

/* x [rows, width] -> [rows / 2, width] words, pairs along the rows; an odd last row is paired with zeros. Each row is
   multiplied by its factor, if there are any, and rounded. */
INLINE void pack_down(uint32_t *to, const uint16_t *x, int64_t stride, int64_t rows, int64_t width,
                      const float *factor) {
  for (int64_t r = 0; r < rows; r += 2, to += width)
    for (int64_t c = 0; c < width; c += 16) {
      __m256i row[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
      for (int i = 0; i < 2 && r + i < rows; i++) {
        row[i] = _mm256_loadu_si256((const void *)(x + (r + i) * stride + c));
        if (factor) row[i] = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(widen(row[i]), _mm512_set1_ps(factor[r + i])));
      }
      _mm512_storeu_si512(to + c, pairs(_mm512_castsi256_si512(row[0]), _mm512_castsi256_si512(row[1]), 0));
    }
}

/* x [rows, width] -> bfloat16, each row times its factor, if there are any. */
INLINE void round_rows(uint16_t *to, int64_t stride, const float *x, int64_t rows, int64_t width, const float *factor) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < width; c += 16) {
      __m512 y = _mm512_loadu_ps(x + r * width + c);
      if (factor) y = _mm512_mul_ps(y, _mm512_set1_ps(factor[r]));
      _mm256_storeu_si256((void *)(to + r * stride + c), (__m256i)_mm512_cvtneps_pbh(y));
    }
}

/* `word` of native.h for sixteen numbers, each times 0x9E3779B9 already; a bit for each half, 1 where it is dropped. */
INLINE __mmask32 drawn(__m512i number, __m512i k0, __m512i k1, __m512i least) {
  __m512i h = _mm512_add_epi32(number, k0);
  h = _mm512_xor_si512(h, _mm512_xor_si512(_mm512_srli_epi32(h, 16), k1));
  h = _mm512_mullo_epi32(h, _mm512_set1_epi32(0x7FEB352D));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
  h = _mm512_mullo_epi32(h, _mm512_set1_epi32((int)0x846CA68Bu));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
  return _mm512_cmplt_epi16_mask(h, least);
}

/* 2^x to a relative 3e-7: x is cut at its floor, for what is left a polynomial of least largest error. */
INLINE __m512 power_of_two(__m512 x) {
  __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(0.00187757669f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.00898934063f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0558263175f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.240153611f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.693153083f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.99999994f));
  return _mm512_scalef_ps(y, x);
}

/* One row of n scores, those before `hidden` not to be seen, and the first of them element `first` of the mask -> exp,
   signed, to `signed_p` (or null), and where kept to `kept`, both with zeros up to a multiple of 32 from n on, for as
   far as `end`; returns the inverse of the sum. */
INLINE float softmax(const float *s, int64_t hidden, int64_t n, int64_t end, float scale, const int dropout,
                     int64_t first, uint32_t k0, uint32_t k1, int32_t least, uint16_t *signed_p, uint16_t *kept) {
  /* Differences to the largest come before factors: the largest gives 2^0 whatever its size. */
  const __m512 factor = _mm512_set1_ps((scale < 0.0f ? -scale : scale) * 1.44269504f);
  const __m512 one = _mm512_set1_ps(scale < 0.0f ? -1.0f : 1.0f);
  const __m512i keys[2] = {_mm512_set1_epi32((int)k0), _mm512_set1_epi32((int)k1)};
  const __m512i threshold = _mm512_set1_epi16((short)least), sign = _mm512_set1_epi16((short)0x8000);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i next = _mm512_set1_epi32((int)(16 * 0x9E3779B9u));
  __m512i number = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(uint32_t)(first / 2)));
  number = _mm512_mullo_epi32(number, _mm512_set1_epi32((int)0x9E3779B9u));
  uint64_t bits = dropout ? drawn(number, keys[0], keys[1], threshold) : 0;
  __m512 top = _mm512_set1_ps(-__builtin_inff()), low = _mm512_setzero_ps(), high = low;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 some = n - i < 16 || hidden > i ? between(hidden - i, n - i) : 0xFFFF;
    top = _mm512_mask_max_ps(top, some, top, _mm512_mul_ps(_mm512_loadu_ps(s + i), one));
  }
  top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
  for (int64_t i = 0; i < end; i += 32) {
    __m512 a = power_of_two(_mm512_mul_ps(_mm512_fmsub_ps(_mm512_loadu_ps(s + i), one, top), factor));
    __m512 b = power_of_two(_mm512_mul_ps(_mm512_fmsub_ps(_mm512_loadu_ps(s + i + 16), one, top), factor));
    if (n - i < 32 || hidden > i) {
      a = _mm512_maskz_mov_ps(between(hidden - i, n - i), a);
      b = _mm512_maskz_mov_ps(between(hidden - i - 16, n - i - 16), b);
    }
    low = _mm512_add_ps(low, a), high = _mm512_add_ps(high, b);
    __m512i p = narrow(a, b), left = p;
    if (dropout) {
      number = _mm512_add_epi32(number, next);
      bits |= (uint64_t)drawn(number, keys[0], keys[1], threshold) << 32;
      __mmask32 gone = (__mmask32)(bits >> (first & 1));
      bits >>= 32;
      left = _mm512_maskz_mov_epi16(~gone, p);
      p = _mm512_mask_add_epi16(p, gone, p, sign);
    }
    _mm512_store_si512(kept + i, left);
    if (signed_p) _mm512_store_si512(signed_p + i, p);
  }
  return 1.0f / _mm512_reduce_add_ps(_mm512_add_ps(low, high));
}

static void forward_task(const Call *c, const Span *s, int64_t head, char *memory) {
  const int64_t n = s->keys, wide = up(n, 32), d = c->width;
  uint32_t *k = take(&memory, up(n, 16) * d * 2), *v = take(&memory, (n + 1) / 2 * d * 4);
  float *scores = take(&memory, FORWARD * wide * 4), *sums = take(&memory, FORWARD * d * 4), factor[FORWARD];
  uint16_t *kept = take(&memory, FORWARD * wide * 2);
  pack_across(k, c->k + s->key * c->k_token + head * c->k_head, c->k_token, n, d);
  if (c->out) pack_down(v, c->v + s->key * c->v_token + head * c->v_head, c->v_token, n, d, 0);
  for (int64_t i = 0; i < s->queries; i += FORWARD) {
    int64_t rows = s->queries - i < FORWARD ? s->queries - i : FORWARD;
    const Range range = seen_by(c, s, i, rows);
    const int64_t m = range.to - range.from, end = up(m, 32);
    const uint16_t *q = c->q + (s->query + i) * c->q_token + head * c->q_head;
    product(scores, wide, rows, up(m, 16) / 16, q, c->q_token * 2, 4, d / 2, k + range.from / 16 * d * 8, 16, d * 8, 0);
    for (int64_t r = 0; r < rows; r++) {
      int64_t row = head * s->queries + i + r;
      const Range own = seen(c, s, i + r);
      const int64_t hidden = own.from - range.from, left = own.to - range.from;
      const float *x = scores + r * wide;
      uint16_t *signed_p = c->probabilities ? c->probabilities + s->first + row * wide + range.from : 0;
      uint16_t *to = kept + r * wide;
      float inverse = c->least == -32768
                          ? softmax(x, hidden, left, end, c->scale, 0, 0, 0, 0, 0, signed_p, to)
                          : softmax(x, hidden, left, end, c->scale, 1, row * n + range.from, s->k0, c->k1, c->least,
                                    signed_p, to);
      if (signed_p) clear_around(c, s, i, range, signed_p);
      if (c->inverse) c->inverse[s->row + row] = inverse;
      factor[r] = inverse * c->keep;
    }
    if (!c->out) continue;
    product(sums, d, rows, d / 16, kept, wide * 2, 4, (m + 1) / 2, v + range.from / 2 * d, d, 16, 0);
    round_rows(c->out + ((s->query + i) * c->heads + head) * d, c->heads * d, sums, rows, d, factor);
  }
}

static int64_t forward_memory(const Call *c, int64_t queries, int64_t keys) {
  int64_t wide = up(keys, 32), d = c->width;
  (void)queries;
  return wide * d * 2 + (keys + 1) / 2 * d * 4 + FORWARD * (wide * 6 + d * 4) + 5 * 64;
}

/* The row's sum of kept exp times the gradient of kept probabilities. */
INLINE float dot_of(const uint16_t *p, const float *g, int64_t n) {
  __m512 low = _mm512_setzero_ps(), high = low;
  for (int64_t i = 0; i < n; i += 32) {
    __m512i x = _mm512_load_si512(p + i);
    __mmask32 stays = ~_mm512_movepi16_mask(x);
    x = _mm512_maskz_mov_epi16(stays, x);
    low = _mm512_fmadd_ps(widen_low(x), _mm512_loadu_ps(g + i), low);
    high = _mm512_fmadd_ps(widen_high(x), _mm512_loadu_ps(g + i + 16), high);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(low, high));
}

/* 32 of a row: from signed exp and the gradients of kept probabilities to the gradients of scores, in bfloat16. */
INLINE __m512i gradients(__m512i p, const float *g, __m512 unit, __m512 keep, __m512 dot) {
  __mmask32 stays = ~_mm512_movepi16_mask(p);
  __m512i e = _mm512_and_si512(p, _mm512_set1_epi16(0x7FFF));
  __m512 low = _mm512_mask3_fmadd_ps(_mm512_loadu_ps(g), keep, dot, (__mmask16)stays);
  __m512 high = _mm512_mask3_fmadd_ps(_mm512_loadu_ps(g + 16), keep, dot, (__mmask16)(stays >> 16));
  return narrow(_mm512_mul_ps(_mm512_mul_ps(widen_low(e), unit), low),
                _mm512_mul_ps(_mm512_mul_ps(widen_high(e), unit), high));
}

/* For `rows` of one or two: the gradients of scores, by rows to `ds` and by pairs of rows to `ds2`, and kept exp by
   pairs of rows to `kept2`. A second row that is not there is zero. */
INLINE void differentiate(const int rows, const uint16_t *p, const float *g, int64_t n, int64_t wide,
                          const float *inverse, float scale, float keep, uint16_t *ds, uint32_t *ds2, uint32_t *kept2) {
  __m512 unit[2], dot[2], factor = _mm512_set1_ps(keep);
  for (int r = 0; r < rows; r++) {
    unit[r] = _mm512_set1_ps(inverse[r] * scale);
    dot[r] = _mm512_set1_ps(-dot_of(p + r * wide, g + r * wide, n) * inverse[r] * keep);
  }
  for (int64_t i = 0; i < n; i += 32) {
    __m512i s[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, e[2] = {s[0], s[0]};
    UNROLL for (int r = 0; r < rows; r++) {
      e[r] = _mm512_load_si512(p + r * wide + i);
      s[r] = gradients(e[r], g + r * wide + i, unit[r], factor, dot[r]);
      e[r] = _mm512_maskz_mov_epi16(~_mm512_movepi16_mask(e[r]), e[r]);
      _mm512_store_si512(ds + r * wide + i, s[r]);
    }
    _mm512_store_si512(ds2 + i, pairs(s[0], s[1], 0)), _mm512_store_si512(ds2 + i + 16, pairs(s[0], s[1], 1));
    _mm512_store_si512(kept2 + i, pairs(e[0], e[1], 0)), _mm512_store_si512(kept2 + i + 16, pairs(e[0], e[1], 1));
  }
}

static void backward_task(const Call *c, const Span *s, int64_t head, char *memory) {
  const int64_t n = s->keys, wide = up(n, 32), d = c->width;
  const int64_t most = s->queries < BACKWARD ? up(s->queries, 2) : BACKWARD;
  uint32_t *v = take(&memory, up(n, 16) * d * 2), *k = take(&memory, (n + 1) / 2 * d * 4);
  uint32_t *q2 = take(&memory, most * d * 2), *g2 = take(&memory, most * d * 2);
  uint32_t *kept2 = take(&memory, most * wide * 2), *ds2 = take(&memory, most * wide * 2);
  uint16_t *ds = take(&memory, most * wide * 2);
  float *dp = take(&memory, most * wide * 4), *dq = take(&memory, most * d * 4);
  float *dk = take(&memory, n * d * 4), *dv = take(&memory, n * d * 4), factor[BACKWARD];
  pack_across(v, c->v + s->key * c->v_token + head * c->v_head, c->v_token, n, d);
  pack_down(k, c->k + s->key * c->k_token + head * c->k_head, c->k_token, n, d, 0);
  if (c->window >= 0) memset(dk, 0, (size_t)(n * d) * 4), memset(dv, 0, (size_t)(n * d) * 4);
  for (int64_t i = 0; i < s->queries; i += BACKWARD) {
    int64_t rows = s->queries - i < BACKWARD ? s->queries - i : BACKWARD, first = head * s->queries + i;
    const Range range = seen_by(c, s, i, rows);
    const int64_t m = range.to - range.from, add = i > 0 || c->window >= 0;
    const uint16_t *g = c->gradient + (s->query + i) * c->g_token + head * c->g_head;
    const uint16_t *p = c->probabilities + s->first + first * wide + range.from;
    const float *inverse = c->inverse + s->row + first;
    product(dp, wide, rows, up(m, 16) / 16, g, c->g_token * 2, 4, d / 2, v + range.from / 16 * d * 8, 16, d * 8, 0);
    /* Columns that no product writes: exp is zero there, and must meet numbers. */
    if (up(m, 32) > up(m, 16))
      for (int64_t r = 0; r < rows; r++) _mm512_store_ps(dp + r * wide + up(m, 16), _mm512_setzero_ps());
    int64_t r = 0;
    for (; r + 1 < rows; r += 2)
      differentiate(2, p + r * wide, dp + r * wide, m, wide, inverse + r, c->scale, c->keep, ds + r * wide,
                    ds2 + r / 2 * wide, kept2 + r / 2 * wide);
    if (r < rows)
      differentiate(1, p + r * wide, dp + r * wide, m, wide, inverse + r, c->scale, c->keep, ds + r * wide,
                    ds2 + r / 2 * wide, kept2 + r / 2 * wide);
    product(dq, d, rows, d / 16, ds, wide * 2, 4, (m + 1) / 2, k + range.from / 2 * d, d, 16, 0);
    round_rows(c->dq + ((s->query + i) * c->heads + head) * d, c->heads * d, dq, rows, d, 0);
    for (r = 0; r < rows; r++) factor[r] = inverse[r] * c->keep;
    pack_down(g2, g, c->g_token, rows, d, factor);
    product(dv + range.from * d, d, m, d / 16, kept2, 4, wide * 4, (rows + 1) / 2, g2, d, 16, add);
    pack_down(q2, c->q + (s->query + i) * c->q_token + head * c->q_head, c->q_token, rows, d, 0);
    product(dk + range.from * d, d, m, d / 16, ds2, 4, wide * 4, (rows + 1) / 2, q2, d, 16, add);
  }
  round_rows(c->dk + (s->key * c->heads + head) * d, c->heads * d, dk, n, d, 0);
  round_rows(c->dv + (s->key * c->heads + head) * d, c->heads * d, dv, n, d, 0);
}

static int64_t backward_memory(const Call *c, int64_t queries, int64_t keys) {
  int64_t wide = up(keys, 32), d = c->width, most = queries < BACKWARD ? up(queries, 2) : BACKWARD;
  return wide * d * 2 + (keys + 1) / 2 * d * 4 + most * (d * 8 + wide * 10) + keys * d * 8 + 11 * 64;
}

#else /* this CPU is not for it */
int forward(const void *c) { return (void)c, -1; }
int backward(const void *c) { return (void)c, -1; }
#endif
