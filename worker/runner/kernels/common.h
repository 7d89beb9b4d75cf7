/* What all kernels share: element types, vectors, exp2.
 *
 * Vectors are GCC's and Clang's vector extensions. Where it matters they are as wide as the CPU's registers: compilers
 * keep no wider ones in them, but write each result to memory. Only where an instruction has no form in C, files use
 * intrinsics under #if. All computation is in float32; bfloat16 is a storage format, as uint16_t.
 */
#ifndef RF_COMMON_H
#define RF_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define RF_LANES 16
#define RF_EXPORT __attribute__((visibility("default")))
#define RF_ALIGNED __attribute__((aligned(64)))
#define RF_LOG2E 1.44269504088896340736f

#ifdef __AVX__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define RF_HAS_AVX512_BF16 1
#if defined(__AMX_BF16__) && defined(__linux__)
#define RF_HAS_AMX 1
#endif
#endif

#if defined(__AVX512F__)
#define RF_WIDTH 16
#elif defined(__AVX__)
#define RF_WIDTH 8
#else
#define RF_WIDTH 4
#endif

/* One register. The address is that of an element only. */
typedef float floats __attribute__((vector_size(4 * RF_WIDTH), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * RF_WIDTH), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * RF_WIDTH), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * RF_WIDTH), aligned(2), may_alias));

typedef float v16f __attribute__((vector_size(64), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), may_alias));

/* Whether the CPU and the system let this process use AMX; set once by rf_init. */
extern int rf_amx_usable;

static inline int rf_ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int rf_round_up(int a, int b) { return rf_ceil_div(a, b) * b; }
static inline int rf_min(int a, int b) { return a < b ? a : b; }
static inline int rf_max(int a, int b) { return a > b ? a : b; }

static inline floats v_splat(float x) { return x - (floats){0}; }
static inline floats v_load(const float *p) { return *(const floats *)p; }
static inline void v_store(float *p, floats x) { *(floats *)p = x; }

/* Lanes of `a` where the mask is set (all ones), else of `b`. */
static inline floats v_select(ints mask, floats a, floats b) { return (floats)(((ints)a & mask) | ((ints)b & ~mask)); }

static inline int v_any(ints mask) {
  typedef int64_t longs __attribute__((vector_size(4 * RF_WIDTH), may_alias));
  longs parts = (longs)mask;
  int64_t any = 0;
  for (int i = 0; i < RF_WIDTH / 2; i++) any |= parts[i];
  return any != 0;
}

/* The larger of the two; where either is a NaN, `x`. */
static inline floats v_max(floats other, floats x) {
#if defined(__AVX512F__)
  return (floats)_mm512_max_ps((__m512)other, (__m512)x);
#elif defined(__AVX__)
  return (floats)_mm256_max_ps((__m256)other, (__m256)x);
#else
  return v_select(x < other, other, x);
#endif
}

static inline float v_sum(floats x) {
  float sum = 0;
  for (int i = 0; i < RF_WIDTH; i++) sum += x[i];
  return sum;
}

static inline float bf16_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline floats v_from_bf16(const uint16_t *p) {
  return (floats)(__builtin_convertvector(*(const halves *)p, words) << 16);
}

/* Rounds to nearest even; a NaN stays one. */
static inline halves v_to_bf16(floats x) {
#ifdef RF_HAS_AVX512_BF16
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#else
  words bits = (words)x;
  words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  words quiet = (bits >> 16) | 0x40;
  ints is_nan = x != x;
  return __builtin_convertvector((rounded & ~(words)is_nan) | (quiet & (words)is_nan), halves);
#endif
}

static inline void v_store_bf16(uint16_t *p, floats x) { *(halves *)p = v_to_bf16(x); }

static inline uint16_t float_to_bf16(float x) { return v_to_bf16(v_splat(x))[0]; }

/* 2^x for x <= 126, exact to 2e-7 relative; below -126 it is 2^-126, because denormals are slow; NaN for NaN.
 *
 * x = n + f with n whole and |f| <= 1/2; 2^f by a polynomial fitted for the least relative error (9e-8).
 */
static inline floats v_exp2(floats x) {
  floats bounded = v_max(v_splat(-126.0f), x);
#ifdef __AVX512F__
  floats n = (floats)_mm512_roundscale_ps((__m512)bounded, _MM_FROUND_TO_NEAREST_INT);
#else
  const float shift = 12582912.0f; /* 1.5 * 2^23: the last bit of a sum with it is worth 1 */
  floats shifted = bounded + shift, n = shifted - shift;
#endif
  floats f = bounded - n;
  floats y = v_splat(1.326472707e-3f);
  y = y * f + 9.671512649e-3f;
  y = y * f + 5.550733744e-2f;
  y = y * f + 2.402224209e-1f;
  y = y * f + 6.931469776e-1f;
  y = y * f + 1.0f;
#ifdef __AVX512F__
  return (floats)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  return v_select(x != x, x, (floats)((words)y + ((words)shifted << 23)));
#endif
}

/* x / (1 + e^-x) */
static inline floats v_silu(floats x) { return x / (v_exp2(-v_max(v_splat(-126.0f), x * RF_LOG2E)) + 1.0f); }

#endif
