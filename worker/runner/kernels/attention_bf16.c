/* Attention in bfloat16 products with float32 sums: by AVX512-BF16, or by AMX, which shares the layouts.
 *
 * q      [dim / 32][16 pairs of dims][row][2]
 * k      groups of 16 keys [key][dim], in the pool where their slots follow one another, else copied
 * v      [key / 32][16 pairs of keys][dim][2]
 * p      [row][key]
 */
#include "attention_kernels.h"

#ifdef RF_HAS_AVX512_BF16

#include "amx.h"

static void load_queries(rf_attention_scratch *scratch, int slot, const void *const *rows, int first, int num_rows,
                         int head_dim) {
  uint32_t *q = (uint32_t *)scratch->q[slot];
  memset(q, 0, (size_t)rf_ceil_div(head_dim, 32) * 16 * RF_LANES * sizeof *q);
  for (int row = 0; row < num_rows; row++) {
    const uint16_t *from = rows[row];
    for (int pair = 0; pair < head_dim / 2; pair++)
      q[pair * RF_LANES + first + row] = from[2 * pair] | (uint32_t)from[2 * pair + 1] << 16;
  }
}

static inline const char *row_at(const rf_block *block, int key) {
  return block->base + block->slots[key] * block->slot_bytes;
}

static int follow_one_another(const int32_t *slots) {
  __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i run = _mm512_add_epi32(_mm512_set1_epi32(slots[0]), steps);
  return _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(slots), run) == 0;
}

static void load_keys(rf_attention_scratch *scratch, int slot, const rf_block *block, int head_dim) {
  int width = rf_ceil_div(head_dim, 32) * 32;
  for (int group = 0; group * 16 < block->count; group++) {
    int first = group * 16, count = rf_min(16, block->count - first);
    if (count == 16 && width == head_dim && follow_one_another(block->slots + first)) {
      scratch->k_groups[slot][group] = row_at(block, first);
      scratch->k_strides[slot][group] = block->slot_bytes;
      continue;
    }
    uint16_t *copy = (uint16_t *)scratch->k[slot] + first * width;
    scratch->k_groups[slot][group] = (const char *)copy;
    scratch->k_strides[slot][group] = width * 2;
    if (count < 16 || width != head_dim) memset(copy, 0, (size_t)(16 * width) * sizeof *copy);
    for (int key = 0; key < count; key++) {
      const uint16_t *from = (const uint16_t *)row_at(block, first + key);
      int dim = 0;
      for (; dim + 32 <= head_dim; dim += 32)
        _mm512_store_si512(copy + key * width + dim, _mm512_loadu_si512(from + dim));
      if (dim < head_dim) /* 16 more */
        _mm256_store_si256((__m256i *)(copy + key * width + dim), _mm256_loadu_si256((const __m256i *)(from + dim)));
    }
  }
}

/* Pairs of keys side by side. Keys that fill up the last 32 are zero: they are multiplied by 0 and must be finite.
 *
 * Unpacking works within quarters of a register, so each 32 dims lie as 0-3 8-11 16-19 24-27, 4-7 12-15 20-23 28-31 (16
 * at the end: 0-3 8-11, 4-7 12-15), which is put right in read_out. The instruction that would keep them in order takes
 * three times as long.
 */
static void load_values(rf_attention_scratch *scratch, const rf_block *block, int head_dim) {
  RF_ALIGNED static const uint16_t zeros[RF_MAX_HEAD_DIM];
  uint16_t *v = (uint16_t *)scratch->v;
  for (int pair = 0; pair < rf_ceil_div(block->count, 32) * 16; pair++, v += 2 * head_dim) {
    const uint16_t *even = 2 * pair < block->count ? (const uint16_t *)row_at(block, 2 * pair) : zeros;
    const uint16_t *odd = 2 * pair + 1 < block->count ? (const uint16_t *)row_at(block, 2 * pair + 1) : zeros;
    rf_prefetch_row(scratch);
    int dim = 0;
    for (; dim + 32 <= head_dim; dim += 32) {
      __m512i a = _mm512_loadu_si512(even + dim), b = _mm512_loadu_si512(odd + dim);
      _mm512_store_si512(v + 2 * dim, _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(v + 2 * dim + 32, _mm512_unpackhi_epi16(a, b));
    }
    if (dim < head_dim) {
      __m256i a = _mm256_loadu_si256((const __m256i *)(even + dim));
      __m256i b = _mm256_loadu_si256((const __m256i *)(odd + dim));
      _mm256_store_si256((__m256i *)(v + 2 * dim), _mm256_unpacklo_epi16(a, b));
      _mm256_store_si256((__m256i *)(v + 2 * dim + 16), _mm256_unpackhi_epi16(a, b));
    }
  }
}

static v16f read_out(const rf_attention_scratch *scratch, int slot, int row, int dim, int head_dim) {
  v16f x;
  int pair = dim / 32 * 2, last = pair * 16 + 32 > head_dim;
  for (int quarter = 0; quarter < 4; quarter++) {
    int which = dim % 32 / 4 + quarter; /* of the 4 dims, from the first of the 32 on */
    const float *from = last ? scratch->out[slot][pair][row] + which / 2 * 4 + which % 2 * 8
                             : scratch->out[slot][pair + which % 2][row] + which / 2 * 4;
    memcpy((float *)&x + 4 * quarter, from, 4 * sizeof *from);
  }
  return x;
}

static void transpose_16x16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; j++) {
      t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
    }
  }
  for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

/* Of 16 elements of a and the 16 after them, the interleaved: 0 16 1 17 ... */
RF_ALIGNED static const uint16_t interleave[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

/* 2^x with an error of 1e-4, of which rounding to bfloat16 leaves nothing to see. As v_exp2 otherwise: x is split into
 * its floor and the rest, which two instructions of AVX-512 do by themselves. */
static inline __m512 coarse_exp2(v16f x) {
  __m512 bounded = (__m512)v_max(v_splat(-125.0f), x); /* y is a little below 1 at f = 0 */
  v16f f = (v16f)_mm512_reduce_ps(bounded, _MM_FROUND_TO_NEG_INF);
  v16f y = v_splat(7.802452170e-2f);
  y = y * f + 2.260671568e-1f;
  y = y * f + 6.958335400e-1f;
  y = y * f + 9.999252186e-1f;
  return _mm512_scalef_ps((__m512)y, bounded);
}

/* First half of `soften`: hides what is not visible, finds maximum and scale. Gives whether anything is hidden. */
static int hide_and_maximize(rf_attention_scratch *scratch, int tile, int num_keys, v16i visible, float factor,
                             v16f *scale) {
  int filled = rf_ceil_div(num_keys, 16) * 16, any_hidden = v_any(visible < filled - 1);
  v16f hidden = v_splat(RF_HIDDEN);
  v16f maxima[4] = {hidden, hidden, hidden, hidden}; /* four, because one would wait for itself at each key */
  for (int key = 0; key < filled; key += 4) {
    for (int i = 0; i < 4; i++) {
      v16f score = v_load(scratch->scores[key + i]);
      if (any_hidden) {
        score = v_select(visible >= key + i, score, hidden);
        v_store(scratch->scores[key + i], score);
      }
      maxima[i] = v_max(score, maxima[i]); /* passes over a NaN, which stays in the score */
    }
  }
  v16f old = v_load(scratch->maximum[tile]);
  v16f highest = v_max(v_max(maxima[0], maxima[1]), v_max(maxima[2], maxima[3]));
  v16f maximum = v_max(old, highest * factor);
  *scale = v_exp2(old - maximum);
  v_store(scratch->maximum[tile], maximum);
  return any_hidden;
}

static int soften(rf_attention_scratch *scratch, int tile, int num_rows, int num_keys, v16i visible, float factor,
                  v16f *scale) {
  (void)num_rows; /* all lanes are computed */
  int any_hidden = hide_and_maximize(scratch, tile, num_keys, visible, factor, scale);
  const __m512i order = _mm512_load_si512(interleave);
  int filled = rf_ceil_div(num_keys, 16) * 16;
  v16f maximum = v_load(scratch->maximum[tile]), sum_even = {0}, sum_odd = {0};
  for (int first = 0; first < filled; first += 32) {
    __m512i pairs[16];
    int num_pairs = rf_min(32, filled - first) / 2;
    for (int i = 0; i < num_pairs; i++) {
      int key = first + 2 * i;
      v16f even = (v16f)coarse_exp2(v_load(scratch->scores[key]) * factor - maximum);
      v16f odd = (v16f)coarse_exp2(v_load(scratch->scores[key + 1]) * factor - maximum);
      if (any_hidden) {
        even = v_select(visible >= key, even, (v16f){0});
        odd = v_select(visible >= key + 1, odd, (v16f){0});
      }
      sum_even += even;
      sum_odd += odd;
      rf_prefetch_row(scratch);
      pairs[i] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
    }
    for (int i = num_pairs; i < 16; i++) pairs[i] = _mm512_setzero_si512();
    transpose_16x16(pairs);
    for (int row = 0; row < RF_LANES; row++) _mm512_store_si512(&scratch->p[row][first], pairs[row]);
  }
  v_store(scratch->sum[tile], v_load(scratch->sum[tile]) * *scale + (sum_even + sum_odd));
  return v_any(*scale != 1.0f);
}

static inline __m512i pair_of(const void *p) {
  int32_t bits;
  memcpy(&bits, p, sizeof bits);
  return _mm512_set1_epi32(bits);
}

static void score_avx512(rf_attention_scratch *scratch, int q_slot, int k_slot, int num_slots, int num_rows,
                         int num_keys, int head_dim) {
  (void)num_rows;
  int num_pairs = rf_ceil_div(head_dim, 32) * 16;
  for (int key = 0; key < rf_ceil_div(num_keys, 16) * 16; key += 8) {
    __m512 sums[8] = {{0}};
    for (int slot = 0; slot < num_slots; slot++) {
      const uint16_t *q = (const uint16_t *)scratch->q[q_slot + slot];
      int64_t stride = scratch->k_strides[k_slot + slot][key / 16];
      const char *k = scratch->k_groups[k_slot + slot][key / 16] + key % 16 * stride;
      for (int pair = 0; pair < num_pairs; pair++) {
        __m512bh column = (__m512bh)_mm512_load_si512(q + pair * 32);
        for (int i = 0; i < 8; i++)
          sums[i] = _mm512_dpbf16_ps(sums[i], column, (__m512bh)pair_of(k + i * stride + 4 * pair));
      }
    }
    for (int i = 0; i < 8; i++) _mm512_store_ps(scratch->scores[key + i], sums[i]);
  }
}

static inline __attribute__((always_inline)) void accumulate_rows(rf_attention_scratch *scratch, int slot, int first,
                                                                  int row, int rows, int num_keys, int head_dim) {
  for (int dim = 0; dim < head_dim; dim += 16) {
    __m512 sums[4];
    for (int i = 0; i < rows; i++) sums[i] = _mm512_load_ps(scratch->out[slot][dim / 16][row + i]);
    for (int key = 0; key < num_keys; key += 2) {
      __m512bh v = (__m512bh)_mm512_load_si512((const uint16_t *)scratch->v + key * head_dim + 2 * dim);
      for (int i = 0; i < rows; i++)
        sums[i] = _mm512_dpbf16_ps(sums[i], v, (__m512bh)pair_of(&scratch->p[first + row + i][key]));
    }
    for (int i = 0; i < rows; i++) _mm512_store_ps(scratch->out[slot][dim / 16][row + i], sums[i]);
  }
}

static void accumulate_avx512(rf_attention_scratch *scratch, int slot, int first, int num_rows, int num_keys,
                              int head_dim) {
  int row = 0;
  for (; row + 4 <= num_rows; row += 4) accumulate_rows(scratch, slot, first, row, 4, num_keys, head_dim);
  switch (num_rows - row) {
    case 1: accumulate_rows(scratch, slot, first, row, 1, num_keys, head_dim); break;
    case 2: accumulate_rows(scratch, slot, first, row, 2, num_keys, head_dim); break;
    case 3: accumulate_rows(scratch, slot, first, row, 3, num_keys, head_dim); break;
    default: break;
  }
}

static void begin_avx512(int num_rows) { (void)num_rows; }
static void end_avx512(void) {}

const rf_attention_kernel rf_attention_avx512_bf16 = {
    begin_avx512, end_avx512, load_queries, load_keys, load_values, score_avx512, soften, accumulate_avx512, read_out};

#endif

#ifdef RF_HAS_AMX

/* Tiles 0 to 4 have 16 rows; 5 to 7 have as many as a slot, because products take less time with fewer. */
static void score_amx(rf_attention_scratch *scratch, int q_slot, int k_slot, int num_slots, int num_rows, int num_keys,
                      int head_dim) {
  (void)num_rows;
  int num_groups = rf_ceil_div(num_keys, 16);
  for (int group = 0; group < num_groups; group += 2) {
    int two = group + 1 < num_groups;
    _tile_zero(0);
    _tile_zero(1);
    for (int slot = 0; slot < num_slots; slot++) {
      const char *q = (const char *)scratch->q[q_slot + slot];
      const char *const *k = &scratch->k_groups[k_slot + slot][group];
      const int64_t *strides = &scratch->k_strides[k_slot + slot][group];
      for (int at = 0; at < head_dim * 2; at += 64, q += 1024) {
        _tile_loadd(2, q, 64);
        _tile_loadd(3, k[0] + at, strides[0]);
        _tile_dpbf16ps(0, 3, 2);
        if (two) {
          _tile_loadd(4, k[1] + at, strides[1]);
          _tile_dpbf16ps(1, 4, 2);
        }
        rf_prefetch_row(scratch);
        rf_prefetch_row(scratch);
      }
    }
    _tile_stored(0, scratch->scores[group * 16], 64);
    if (two) _tile_stored(1, scratch->scores[group * 16 + 16], 64);
  }
}

static void accumulate_amx(rf_attention_scratch *scratch, int slot, int first, int num_rows, int num_keys,
                           int head_dim) {
  (void)num_rows; /* the tiles have as many */
  const uint16_t *v = (const uint16_t *)scratch->v;
  int64_t stride = head_dim * 4;
  for (int dim = 0; dim < head_dim; dim += 32) {
    int two = dim + 16 < head_dim;
    float(*out)[RF_LANES][16] = &scratch->out[slot][dim / 16];
    _tile_loadd(6, out[0], 64);
    if (two) _tile_loadd(7, out[1], 64);
    for (int key = 0; key < num_keys; key += 32) {
      const uint16_t *values = v + key * head_dim + 2 * dim;
      _tile_loadd(5, &scratch->p[first][key], sizeof scratch->p[0]);
      _tile_loadd(3, values, stride);
      _tile_dpbf16ps(6, 5, 3);
      if (two) {
        _tile_loadd(4, values + 32, stride);
        _tile_dpbf16ps(7, 5, 4);
      }
    }
    _tile_stored(6, out[0], 64);
    if (two) _tile_stored(7, out[1], 64);
  }
}

static void begin_amx(int num_rows) {
  const int rows[8] = {16, 16, 16, 16, 16, num_rows, num_rows, num_rows};
  rf_amx_configure(rows);
}

const rf_attention_kernel rf_attention_amx = {
    begin_amx, rf_amx_end, load_queries, load_keys, load_values, score_amx, soften, accumulate_amx, read_out};

#endif
