/* What the C kernels have in common: bfloat16, and the dropout bits of fast_dropout.py. */
#include <stdint.h>
#include <string.h>

/* Word j of a mask; its low half serves element 2j, its high half element 2j + 1. */
static inline uint32_t word(uint32_t j, uint32_t k0, uint32_t k1) {
  uint32_t h = j * 0x9E3779B9u + k0; /* odd: no two words of a mask start alike */
  h ^= h >> 16 ^ k1; /* by xor, not by sum: masks with other keys are no shifts of this one */
  h *= 0x7FEB352Du;  /* multipliers and shifts: Chris Wellons' lowbias32 */
  h ^= h >> 15;
  h *= 0x846CA68Bu;
  return h ^ (h >> 16);
}

/* The halves of `count` words from number `first` on: 2 * count lanes, dropped where below a threshold. */
static inline void draw(int16_t *lanes, uint32_t *words, uint32_t first, int64_t count, uint32_t k0, uint32_t k1) {
  for (int64_t j = 0; j < count; j++) words[j] = word(first + (uint32_t)j, k0, k1);
  memcpy(lanes, words, (size_t)count * sizeof *words);
}

/* What lies `ahead` bytes after `here`, and so many bytes of it, is wanted soon: without this, loops with much to compute
   wait for memory that no cache holds any more. Nothing is read, so it may lie beyond the tensor's end. */
static inline void fetch(const void *here, int64_t ahead, int64_t bytes) {
  for (int64_t i = ahead; i < ahead + bytes; i += 64) __builtin_prefetch((const void *)((uintptr_t)here + (uintptr_t)i));
}

static inline float widen_uint16_t(uint16_t x) { /* a uint16_t holds a bfloat16 */
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline uint16_t narrow_uint16_t(float f) { /* to nearest, ties to even; a NaN of bfloat16 stays one */
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static inline float widen_float(float x) { return x; }
static inline float narrow_float(float x) { return x; }

static inline float power_of_e(float x) { /* x <= 0; relative error below 2e-7 */
  x = x < -87.0f ? -87.0f : x;
  float t = x * 1.44269504f;
  float whole = (t + 12582912.0f) - 12582912.0f; /* to the nearest integer: 1.5 * 2^23 */
  float f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  y = y * f * f + f + 1.0f;
  uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return y * power;
}
