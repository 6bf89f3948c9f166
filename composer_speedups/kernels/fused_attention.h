/* Attention over packed sequences by one head of one sequence at a time: what is asked for, and how it is shared out.

   One thread does such a task, in an order that depends on lengths alone, so that results do not depend on the number
   of threads. Strides and widths are counted in elements; a width is a multiple of 16. What forward leaves for
   backward has its sign bit set where dropout dropped it, in rows filled up with zeros to a multiple of FILL. The mask
   is that of fast_dropout.c, with elements numbered through a sequence's [heads, queries, keys]. NUMBER is the type of
   an element. fused_attention.py calls it, and compares it with what it means before the first use. */
#include <stdlib.h>

typedef struct {
  const NUMBER *q, *k, *v;                    /* [tokens, heads, width] each, with strides */
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;
  const int32_t *queries, *keys;              /* [sequences]: lengths */
  int64_t sequences, heads, width;
  NUMBER *probabilities;                      /* sequences' [heads, queries, filled up keys], at 64 bytes, or null */
  float *inverse;                             /* sequences' [heads, queries], or null: what they lack to sum to 1 */
  uint32_t k0, k1;                            /* of the dropout mask */
  int32_t least, threads;                     /* lanes below `least` are dropped; -32768 drops none */
  int64_t window;                             /* keys to each side that a query sees, or -1: all */
  float scale, keep;                          /* of scores; of what dropout leaves */
  NUMBER *out;                                /* forward: [tokens, heads, width], or null: probabilities only */
  const NUMBER *gradient;                     /* backward: of `out` */
  int64_t g_token, g_head;
  NUMBER *dq, *dk, *dv;                       /* backward: [tokens, heads, width] each; heads lie beside each other */
  int64_t dq_token, dk_token, dv_token;
  const float *bias;                          /* forward: as probabilities lie, or null: added to q k; with no window */
  NUMBER *dbias;                              /* backward: as probabilities lie, or null: its gradient, keys only */
} Call;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define WORTHWHILE (1 << 14) /* scores below which waking threads costs more than it saves */

typedef struct {
  int64_t query, key, queries, keys; /* first tokens and lengths */
  int64_t first, row;                /* of its probabilities and its inverses */
  uint32_t k0;                       /* of its mask */
} Span;

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

typedef struct {
  int64_t from, to;
} Range;

/* The keys that a query row sees, the first of which has the number 0. */
INLINE Range seen(const Call *c, const Span *s, int64_t row) {
  if (c->window < 0) return (Range){0, s->keys};
  return (Range){row > c->window ? row - c->window : 0, s->keys - row > c->window ? row + c->window + 1 : s->keys};
}

/* As many as some of these query rows see, from a multiple of FILL on. */
INLINE Range seen_by(const Call *c, const Span *s, int64_t row, int64_t rows) {
  return (Range){seen(c, s, row).from / FILL * FILL, seen(c, s, row + rows - 1).to};
}

/* What backward reads of a row's probabilities beside those of forward's own block: its blocks have more rows. */
INLINE void clear_around(const Call *c, const Span *s, int64_t row, Range range, NUMBER *p) {
  if (c->window < 0) return;
  const int64_t block = row / BACKWARD * BACKWARD, left = s->queries - block;
  const Range more = seen_by(c, s, block, left < BACKWARD ? left : BACKWARD);
  const int64_t after = range.from + up(range.to - range.from, FILL);
  memset(p - (range.from - more.from), 0, (size_t)(range.from - more.from) * sizeof *p);
  if (up(more.to, FILL) > after) memset(p + after - range.from, 0, (size_t)(up(more.to, FILL) - after) * sizeof *p);
}

/* The bias of a row of n scores on top of them. */
INLINE void add_bias(float *restrict scores, const float *restrict bias, int64_t n) {
  for (int64_t i = 0; i < n; i++) scores[i] += bias[i];
}

/* A part of `memory`, which moves on. */
INLINE void *take(char **memory, int64_t bytes) {
  char *here = *memory;
  *memory += up(bytes, 64);
  return here;
}

static int longest_first(const void *a, const void *b) {
  const Span *x = a, *y = b;
  int64_t m = x->queries * x->keys, n = y->queries * y->keys;
  return m != n ? (m < n ? 1 : -1) : (x->query > y->query) - (x->query < y->query);
}

/* Where keys or queries are missing nothing is computed, and what is asked for is zero. */
static void clear(NUMBER *x, int64_t stride, int64_t token, int64_t tokens, const Call *c) {
  for (int64_t i = token; x && i < token + tokens; i++)
    memset(x + i * stride, 0, (size_t)(c->heads * c->width) * sizeof *x);
}

/* `task` for every head of every sequence, with as much memory at 64 bytes as `memory_of` says; 0 if done. */
static int run(const Call *c, void (*task)(const Call *, const Span *, int64_t, char *),
               int64_t (*memory_of)(const Call *, int64_t, int64_t)) {
  Span *spans = malloc((size_t)(c->sequences + 1) * sizeof *spans);
  int64_t count = 0, query = 0, key = 0, first = 0, row = 0, most = 0;
  uint32_t k0 = c->k0;
  int failed = !spans;
  for (int64_t i = 0; i < c->sequences && !failed; i++) {
    int64_t queries = c->queries[i], keys = c->keys[i], scores = c->heads * queries * keys;
    if (scores) {
      spans[count++] = (Span){query, key, queries, keys, first, row, k0};
      int64_t bytes = memory_of(c, queries, keys);
      most = bytes > most ? bytes : most;
    } else {
      clear(c->out, c->heads * c->width, query, queries, c), clear(c->dq, c->dq_token, query, queries, c);
      clear(c->dk, c->dk_token, key, keys, c), clear(c->dv, c->dv_token, key, keys, c);
    }
    query += queries, key += keys, first += c->heads * queries * up(keys, FILL), row += c->heads * queries;
    k0 += (uint32_t)((scores + 1) / 2) * 0x9E3779B9u;
  }
  if (!failed) qsort(spans, (size_t)count, sizeof *spans, longest_first);
#pragma omp parallel num_threads(c->threads) if (first > WORTHWHILE) reduction(| : failed)
  {
    char *memory = aligned_alloc(64, (size_t)up(most + 64, 64));
    failed |= !memory;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count * c->heads; i++)
      if (memory) task(c, spans + i / c->heads, i % c->heads, memory);
    free(memory);
  }
  free(spans);
  return failed;
}

/* A kernel's own: one head of one sequence, and the bytes that needs for so many queries and keys. */
static void forward_task(const Call *, const Span *, int64_t head, char *memory);
static void backward_task(const Call *, const Span *, int64_t head, char *memory);
static int64_t forward_memory(const Call *, int64_t queries, int64_t keys);
static int64_t backward_memory(const Call *, int64_t queries, int64_t keys);

/* 0 if done, 1 if there was no memory, -1 if this CPU is not for it, or the system does not let it. */
#ifndef MAY_RUN
#define MAY_RUN 1
#endif
int forward(const Call *c) { return MAY_RUN ? run(c, forward_task, forward_memory) : -1; }
int backward(const Call *c) { return MAY_RUN ? run(c, backward_task, backward_memory) : -1; }

/* Leaves words on the stack where a task's variables will lie: a compiler's reading what it has not written then shows
   when results are compared, and does not wait for a run that leaves others there. */
__attribute__((noinline)) void litter(void) {
  volatile uint64_t words[4096];
  for (int i = 0; i < 4096; i++) words[i] = 0xA5A5A5A5A5A5A5A5u;
}
