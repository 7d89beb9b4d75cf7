/* The inner products of attention, in three forms: vector extensions in float32 (any CPU; for float32 and bfloat16
 * pools), AVX512-BF16, and AMX. */
#ifndef RF_ATTENTION_KERNELS_H
#define RF_ATTENTION_KERNELS_H

#include "attention.h"

/* K or V of one block and KV head in the pool. */
typedef struct {
  const char *base; /* the head's first element in KV slot 0 */
  int64_t slot_bytes;
  const int32_t *slots;
  int count; /* positions in the block, 1 to RF_BLOCK */
} rf_block;

/* What one thread works with. The layout of q, k and v is the business of the form that writes and reads them. */
typedef struct {
  RF_ALIGNED float q[RF_SLOTS][RF_MAX_HEAD_DIM * RF_LANES];
  RF_ALIGNED float k[RF_SLOTS][RF_BLOCK * RF_MAX_HEAD_DIM];
  RF_ALIGNED float v[RF_BLOCK * RF_MAX_HEAD_DIM];
  /* Where K is read in place: groups of 16 keys, in the pool or in k, and bytes from key to key. */
  const char *k_groups[RF_SLOTS][RF_BLOCK / 16];
  int64_t k_strides[RF_SLOTS][RF_BLOCK / 16];
  /* Where K and V are read row by row: in the pool, or in k and v. */
  const char *k_rows[RF_SLOTS][RF_BLOCK];
  const char *v_rows[RF_BLOCK];
  union { /* scores, then the probabilities */
    RF_ALIGNED float scores[RF_BLOCK][RF_LANES];
    RF_ALIGNED float by_row[RF_LANES][RF_BLOCK];
  };
  RF_ALIGNED uint16_t p[RF_LANES][RF_BLOCK];   /* the same by row and key, where a form needs it */
  RF_ALIGNED float out[RF_SLOTS][RF_MAX_HEAD_DIM / 16][RF_LANES][16]; /* [dim / 16][row][dim % 16], or so */
  RF_ALIGNED float maximum[RF_SLOTS][RF_LANES];                       /* by tile, as the sums */
  RF_ALIGNED float sum[RF_SLOTS][RF_LANES];
  /* Rows that the next block will read, of ahead_bytes each. */
  const char *ahead[2 * RF_BLOCK];
  int num_ahead;
  int ahead_bytes;
} rf_attention_scratch;

/* Brings a row of the next block towards the core: to the second-level cache, as a block of all KV heads is as large as
 * the first. Called between pieces of computing: memory then works all the time, while prefetches in one go would wait
 * for each other, and the computing for them. */
static inline void rf_prefetch_row(rf_attention_scratch *scratch) {
  if (scratch->num_ahead == 0) return;
  const char *row = scratch->ahead[--scratch->num_ahead];
  for (int offset = 0; offset < scratch->ahead_bytes; offset += 64) __builtin_prefetch(row + offset, 0, 2);
}

typedef struct {
  /* Each thread, before the others for slots of up to `num_rows` rows, and after them. */
  void (*begin)(int num_rows);
  void (*end)(void);
  /* q[slot] = the given rows. Forms whose lanes are rows put them from lane `first` on, and zeros in the others. */
  void (*load_queries)(rf_attention_scratch *, int slot, const void *const *rows, int first, int num_rows,
                       int head_dim);
  void (*load_keys)(rf_attention_scratch *, int slot, const rf_block *, int head_dim);
  void (*load_values)(rf_attention_scratch *, const rf_block *, int head_dim);
  /* Scores of the num_rows rows of each of num_slots slots, which follow one another in a tile: q[q_slot + i]
   * k[k_slot + i], for num_keys keys. Those that fill up the last 16 may be anything: soften hides them. */
  void (*score)(rf_attention_scratch *, int q_slot, int k_slot, int num_slots, int num_rows, int num_keys,
                int head_dim);
  /* Scores become probabilities, 2^(score * factor - maximum), and 0 for keys after the last one that is `visible` to
   * the row. Moves maximum and sum of the tile. Gives whether `scale`, by which earlier output must be multiplied, is
   * other than 1 in any row. */
  int (*soften)(rf_attention_scratch *, int tile, int num_rows, int num_keys, v16i visible, float factor,
                v16f *scale);
  /* out[slot][row] += probabilities of row (first + row) times v, for num_rows rows. */
  void (*accumulate)(rf_attention_scratch *, int slot, int first, int num_rows, int num_keys, int head_dim);
  /* 16 elements of a row of out, from a multiple of 16 on. */
  v16f (*read_out)(const rf_attention_scratch *, int slot, int row, int dim, int head_dim);
} rf_attention_kernel;

/* A score that gives probability 0. Finite, because differences of infinities are NaN. */
#define RF_HIDDEN (-1e30f)

extern const rf_attention_kernel rf_attention_f32;
extern const rf_attention_kernel rf_attention_bf16_as_f32;
#ifdef RF_HAS_AVX512_BF16
extern const rf_attention_kernel rf_attention_avx512_bf16;
#endif
#ifdef RF_HAS_AMX
extern const rf_attention_kernel rf_attention_amx;
#endif

#endif
