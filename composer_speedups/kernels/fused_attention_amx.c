/* Attention over packed sequences in bfloat16, for CPUs with AMX (fused_attention_bf16.h has all but products).

   A tile register holds 16 rows of 64 bytes, and an instruction multiplies 16 x 32 by 32 x 16 elements: so blocks,
   widths and sums are filled up to whole tiles, with zeros where they are summed. Of sequences of a few tokens most of
   a tile is filling: there AVX512-BF16 would be quicker. */
#if (defined(__AMX_TILE__) && defined(__AMX_BF16__)) || (defined(__AMXTILE__) && defined(__AMXBF16__)) /* old clang's */
#define TILES
#endif
#if defined(TILES) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__linux__)
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the system lets this process, with all its threads, have tile registers: they must be asked for. */
static int may_run(void) {
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
}

#define MAY_RUN may_run()
#define FORWARD 32   /* query rows of a block: two tiles */
#define BACKWARD 128 /* query rows of a block: their scores and gradients fit the L2 cache; a multiple of FORWARD */
#define DEEP 32
#include "fused_attention_bf16.h"

INLINE void begin(void) {
  static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } whole = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  _tile_loadconfig(&whole);
}

INLINE void end(void) { _tile_release(); }

/* As `product`, for one or two tiles of rows and of columns: four of sums, and two of each factor. */
INLINE void block(const int tall, const int broad, float *out, int64_t stride, const char *a, int64_t row,
                  int64_t depth, const uint32_t *b, int64_t down, int64_t across, int add) {
  float *lower = out + 16 * stride;
  if (add) {
    _tile_loadd(0, out, stride * 4);
    if (broad) _tile_loadd(1, out + 16, stride * 4);
    if (tall) _tile_loadd(2, lower, stride * 4);
    if (tall && broad) _tile_loadd(3, lower + 16, stride * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < depth; i += 16) {
    _tile_loadd(4, a + i * 4, row);
    _tile_loadd(6, b + i * down, down * 4);
    _tile_dpbf16ps(0, 4, 6);
    if (broad) {
      _tile_loadd(7, b + i * down + across, down * 4);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (tall) {
      _tile_loadd(5, a + i * 4 + 16 * row, row);
      _tile_dpbf16ps(2, 5, 6);
      if (broad) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, stride * 4);
  if (broad) _tile_stored(1, out + 16, stride * 4);
  if (tall) _tile_stored(2, lower, stride * 4);
  if (tall && broad) _tile_stored(3, lower + 16, stride * 4);
}

static void product(float *out, int64_t stride, int64_t rows, int64_t vectors, const void *a, int64_t row,
                    int64_t depth, const uint32_t *b, int64_t down, int64_t across, int add) {
  __asm__ volatile("" ::: "memory"); /* GCC's loads of tiles do not say that they read it: no store may come later */
  for (int64_t c = 0; c < vectors; c += 2)
    for (int64_t r = 0; r < rows; r += 32) {
      float *to = out + r * stride + c * 16;
      const char *from = (const char *)a + r * row;
      const uint32_t *second = b + c * across;
#define CASE(TALL, BROAD) \
  case TALL * 2 + BROAD: block(TALL, BROAD, to, stride, from, row, depth, second, down, across, add); break;
      switch ((rows - r > 16) * 2 + (vectors - c > 1)) { CASE(0, 0) CASE(0, 1) CASE(1, 0) CASE(1, 1) }
    }
}

/* A copy with whole tiles; rows that are not there stay as they are, and make sums that nobody reads. */
INLINE const uint16_t *first_factor(uint16_t *own, const uint16_t *x, int64_t stride, int64_t rows, int64_t width,
                                    int64_t *row) {
  const int64_t full = up(width, DEEP);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < full; c += 32)
      _mm512_store_si512(own + r * full + c, _mm512_maskz_loadu_epi32(below((width - c) / 2), x + r * stride + c));
  *row = full * 2;
  return own;
}

/* Kept as [width, keys], a' b: a first factor has the summed index along its rows, and `a` is the smaller one to be
   transposed. */
static void sum_rows(float *out, int64_t wide, int64_t from, int64_t n, const uint32_t *b, const uint32_t *a,
                     uint32_t *own, int64_t rows, int64_t width, int add) {
  const int64_t deep = up(rows, DEEP) / 2;
  for (int64_t r = 0; r < deep; r += 16)
    for (int64_t c = 0; c < width; c += 16) {
      __m512i x[16];
      UNROLL for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(a + (r + i) * width + c);
      transpose(x);
      UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512(own + (c + i) * deep + r, x[i]);
    }
  product(out + from, wide, width, up(n, 16) / 16, own, deep * 4, deep, b, wide, 16, add);
}

static void round_sums(uint16_t *to, int64_t stride, const float *out, int64_t wide, int64_t keys, int64_t width) {
  for (int64_t k = 0; k < keys; k += 16)
    for (int64_t c = 0; c < width; c += 16) {
      __m512i x[16];
      UNROLL for (int i = 0; i < 16; i++) x[i] = _mm512_loadu_si512(out + (c + i) * wide + k);
      transpose(x);
      for (int i = 0; i < 16 && k + i < keys; i++)
        _mm256_storeu_si256((void *)(to + (k + i) * stride + c), (__m256i)_mm512_cvtneps_pbh((__m512)x[i]));
    }
}

#else /* this CPU is not for it */
int forward(const void *c) { return (void)c, -1; }
int backward(const void *c) { return (void)c, -1; }
#endif
