/* Attention over packed sequences in float32, for CPUs with AVX2 or AVX-512 (fused_attention.h says what is asked).

   Keys are turned once a task, so that a vector holds one number of several keys; then come blocks of query rows,
   whose scores stay in the cache. What forward leaves for backward is the probabilities. */
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include "native.h"

#define NUMBER float
#define FILL 16
#define FORWARD 24  /* query rows of a block: their scores and the tile's keys fit the L1 cache */
#define BACKWARD 48 /* query rows of a block: their scores and gradients fit the L2 cache; a multiple of FORWARD */
#include "fused_attention.h"
#include <immintrin.h>

#define ROWS 6 /* of a tile of sums in registers, and COLUMNS its vectors */

#if defined(__AVX512F__)
#define WIDE 16   /* numbers of a vector */
#define COLUMNS 4 /* with as many of the second factor, 28 of 32 registers */
typedef __m512 Vector;
INLINE Vector load(const float *x) { return _mm512_loadu_ps(x); }
INLINE void store(float *x, Vector v) { _mm512_storeu_ps(x, v); }
INLINE Vector all(float x) { return _mm512_set1_ps(x); }
INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); } /* b if one is NaN */
INLINE Vector whole(Vector x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float total(Vector x) { return _mm512_reduce_add_ps(x); }
INLINE float largest(Vector x) { return _mm512_reduce_max_ps(x); }
typedef __m512i Words;
INLINE Words words_of(Vector x) { return _mm512_cvtps_epi32(x); }
INLINE Words all_words(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Words lanes(const int16_t *x) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256((const void *)x)); }
/* All bits set in the words of `a` that are below those of `b`. */
INLINE Words below(Words a, Words b) { return _mm512_maskz_set1_epi32(_mm512_cmplt_epi32_mask(a, b), -1); }
#else
#define WIDE 8
#define COLUMNS 2 /* with as many of the second factor, 14 of 16 registers, and one for the first */
typedef __m256 Vector;
INLINE Vector load(const float *x) { return _mm256_loadu_ps(x); }
INLINE void store(float *x, Vector v) { _mm256_storeu_ps(x, v); }
INLINE Vector all(float x) { return _mm256_set1_ps(x); }
INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); } /* b if one is NaN */
INLINE Vector whole(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float total(Vector x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
INLINE float largest(Vector x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
typedef __m256i Words;
INLINE Words words_of(Vector x) { return _mm256_cvtps_epi32(x); }
INLINE Words all_words(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Words lanes(const int16_t *x) { return _mm256_cvtepi16_epi32(_mm_loadu_si128((const void *)x)); }
INLINE Words below(Words a, Words b) { return _mm256_cmpgt_epi32(b, a); }
#endif
/* Further operations are the compiler's own on vectors: + - * on numbers, & | ~ on words of 32 bits. */
typedef int32_t Bits __attribute__((vector_size(WIDE * 4)));

/* out[rows, WIDE columns] (+)= a b. Rows of `a` are `row` numbers apart, and along the summed index, `depth` of them,
   `step`; b's vectors are `down` numbers apart along the summed index and `across` along columns. */
INLINE void tile(const int rows, const int columns, float *out, int64_t stride, const float *a, int64_t row,
                 int64_t step, int64_t depth, const float *b, int64_t down, int64_t across, int add) {
  Vector sum[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++)
    sum[r][c] = add ? load(out + r * stride + c * WIDE) : all(0.0f);
  for (int64_t i = 0; i < depth; i++) {
    Vector second[COLUMNS];
    UNROLL for (int c = 0; c < columns; c++) second[c] = load(b + i * down + c * across);
    UNROLL for (int r = 0; r < rows; r++) {
      Vector first = all(a[i * step + r * row]);
      UNROLL for (int c = 0; c < columns; c++) sum[r][c] = multiply_add(first, second[c], sum[r][c]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int c = 0; c < columns; c++)
    store(out + r * stride + c * WIDE, sum[r][c]);
}

/* As `tile`, for any number of rows and of vectors of columns. */
static void product(float *out, int64_t stride, int64_t rows, int64_t vectors, const float *a, int64_t row,
                    int64_t step, int64_t depth, const float *b, int64_t down, int64_t across, int add) {
  for (int64_t c = 0; c < vectors; c += COLUMNS)
    for (int64_t r = 0; r < rows; r += ROWS) {
      int64_t height = rows - r < ROWS ? rows - r : ROWS, width = vectors - c < COLUMNS ? vectors - c : COLUMNS;
#define CASE(R, C)                                                                                                     \
  case R * 8 + C:                                                                                                      \
    tile(R, C, out + r * stride + c * WIDE, stride, a + r * row, row, step, depth, b + c * across, down, across, add); \
    break;
#if COLUMNS == 4
#define HEIGHT(R) CASE(R, 1) CASE(R, 2) CASE(R, 3) CASE(R, 4)
#else
#define HEIGHT(R) CASE(R, 1) CASE(R, 2)
#endif
      switch (height * 8 + width) { HEIGHT(1) HEIGHT(2) HEIGHT(3) HEIGHT(4) HEIGHT(5) HEIGHT(6) }
    }
}

/* x [rows, width] -> [rows / WIDE, width, WIDE]; rows that are not there are zero. */
static void turn(float *to, const float *x, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < up(rows, WIDE); r += 8)
    for (int64_t c = 0; c < width; c += 8) {
      float *panel = to + r / WIDE * WIDE * width + r % WIDE + c * WIDE;
      __m256 a[8], b[8];
      UNROLL for (int i = 0; i < 8; i++) a[i] = _mm256_setzero_ps();
      for (int i = 0; i < 8 && r + i < rows; i++) a[i] = _mm256_loadu_ps(x + (r + i) * stride + c);
      UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
      }
      /* columns 4 l + j of the rows 0 to 3, and 4 to 7, in half l of a[j], and a[j + 4] */
      UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0x44);
        a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + j + 2], 0xEE);
      }
      UNROLL for (int j = 0; j < 4; j++) {
        _mm256_storeu_ps(panel + j * WIDE, _mm256_permute2f128_ps(a[j], a[j + 4], 0x20));
        _mm256_storeu_ps(panel + (j + 4) * WIDE, _mm256_permute2f128_ps(a[j], a[j + 4], 0x31));
      }
    }
}

/* x [rows, width] without gaps: a step of a power of two between rows would make them evict each other. */
INLINE void gather(float *to, const float *x, int64_t stride, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; r++) memcpy(to + r * width, x + r * stride, (size_t)width * sizeof *x);
}

/* 2^x to a relative 1e-7, for x <= 0; no less than 2^-126. x is cut at the nearest whole number, for what is left a
   polynomial of least largest error. */
INLINE Vector power_of_two(Vector x) {
  x = larger(all(-126.0f), x);
  Vector n = whole(x), f = x - n;
  Vector y = multiply_add(all(0.000153458116f), f, all(0.00133999312f));
  y = multiply_add(y, f, all(0.00961848896f));
  y = multiply_add(y, f, all(0.0555032878f));
  y = multiply_add(y, f, all(0.240226469f));
  y = multiply_add(y, f, all(0.693147206f));
  y = multiply_add(y, f, all(1.0f));
  return y * (Vector)(((Bits)words_of(n) + 127) << 23);
}

/* All bits set in the first `left` words. */
INLINE Bits present(int64_t left) {
  static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Bits index;
  memcpy(&index, numbers, sizeof index);
  return (Bits)below((Words)index, all_words(left < WIDE ? (int32_t)left : WIDE));
}

INLINE Bits between(int64_t from, int64_t to) { return present(to) & ~present(from); }

/* One row of n scores, those before `hidden` not to be seen -> probabilities, negative where dropped, to `signed_p` (or
   nowhere); `x` gets those that stay, times `keep`. `bits` has the row's lanes of the mask, if there is one. Both get
   zeros from n to `end`, a multiple of FILL. */
INLINE void softmax(float *x, int64_t hidden, int64_t n, int64_t end, float scale, float keep, const int16_t *bits,
                    int32_t least, float *signed_p) {
  /* Differences to the largest come before factors: the largest gives 2^0 whatever its size. */
  const Vector factor = all((scale < 0.0f ? -scale : scale) * 1.44269504f), one = all(scale < 0.0f ? -1.0f : 1.0f);
  const Vector lowest = all(-__builtin_inff());
  const Bits sign = (Bits)all_words(INT32_MIN);
  Vector top = lowest, sum = all(0.0f);
  for (int64_t i = 0; i < n; i += WIDE) {
    Vector score = load(x + i) * one;
    if (n - i < WIDE || hidden > i) {
      const Bits some = between(hidden - i, n - i);
      score = (Vector)(((Bits)score & some) | ((Bits)lowest & ~some));
    }
    top = larger(top, score);
  }
  top = all(-largest(top));
  for (int64_t i = 0; i < n; i += WIDE) {
    Vector e = power_of_two(multiply_add(load(x + i), one, top) * factor);
    if (n - i < WIDE || hidden > i) e = (Vector)((Bits)e & between(hidden - i, n - i));
    sum += e;
    store(x + i, e);
  }
  for (int64_t i = up(n, WIDE); i < end; i += WIDE) store(x + i, all(0.0f));
  const Vector inverse = all(1.0f / total(sum)), kept = all(keep);
  for (int64_t i = 0; i < end; i += WIDE) {
    Bits p = (Bits)(load(x + i) * inverse), gone = {0};
    if (bits) gone = (Bits)below(lanes(bits + i), all_words(least));
    if (signed_p) store(signed_p + i, (Vector)(p | (gone & sign)));
    store(x + i, (Vector)(p & ~gone) * kept);
  }
}

static void forward_task(const Call *c, const Span *s, int64_t head, char *memory) {
  const int64_t n = s->keys, wide = up(n, FILL), d = c->width, token = c->heads * d;
  float *k = take(&memory, wide * d * 4), *v = take(&memory, n * d * 4), *scores = take(&memory, FORWARD * wide * 4);
  uint32_t *words = take(&memory, (wide / 2 + 1) * 4);
  int16_t *bits = take(&memory, (wide / 2 + 1) * 4);
  turn(k, c->k + s->key * c->k_token + head * c->k_head, c->k_token, n, d);
  if (c->out) gather(v, c->v + s->key * c->v_token + head * c->v_head, c->v_token, n, d);
  for (int64_t i = 0; i < s->queries; i += FORWARD) {
    int64_t rows = s->queries - i < FORWARD ? s->queries - i : FORWARD;
    const Range range = seen_by(c, s, i, rows);
    const int64_t m = range.to - range.from, end = up(m, FILL);
    const float *q = c->q + (s->query + i) * c->q_token + head * c->q_head;
    product(scores, wide, rows, up(m, WIDE) / WIDE, q, c->q_token, 1, d, k + range.from * d, WIDE, d * WIDE, 0);
    for (int64_t r = 0; r < rows; r++) {
      int64_t row = head * s->queries + i + r, first = row * n + range.from, odd = first & 1;
      const Range own = seen(c, s, i + r);
      int dropout = c->least != -32768;
      if (c->bias) add_bias(scores + r * wide, c->bias + s->first + row * wide, n);
      if (dropout) draw(bits, words, (uint32_t)(first / 2), end / 2 + odd, s->k0, c->k1);
      float *signed_p = c->probabilities ? c->probabilities + s->first + row * wide + range.from : 0;
      softmax(scores + r * wide, own.from - range.from, own.to - range.from, end, c->scale, c->keep,
              dropout ? bits + odd : 0, c->least, signed_p);
      if (signed_p) clear_around(c, s, i, range, signed_p);
    }
    if (!c->out) continue;
    float *out = c->out + ((s->query + i) * c->heads + head) * d;
    product(out, token, rows, d / WIDE, scores, wide, 1, m, v + range.from * d, d, WIDE, 0);
  }
}

static int64_t forward_memory(const Call *c, int64_t queries, int64_t keys) {
  int64_t wide = up(keys, FILL), d = c->width;
  (void)queries;
  return (wide + keys) * d * 4 + FORWARD * wide * 4 + (wide / 2 + 1) * 8 + 5 * 64;
}

/* One row: `x` from gradients of kept probabilities to those of scores, and `kept`, from signed probabilities. */
INLINE void differentiate(const float *p, float *x, float *kept, int64_t n, float scale, float keep) {
  const Vector factor = all(keep), unit = all(scale);
  const Bits size = (Bits)all_words(INT32_MAX);
  Vector sum = all(0.0f);
  for (int64_t i = 0; i < n; i += WIDE) {
    Bits a = (Bits)load(p + i);
    Vector stays = (Vector)(a & ~(a >> 31)) * factor;
    store(kept + i, stays);
    sum = multiply_add(stays, load(x + i), sum);
  }
  const Vector dot = all(total(sum));
  for (int64_t i = 0; i < n; i += WIDE) {
    Bits a = (Bits)load(p + i);
    Vector through = (Vector)((Bits)(load(x + i) * factor) & ~(a >> 31));
    store(x + i, (Vector)(a & size) * unit * (through - dot));
  }
}

static void backward_task(const Call *c, const Span *s, int64_t head, char *memory) {
  const int64_t n = s->keys, wide = up(n, FILL), d = c->width;
  const int64_t most = s->queries < BACKWARD ? s->queries : BACKWARD;
  float *v = take(&memory, wide * d * 4), *k = take(&memory, n * d * 4);
  float *q = take(&memory, most * d * 4), *g = take(&memory, most * d * 4);
  float *kept = take(&memory, most * wide * 4), *ds = take(&memory, most * wide * 4);
  const int64_t dq_token = c->dq_token, dk_token = c->dk_token, dv_token = c->dv_token;
  float *dq = c->dq + s->query * dq_token + head * d, *dk = c->dk + s->key * dk_token + head * d;
  float *dv = c->dv + s->key * dv_token + head * d;
  turn(v, c->v + s->key * c->v_token + head * c->v_head, c->v_token, n, d);
  gather(k, c->k + s->key * c->k_token + head * c->k_head, c->k_token, n, d);
  if (c->window >= 0) /* no block of query rows sees all keys */
    for (int64_t j = 0; j < n; j++)
      memset(dk + j * dk_token, 0, (size_t)d * 4), memset(dv + j * dv_token, 0, (size_t)d * 4);
  for (int64_t i = 0; i < s->queries; i += BACKWARD) {
    int64_t rows = s->queries - i < BACKWARD ? s->queries - i : BACKWARD;
    const Range range = seen_by(c, s, i, rows);
    const int64_t m = range.to - range.from, add = i > 0 || c->window >= 0;
    const float *p = c->probabilities + s->first + (head * s->queries + i) * wide + range.from;
    gather(q, c->q + (s->query + i) * c->q_token + head * c->q_head, c->q_token, rows, d);
    gather(g, c->gradient + (s->query + i) * c->g_token + head * c->g_head, c->g_token, rows, d);
    product(ds, wide, rows, up(m, WIDE) / WIDE, g, d, 1, d, v + range.from * d, WIDE, d * WIDE, 0);
    for (int64_t r = 0; r < rows; r++)
      differentiate(p + r * wide, ds + r * wide, kept + r * wide, m, c->scale, c->keep);
    for (int64_t r = 0; c->dbias && r < rows; r++)
      memcpy(c->dbias + s->first + (head * s->queries + i + r) * wide, ds + r * wide, (size_t)n * 4);
    product(dq + i * dq_token, dq_token, rows, d / WIDE, ds, wide, 1, m, k + range.from * d, d, WIDE, 0);
    product(dv + range.from * dv_token, dv_token, m, d / WIDE, kept, 1, wide, rows, g, d, WIDE, add);
    product(dk + range.from * dk_token, dk_token, m, d / WIDE, ds, 1, wide, rows, q, d, WIDE, add);
  }
}

static int64_t backward_memory(const Call *c, int64_t queries, int64_t keys) {
  int64_t wide = up(keys, FILL), d = c->width, most = queries < BACKWARD ? queries : BACKWARD;
  return (wide + keys + 2 * most) * d * 4 + most * wide * 8 + 6 * 64;
}

#else /* this CPU is not for it */
int forward(const void *c) { return (void)c, -1; }
int backward(const void *c) { return (void)c, -1; }
#endif
