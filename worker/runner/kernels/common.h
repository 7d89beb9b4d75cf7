/* What all kernels share: element types, vectors of 16 floats, exp2.
 *
 * Vectors are GCC's and Clang's vector extensions: the compiler maps them to whatever the CPU has (one register of
 * AVX-512, two of AVX2, four of NEON). Only where an instruction has no form in C, files use intrinsics under #if.
 * All computation is in float32; bfloat16 is a storage format, as uint16_t.
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

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define RF_HAS_AVX512_BF16 1
#if defined(__AMX_BF16__) && defined(__linux__)
#define RF_HAS_AMX 1
#endif
#endif

typedef float v16f __attribute__((vector_size(64), may_alias));
typedef int32_t v16i __attribute__((vector_size(64), may_alias));
typedef uint32_t v16u __attribute__((vector_size(64), may_alias));
typedef uint16_t v16h __attribute__((vector_size(32), may_alias));
/* The same, where the address is that of an element only. */
typedef float v16f_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t v16h_any __attribute__((vector_size(32), aligned(2), may_alias));

/* Whether the CPU and the system let this process use AMX; set once by rf_init. */
extern int rf_amx_usable;

static inline int rf_ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int rf_round_up(int a, int b) { return rf_ceil_div(a, b) * b; }
static inline int rf_min(int a, int b) { return a < b ? a : b; }
static inline int rf_max(int a, int b) { return a > b ? a : b; }

static inline v16f v_splat(float x) { return x - (v16f){0}; }
static inline v16f v_load(const float *p) { return *(const v16f_any *)p; }
static inline void v_store(float *p, v16f x) { *(v16f_any *)p = x; }

/* Lanes of `a` where the mask is set (all ones), else of `b`. */
static inline v16f v_select(v16i mask, v16f a, v16f b) { return (v16f)(((v16i)a & mask) | ((v16i)b & ~mask)); }

static inline int v_any(v16i mask) {
  typedef int64_t v8l __attribute__((vector_size(64), may_alias));
  v8l halves = (v8l)mask;
  int64_t any = 0;
  for (int i = 0; i < 8; i++) any |= halves[i];
  return any != 0;
}

/* The larger of the two; where either is a NaN, `x`. */
static inline v16f v_max(v16f other, v16f x) {
#ifdef __AVX512F__
  return (v16f)_mm512_max_ps((__m512)other, (__m512)x);
#else
  return v_select(x < other, other, x);
#endif
}

static inline float v_sum(v16f x) {
  float sum = 0;
  for (int i = 0; i < RF_LANES; i++) sum += x[i];
  return sum;
}

static inline float bf16_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline v16f v_from_bf16(const uint16_t *p) {
  v16u bits = __builtin_convertvector(*(const v16h_any *)p, v16u) << 16;
  return (v16f)bits;
}

/* Rounds to nearest even; a NaN stays one. */
static inline v16h v_to_bf16(v16f x) {
#ifdef RF_HAS_AVX512_BF16
  return (v16h)_mm512_cvtneps_pbh((__m512)x);
#else
  v16u bits = (v16u)x;
  v16u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  v16u quiet = (bits >> 16) | 0x40;
  v16i is_nan = x != x;
  return __builtin_convertvector((rounded & ~(v16u)is_nan) | (quiet & (v16u)is_nan), v16h);
#endif
}

static inline void v_store_bf16(uint16_t *p, v16f x) { *(v16h_any *)p = v_to_bf16(x); }

static inline uint16_t float_to_bf16(float x) { return v_to_bf16(v_splat(x))[0]; }

/* 2^x for x <= 126, exact to 2e-7 relative; below -126 it is 2^-126, because denormals are slow; NaN for NaN.
 *
 * x = n + f with n whole and |f| <= 1/2; 2^f by a polynomial fitted for the least relative error (9e-8).
 */
static inline v16f v_exp2(v16f x) {
  v16f bounded = v_max(v_splat(-126.0f), x);
#ifdef __AVX512F__
  v16f n = (v16f)_mm512_roundscale_ps((__m512)bounded, _MM_FROUND_TO_NEAREST_INT);
#else
  const float shift = 12582912.0f; /* 1.5 * 2^23: the last bit of a sum with it is worth 1 */
  v16f shifted = bounded + shift, n = shifted - shift;
#endif
  v16f f = bounded - n;
  v16f y = v_splat(1.326472707e-3f);
  y = y * f + 9.671512649e-3f;
  y = y * f + 5.550733744e-2f;
  y = y * f + 2.402224209e-1f;
  y = y * f + 6.931469776e-1f;
  y = y * f + 1.0f;
#ifdef __AVX512F__
  return (v16f)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  return v_select(x != x, x, (v16f)((v16u)y + ((v16u)shifted << 23)));
#endif
}

/* x / (1 + e^-x) */
static inline v16f v_silu(v16f x) { return x / (v_exp2(-v_max(v_splat(-126.0f), x * RF_LOG2E)) + 1.0f); }

#endif
