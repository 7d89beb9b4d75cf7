/* Attention in float32 by vector extensions: float32 pools, and bfloat16 pools on CPUs without instructions for it.
 *
 * q[dim][row]    k, v[key][dim]    with head_dim filled up to a multiple of 16 by zeros
 */
#include "attention_kernels.h"

static int padded(int head_dim) { return rf_round_up(head_dim, 16); }

static inline float read(const void *row, int dim, int is_bf16) {
  return is_bf16 ? bf16_to_float(((const uint16_t *)row)[dim]) : ((const float *)row)[dim];
}

static inline void load_queries(rf_attention_scratch *scratch, int slot, const void *const *rows, int first,
                                int num_rows, int head_dim, int is_bf16) {
  float *q = scratch->q[slot];
  memset(q, 0, (size_t)padded(head_dim) * RF_LANES * sizeof *q);
  for (int row = 0; row < num_rows; row++)
    for (int dim = 0; dim < head_dim; dim++) q[dim * RF_LANES + first + row] = read(rows[row], dim, is_bf16);
}

static inline void load_row(float *to, const void *from, int head_dim, int is_bf16) {
  int whole = head_dim / 16 * 16;
  for (int dim = 0; dim < whole; dim += 16)
    v_store(to + dim, is_bf16 ? v_from_bf16((const uint16_t *)from + dim) : v_load((const float *)from + dim));
  if (whole == head_dim) return;
  memset(to + whole, 0, 16 * sizeof *to);
  for (int dim = whole; dim < head_dim; dim++) to[dim] = read(from, dim, is_bf16);
}

/* Keys that only fill the last 16 of a block are zero. */
static inline void load_rows(float *to, const rf_block *block, int head_dim, int is_bf16) {
  int width = padded(head_dim), filled = rf_round_up(block->count, 16);
  for (int key = 0; key < block->count; key++)
    load_row(to + key * width, block->base + block->slots[key] * block->slot_bytes, head_dim, is_bf16);
  memset(to + block->count * width, 0, (size_t)((filled - block->count) * width) * sizeof *to);
}

/* As many keys at once as keep the multipliers busy. */
#ifdef __AVX512F__
#define KEYS 8
#else
#define KEYS 4
#endif

static void score(rf_attention_scratch *scratch, int q_slot, int k_slot, int num_slots, int num_keys, int head_dim) {
  int width = padded(head_dim);
  for (int key = 0; key < rf_round_up(num_keys, 16); key += KEYS) {
    v16f sums[KEYS] = {{0}};
    for (int slot = 0; slot < num_slots; slot++) {
      const float *q = scratch->q[q_slot + slot], *k = scratch->k[k_slot + slot] + key * width;
      for (int dim = 0; dim < width; dim++) {
        v16f column = v_load(q + dim * RF_LANES);
        for (int i = 0; i < KEYS; i++) sums[i] += column * k[i * width + dim];
      }
    }
    for (int i = 0; i < KEYS; i++) v_store(scratch->scores[key + i], sums[i]);
  }
}

static int soften(rf_attention_scratch *scratch, int tile, int num_keys, v16i visible, float factor, v16f *scale) {
  int any_hidden = rf_hide_and_maximize(scratch, tile, num_keys, visible, factor, scale);
  v16f maximum = v_load(scratch->maximum[tile]), sums[4] = {{0}};
  for (int key = 0; key < rf_round_up(num_keys, 16); key += 4) {
    for (int i = 0; i < 4; i++) {
      v16f p = v_exp2(v_load(scratch->scores[key + i]) * factor - maximum);
      if (any_hidden) p = v_select(visible >= key + i, p, (v16f){0});
      sums[i] += p;
      v_store(scratch->scores[key + i], p);
      rf_prefetch_row(scratch);
    }
  }
  v_store(scratch->sum[tile], v_load(scratch->sum[tile]) * *scale + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
  return v_any(*scale != 1.0f);
}

/* `rows` is a constant where this is inlined. */
static inline __attribute__((always_inline)) void accumulate_rows(rf_attention_scratch *scratch, int slot, int first,
                                                                  int row, int rows, int num_keys, int width) {
  for (int dim = 0; dim < width; dim += 16) {
    v16f sums[4];
    for (int i = 0; i < rows; i++) sums[i] = v_load(scratch->out[slot][dim / 16][row + i]);
    for (int key = 0; key < num_keys; key++) {
      v16f v = v_load(scratch->v + key * width + dim);
      for (int i = 0; i < rows; i++) sums[i] += v * scratch->scores[key][first + row + i];
    }
    for (int i = 0; i < rows; i++) v_store(scratch->out[slot][dim / 16][row + i], sums[i]);
  }
}

static void accumulate(rf_attention_scratch *scratch, int slot, int first, int num_rows, int num_keys, int head_dim) {
  int width = padded(head_dim), row = 0;
  for (; row + 4 <= num_rows; row += 4) accumulate_rows(scratch, slot, first, row, 4, num_keys, width);
  switch (num_rows - row) {
    case 1: accumulate_rows(scratch, slot, first, row, 1, num_keys, width); break;
    case 2: accumulate_rows(scratch, slot, first, row, 2, num_keys, width); break;
    case 3: accumulate_rows(scratch, slot, first, row, 3, num_keys, width); break;
    default: break;
  }
}

static v16f read_out(const rf_attention_scratch *scratch, int slot, int row, int dim, int head_dim) {
  (void)head_dim;
  return v_load(scratch->out[slot][dim / 16][row]);
}

static void begin(int num_rows) { (void)num_rows; }
static void end(void) {}

#define FORM(name, is_bf16)                                                                                        \
  static void load_queries_##name(rf_attention_scratch *scratch, int slot, const void *const *rows, int first,     \
                                  int num_rows, int head_dim) {                                                    \
    load_queries(scratch, slot, rows, first, num_rows, head_dim, is_bf16);                                         \
  }                                                                                                                \
  static void load_keys_##name(rf_attention_scratch *scratch, int slot, const rf_block *block, int head_dim) {     \
    load_rows(scratch->k[slot], block, head_dim, is_bf16);                                                         \
  }                                                                                                                \
  static void load_values_##name(rf_attention_scratch *scratch, const rf_block *block, int head_dim) {             \
    load_rows(scratch->v, block, head_dim, is_bf16);                                                               \
  }                                                                                                                \
  const rf_attention_kernel rf_attention_##name = {                                                                \
      begin, end, load_queries_##name, load_keys_##name, load_values_##name, score, soften, accumulate, read_out};

FORM(f32, 0)
FORM(bf16_as_f32, 1)
