/* Attention in float32 by vector extensions: float32 pools, and bfloat16 pools on CPUs without instructions for it.
 *
 * q        [row][dim], of one slot
 * k, v     in the pool; where a head does not fill whole vectors, copies that zeros fill up
 * scores   [row][key]
 *
 * Dims are the lanes of vectors, so that few rows (a decode has one for each query head of a KV head) waste none, and K
 * and V are read where they are. A score is the sum of its lanes: always in the same order, whatever is computed beside
 * it.
 */
#include "attention_kernels.h"

#define KEYS 4    /* scores of so many keys by so many rows are summed at once: */
#define ROWS 3    /* 12 sums, which 16 registers hold beside what is multiplied */
#define VECTORS 4 /* of dims that are accumulated at once, for as many rows */
#define PREFETCHES 2 /* rows that are asked for with so many keys */

static int padded(int head_dim) { return rf_round_up(head_dim, 16); }

static inline floats read(const void *row, int dim, int is_bf16) {
  return is_bf16 ? v_from_bf16((const uint16_t *)row + dim) : v_load((const float *)row + dim);
}

static inline void load_queries(rf_attention_scratch *scratch, int slot, const void *const *rows, int num_rows,
                                int head_dim, int is_bf16) {
  int width = padded(head_dim);
  float *q = scratch->q[slot];
  memset(q, 0, (size_t)(num_rows * width) * sizeof *q);
  for (int row = 0; row < num_rows; row++)
    for (int dim = 0; dim < head_dim; dim++)
      q[row * width + dim] = is_bf16 ? bf16_to_float(((const uint16_t *)rows[row])[dim]) : ((const float *)rows[row])[dim];
}

/* Where the rows of a block lie; the last one stands for those that fill up KEYS. */
static inline void load_rows(const char **at, void *copies, const rf_block *block, int head_dim, int is_bf16) {
  int size = is_bf16 ? 2 : 4, width = padded(head_dim);
  for (int key = 0; key < block->count; key++) {
    at[key] = block->base + block->slots[key] * block->slot_bytes;
    if (width == head_dim) continue;
    char *copy = (char *)copies + key * width * size;
    memset(copy, 0, (size_t)(width * size));
    at[key] = memcpy(copy, at[key], (size_t)(head_dim * size));
  }
  for (int key = block->count; key < rf_round_up(block->count, KEYS); key++) at[key] = at[block->count - 1];
}

/* The sums of the lanes of each. */
static inline void sum_lanes(const floats *x, float *sums) {
#if defined(__AVX__)
  __m256 parts[4];
  for (int i = 0; i < 4; i++) {
#ifdef __AVX512F__
    __m512d whole = _mm512_castps_pd((__m512)x[i]);
    parts[i] = _mm256_add_ps(_mm256_castpd_ps(_mm512_castpd512_pd256(whole)),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(whole, 1)));
#else
    parts[i] = (__m256)x[i];
#endif
  }
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(parts[0], parts[1]), _mm256_hadd_ps(parts[2], parts[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#elif defined(__aarch64__)
  float32x4_t first = vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]);
  vst1q_f32(sums, vpaddq_f32(first, vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3])));
#else
  for (int i = 0; i < 4; i++) sums[i] = v_sum(x[i]);
#endif
}

/* `rows` is a constant where this is inlined, as below. */
static inline __attribute__((always_inline)) void score_rows(const float *q, int rows, const char *const *k, int width,
                                                             int is_bf16, float (*scores)[RF_BLOCK]) {
  floats sums[ROWS][KEYS] = {{{0}}};
  for (int dim = 0; dim < width; dim += RF_WIDTH) {
    floats keys[KEYS];
    for (int i = 0; i < KEYS; i++) keys[i] = read(k[i], dim, is_bf16);
    for (int row = 0; row < rows; row++)
      for (int i = 0; i < KEYS; i++) sums[row][i] += v_load(q + row * width + dim) * keys[i];
  }
  for (int row = 0; row < rows; row++) sum_lanes(sums[row], scores[row]);
}

static inline void score(rf_attention_scratch *scratch, int q_slot, int k_slot, int num_slots, int num_rows,
                         int num_keys, int head_dim, int is_bf16) {
  int width = padded(head_dim);
  for (int slot = 0; slot < num_slots; slot++) {
    for (int key = 0; key < num_keys; key += KEYS) {
      const char *const *k = scratch->k_rows[k_slot + slot] + key;
      for (int row = 0; row < num_rows; row += ROWS) {
        const float *q = scratch->q[q_slot + slot] + row * width;
        float(*scores)[RF_BLOCK] = (float(*)[RF_BLOCK])&scratch->by_row[slot * num_rows + row][key];
        switch (rf_min(num_rows - row, ROWS)) {
          case 1: score_rows(q, 1, k, width, is_bf16, scores); break;
          case 2: score_rows(q, 2, k, width, is_bf16, scores); break;
          default: score_rows(q, 3, k, width, is_bf16, scores); break;
        }
      }
      for (int i = 0; i < PREFETCHES; i++) rf_prefetch_row(scratch);
    }
  }
}

/* Gives the maximum. */
static inline float maximize(float *scores, int num_keys, int visible, float factor) {
  ints key;
  for (int lane = 0; lane < RF_WIDTH; lane++) key[lane] = lane;
  floats maxima = v_splat(RF_HIDDEN);
  for (int i = 0; i < num_keys; i += RF_WIDTH, key += RF_WIDTH) {
    floats score = v_select(key <= visible, v_load(scores + i) * factor, v_splat(RF_HIDDEN));
    maxima = v_max(score, maxima); /* passes over a NaN, which stays in the score */
    v_store(scores + i, score);
  }
  float maximum = RF_HIDDEN;
  for (int lane = 0; lane < RF_WIDTH; lane++) maximum = maxima[lane] > maximum ? maxima[lane] : maximum;
  return maximum;
}

static int soften(rf_attention_scratch *scratch, int tile, int num_rows, int num_keys, v16i visible, float factor,
                  v16f *scale) {
  float *maximum = scratch->maximum[tile], *sum = scratch->sum[tile];
  RF_ALIGNED float scales[RF_LANES] = {0};
  int any_scaled = 0;
  for (int row = 0; row < num_rows; row++) {
    float *scores = scratch->by_row[row], highest = maximize(scores, num_keys, visible[row], factor);
    highest = highest > maximum[row] ? highest : maximum[row];
    floats sums = {0};
    for (int i = 0; i < num_keys; i += RF_WIDTH) {
      floats score = v_load(scores + i), p = v_exp2(score - highest);
      p = v_select(score == RF_HIDDEN, (floats){0}, p);
      sums += p;
      v_store(scores + i, p);
    }
    scales[row] = v_exp2(v_splat(maximum[row] - highest))[0];
    any_scaled |= scales[row] != 1;
    sum[row] = sum[row] * scales[row] + v_sum(sums);
    maximum[row] = highest;
  }
  memcpy(scale, scales, sizeof *scale);
  return any_scaled;
}

/* `rows` and `vectors` are constants where this is inlined. */
static inline __attribute__((always_inline)) void accumulate_rows(float (*out)[16], int rows,
                                                                  const float (*p)[RF_BLOCK], const char *const *v,
                                                                  int num_keys, int dim, int vectors, int is_bf16) {
  floats sums[ROWS][VECTORS];
  for (int row = 0; row < rows; row++)
    for (int i = 0; i < vectors; i++)
      sums[row][i] = v_load(&out[i * RF_WIDTH / 16 * RF_LANES + row][i * RF_WIDTH % 16]);
  for (int key = 0; key < num_keys; key++) {
    for (int i = 0; i < vectors; i++) {
      floats value = read(v[key], dim + i * RF_WIDTH, is_bf16);
      for (int row = 0; row < rows; row++) sums[row][i] += value * p[row][key];
    }
  }
  for (int row = 0; row < rows; row++)
    for (int i = 0; i < vectors; i++)
      v_store(&out[i * RF_WIDTH / 16 * RF_LANES + row][i * RF_WIDTH % 16], sums[row][i]);
}

static inline void accumulate(rf_attention_scratch *scratch, int slot, int first, int num_rows, int num_keys,
                              int head_dim, int is_bf16) {
  int width = padded(head_dim), vectors;
  for (int row = 0; row < num_rows; row += ROWS) {
    const float(*p)[RF_BLOCK] = (const float(*)[RF_BLOCK])scratch->by_row[first + row];
    for (int dim = 0; dim < width; dim += vectors * RF_WIDTH) {
      float(*out)[16] = &scratch->out[slot][dim / 16][row];
      vectors = rf_min((width - dim) / RF_WIDTH, VECTORS);
      if (vectors == 3) vectors = 2;
      switch (rf_min(num_rows - row, ROWS) * 8 + vectors) {
#define CASE(rows, vectors) \
  case rows * 8 + vectors: accumulate_rows(out, rows, p, scratch->v_rows, num_keys, dim, vectors, is_bf16); break;
        CASE(1, 1)
        CASE(1, 2)
        CASE(1, 4)
        CASE(2, 1)
        CASE(2, 2)
        CASE(2, 4)
        CASE(3, 1)
        CASE(3, 2)
        CASE(3, 4)
#undef CASE
      }
    }
  }
}

static v16f read_out(const rf_attention_scratch *scratch, int slot, int row, int dim, int head_dim) {
  (void)head_dim;
  return *(const v16f *)scratch->out[slot][dim / 16][row];
}

static void begin(int num_rows) { (void)num_rows; }
static void end(void) {}

#define FORM(name, is_bf16)                                                                                           \
  static void load_queries_##name(rf_attention_scratch *scratch, int slot, const void *const *rows, int first,        \
                                  int num_rows, int head_dim) {                                                       \
    (void)first;                                                                                                      \
    load_queries(scratch, slot, rows, num_rows, head_dim, is_bf16);                                                   \
  }                                                                                                                   \
  static void load_keys_##name(rf_attention_scratch *scratch, int slot, const rf_block *block, int head_dim) {        \
    load_rows(scratch->k_rows[slot], scratch->k[slot], block, head_dim, is_bf16);                                     \
  }                                                                                                                   \
  static void load_values_##name(rf_attention_scratch *scratch, const rf_block *block, int head_dim) {                \
    load_rows(scratch->v_rows, scratch->v, block, head_dim, is_bf16);                                                 \
  }                                                                                                                   \
  static void score_##name(rf_attention_scratch *scratch, int q_slot, int k_slot, int num_slots, int num_rows,        \
                           int num_keys, int head_dim) {                                                              \
    score(scratch, q_slot, k_slot, num_slots, num_rows, num_keys, head_dim, is_bf16);                                 \
  }                                                                                                                   \
  static void accumulate_##name(rf_attention_scratch *scratch, int slot, int first, int num_rows, int num_keys,       \
                                int head_dim) {                                                                       \
    accumulate(scratch, slot, first, num_rows, num_keys, head_dim, is_bf16);                                          \
  }                                                                                                                   \
  const rf_attention_kernel rf_attention_##name = {                                                                   \
      begin, end, load_queries_##name, load_keys_##name, load_values_##name, score_##name, soften, accumulate_##name, \
      read_out};

FORM(f32, 0)
FORM(bf16_as_f32, 1)
