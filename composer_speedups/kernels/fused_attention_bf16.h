/* Attention over packed sequences in bfloat16, all but its products (fused_attention.h says what is asked).

   Keys and values are packed once a task, in pairs, as instructions that multiply pairs of bfloat16 and sum in float32
   want them; then come blocks of query rows, whose scores stay in the cache, in float32. What forward leaves for
   backward is exp(score - the row's largest), in bfloat16, and for each row the inverse of their sum.

   The file that includes this says how many rows a block has (FORWARD and BACKWARD) and DEEP, to a multiple of which
   the summed index of a product is filled up with zeros, and has the functions that are declared below. They may read
   and write as many rows more as fill up a multiple of 16, if DEEP is no less: there is room for them. */
#include "native.h"

#define NUMBER uint16_t
#define FILL 32
#include "fused_attention.h"
#include <immintrin.h>

/* Before the first product of a task, and after its last one. */
INLINE void begin(void);
INLINE void end(void);

/* The block's rows as the first factor of a product, and `row`, their distance in bytes; `own` is memory for them. */
INLINE const uint16_t *first_factor(uint16_t *own, const uint16_t *x, int64_t stride, int64_t rows, int64_t width,
                                    int64_t *row);

/* out [rows, vectors of 16 columns] (+)= a b. Rows of `a` are `depth` words, pairs along the summed index, `row` bytes
   apart; b's vectors are `down` words apart along the summed index and `across` along columns. */
static void product(float *out, int64_t stride, int64_t rows, int64_t vectors, const void *a, int64_t row,
                    int64_t depth, const uint32_t *b, int64_t down, int64_t across, int add);

/* out [keys, width], or how else a file keeps it, (+)= b' a for the `n` keys from number `from` on, of `keys` that are
   filled up to `wide`. `b` [rows / 2, wide] and `a` [rows / 2, width] are words, pairs along the rows; `own` is memory
   for them once more. */
static void sum_rows(float *out, int64_t wide, int64_t from, int64_t n, const uint32_t *b, const uint32_t *a,
                     uint32_t *own, int64_t rows, int64_t width, int add);

/* What sum_rows left in `out` -> bfloat16 [keys, width]. */
static void round_sums(uint16_t *to, int64_t stride, const float *out, int64_t wide, int64_t keys, int64_t width);

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

/* Sixteen rows of sixteen words, exchanged in place. */
INLINE void transpose(__m512i a[16]) {
  __m512i b[16];
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
  UNROLL for (int i = 0; i < 16; i++) a[i] = b[i];
}

/* x [rows, width] -> [rows / 16, filled up width / 2, 16] words, pairs along the width; what is not there is zero. */
static void pack_across(uint32_t *to, const uint16_t *x, int64_t stride, int64_t rows, int64_t width) {
  const int64_t full = up(width, DEEP);
  for (int64_t r = 0; r < rows; r += 16)
    for (int64_t c = 0; c < full; c += 32) {
      __mmask16 some = below((width - c) / 2);
      __m512i a[16];
      UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_setzero_si512();
      for (int i = 0; i < 16 && r + i < rows; i++) a[i] = _mm512_maskz_loadu_epi32(some, x + (r + i) * stride + c);
      transpose(a);
      uint32_t *panel = to + (r / 16 * (full / 2) + c / 2) * 16;
      for (int i = 0; i < 16 && c + 2 * i < full; i++) _mm512_storeu_si512(panel + i * 16, a[i]);
    }
}

/* x [rows, width] -> [filled up rows / 2, width] words, pairs along the rows; rows that are not there are zero. Each
   row is multiplied by its factor, if there are any, and rounded. */
INLINE void pack_down(uint32_t *to, const uint16_t *x, int64_t stride, int64_t rows, int64_t width,
                      const float *factor) {
  for (int64_t r = 0; r < up(rows, DEEP); r += 2, to += width)
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

/* `word` of native.h for sixteen numbers, each times 0x9E3779B9 already; a bit for each half, 1 where it is dropped.

   GCC 12 may keep a mask register that is widened to 64 bits by storing 32 and reading 64, the rest of which is whatever
   the stack had: the mask is taken to a general register before. */
INLINE uint64_t drawn(__m512i number, __m512i k0, __m512i k1, __m512i least) {
  __m512i h = _mm512_add_epi32(number, k0);
  h = _mm512_xor_si512(h, _mm512_xor_si512(_mm512_srli_epi32(h, 16), k1));
  h = _mm512_mullo_epi32(h, _mm512_set1_epi32(0x7FEB352D));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
  h = _mm512_mullo_epi32(h, _mm512_set1_epi32((int)0x846CA68Bu));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
  uint32_t dropped = _mm512_cmplt_epi16_mask(h, least);
  __asm__("" : "+r"(dropped));
  return dropped;
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
      bits |= drawn(number, keys[0], keys[1], threshold) << 32;
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
  const int64_t n = s->keys, wide = up(n, 32), d = c->width, deep = up(d, DEEP);
  uint32_t *k = take(&memory, up(n, 16) * deep * 2), *v = take(&memory, up(n, DEEP) * d * 2);
  float *scores = take(&memory, FORWARD * wide * 4), *sums = take(&memory, FORWARD * d * 4), factor[FORWARD];
  uint16_t *kept = take(&memory, FORWARD * wide * 2), *own_q = take(&memory, FORWARD * deep * 2);
  begin();
  pack_across(k, c->k + s->key * c->k_token + head * c->k_head, c->k_token, n, d);
  if (c->out) pack_down(v, c->v + s->key * c->v_token + head * c->v_head, c->v_token, n, d, 0);
  for (int64_t i = 0; i < s->queries; i += FORWARD) {
    int64_t rows = s->queries - i < FORWARD ? s->queries - i : FORWARD;
    const Range range = seen_by(c, s, i, rows);
    const int64_t m = range.to - range.from, end = up(m, 32);
    int64_t step;
    const uint16_t *q = first_factor(own_q, c->q + (s->query + i) * c->q_token + head * c->q_head, c->q_token, rows, d,
                                     &step);
    product(scores, wide, rows, up(m, 16) / 16, q, step, deep / 2, k + range.from / 16 * deep * 8, 16, deep * 8, 0);
    for (int64_t r = 0; r < rows; r++) {
      int64_t row = head * s->queries + i + r;
      const Range own = seen(c, s, i + r);
      const int64_t hidden = own.from - range.from, left = own.to - range.from;
      float *x = scores + r * wide;
      if (c->bias) add_bias(x, c->bias + s->first + row * wide, n);
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
    product(sums, d, rows, d / 16, kept, wide * 2, up(m, DEEP) / 2, v + range.from / 2 * d, d, 16, 0);
    round_rows(c->out + ((s->query + i) * c->heads + head) * d, c->heads * d, sums, rows, d, factor);
  }
  end();
}

static int64_t forward_memory(const Call *c, int64_t queries, int64_t keys) {
  int64_t wide = up(keys, 32), d = c->width, deep = up(d, DEEP);
  (void)queries;
  return wide * deep * 2 + up(keys, DEEP) * d * 2 + FORWARD * (wide * 6 + d * 4 + deep * 2) + 6 * 64;
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
  const int64_t n = s->keys, wide = up(n, 32), d = c->width, deep = up(d, DEEP);
  const int64_t most = s->queries < BACKWARD ? up(s->queries, DEEP) : BACKWARD;
  uint32_t *v = take(&memory, up(n, 16) * deep * 2), *k = take(&memory, up(n, DEEP) * d * 2);
  uint32_t *q2 = take(&memory, most * d * 2), *g2 = take(&memory, most * d * 2), *own = take(&memory, most * d * 2);
  uint32_t *kept2 = take(&memory, most * wide * 2), *ds2 = take(&memory, most * wide * 2);
  uint16_t *ds = take(&memory, most * wide * 2), *own_g = take(&memory, most * deep * 2);
  float *dp = take(&memory, most * wide * 4), *dq = take(&memory, most * d * 4);
  float *dk = take(&memory, wide * d * 4), *dv = take(&memory, wide * d * 4), factor[BACKWARD];
  begin();
  pack_across(v, c->v + s->key * c->v_token + head * c->v_head, c->v_token, n, d);
  pack_down(k, c->k + s->key * c->k_token + head * c->k_head, c->k_token, n, d, 0);
  if (c->window >= 0) memset(dk, 0, (size_t)(wide * d) * 4), memset(dv, 0, (size_t)(wide * d) * 4);
  for (int64_t i = 0; i < s->queries; i += BACKWARD) {
    int64_t rows = s->queries - i < BACKWARD ? s->queries - i : BACKWARD, first = head * s->queries + i, step;
    const Range range = seen_by(c, s, i, rows);
    const int64_t m = range.to - range.from, add = i > 0 || c->window >= 0;
    const uint16_t *g = c->gradient + (s->query + i) * c->g_token + head * c->g_head;
    const uint16_t *p = c->probabilities + s->first + first * wide + range.from;
    const float *inverse = c->inverse + s->row + first;
    const uint16_t *gradient = first_factor(own_g, g, c->g_token, rows, d, &step);
    product(dp, wide, rows, up(m, 16) / 16, gradient, step, deep / 2, v + range.from / 16 * deep * 8, 16, deep * 8, 0);
    /* Columns that no product writes: exp is zero there, and must meet numbers. */
    if (up(m, 32) > up(m, 16))
      for (int64_t r = 0; r < rows; r++) _mm512_store_ps(dp + r * wide + up(m, 16), _mm512_setzero_ps());
    int64_t r = 0;
    for (; r + 1 < rows; r += 2) {
      fetch(p + r * wide, 4 * wide, 2 * m), fetch(p + r * wide, 6 * wide, 2 * m); /* the next two rows, in bytes */
      differentiate(2, p + r * wide, dp + r * wide, m, wide, inverse + r, c->scale, c->keep, ds + r * wide,
                    ds2 + r / 2 * wide, kept2 + r / 2 * wide);
    }
    if (r < rows)
      differentiate(1, p + r * wide, dp + r * wide, m, wide, inverse + r, c->scale, c->keep, ds + r * wide,
                    ds2 + r / 2 * wide, kept2 + r / 2 * wide);
    for (r = 0; c->dbias && r < rows; r++) memcpy(c->dbias + s->first + (first + r) * wide, ds + r * wide, (size_t)n * 2);
    for (r = (rows + 1) / 2; r < up(rows, DEEP) / 2; r++) /* rows that are not there */
      memset(ds2 + r * wide, 0, (size_t)wide * 4), memset(kept2 + r * wide, 0, (size_t)wide * 4);
    product(dq, d, rows, d / 16, ds, wide * 2, up(m, DEEP) / 2, k + range.from / 2 * d, d, 16, 0);
    round_rows(c->dq + (s->query + i) * c->dq_token + head * d, c->dq_token, dq, rows, d, 0);
    for (r = 0; r < rows; r++) factor[r] = inverse[r] * c->keep;
    pack_down(g2, g, c->g_token, rows, d, factor);
    sum_rows(dv, wide, range.from, m, kept2, g2, own, rows, d, add);
    pack_down(q2, c->q + (s->query + i) * c->q_token + head * c->q_head, c->q_token, rows, d, 0);
    sum_rows(dk, wide, range.from, m, ds2, q2, own, rows, d, add);
  }
  round_sums(c->dk + s->key * c->dk_token + head * d, c->dk_token, dk, wide, n, d);
  round_sums(c->dv + s->key * c->dv_token + head * d, c->dv_token, dv, wide, n, d);
  end();
}

static int64_t backward_memory(const Call *c, int64_t queries, int64_t keys) {
  int64_t wide = up(keys, 32), d = c->width, deep = up(d, DEEP);
  int64_t most = queries < BACKWARD ? up(queries, DEEP) : BACKWARD;
  return wide * deep * 2 + up(keys, DEEP) * d * 2 + most * (d * 10 + wide * 10 + deep * 2) + wide * d * 8 + 13 * 64;
}
