/* The parts of a linear layer: products of blocks, in three forms (vector extensions in float32, for any CPU;
 * AVX512-BF16; AMX), and what becomes of the sums. */
#ifndef RF_LINEAR_KERNELS_H
#define RF_LINEAR_KERNELS_H

#include "linear.h"

/* Sums of a block by panel, row and column. */
typedef float rf_sums[4][32][16];

/* What a block asks for at each step of 32 inputs, so that nobody waits for it: lines of the panels that this thread
 * will probably compute next, which are on their way to the second-level cache meanwhile, and those that the block's
 * results go to. */
typedef struct {
  const char *panels[4];
  int num_panels; /* 0 for none */
  int panel_bytes; /* of each, at a step */
  const char *y;
  int64_t y_stride; /* bytes */
  int y_rows;       /* not asked for yet */
  int y_bytes;      /* of a row */
} rf_ahead;

/* One block: rows of x by panels, from input `begin` to `end`. */
typedef struct {
  const uint16_t *x;
  int64_t x_stride;
  const uint16_t *panels[4];
  int num_rows;   /* 1 to 32 with two panels, to 16 with four */
  int num_panels; /* 2 or 4; the last may be repeated to fill up */
  int begin;
  int end;
  rf_ahead ahead;
} rf_linear_block;

typedef struct {
  /* Each thread, before it multiplies blocks of so many rows by 2 or 4 panels, and after all of them. */
  void (*begin)(int num_rows, int num_panels);
  void (*end)(void);
  /* Adds a block's products to the sums; where the block begins at input 0, to none. */
  void (*multiply)(const rf_linear_block *block, float (*sums)[32][16]);
} rf_linear_kernel;

extern const rf_linear_kernel rf_linear_float;
#ifdef RF_HAS_AVX512_BF16
extern const rf_linear_kernel rf_linear_avx512_bf16;
#endif
#ifdef RF_HAS_AMX
extern const rf_linear_kernel rf_linear_amx;
#endif

static inline int rf_num_panels(int out_features) { return rf_ceil_div(out_features, 16); }

/* Panels are numbered in the order in which they are computed: of a gate, gate and up take turns. */
static inline int rf_panel_at(const rf_linear *linear, int output, int index) {
  if (output != RF_SWIGLU) return index;
  return index / 2 + (index % 2 ? rf_num_panels(linear->out_features) / 2 : 0);
}

/* What follows the sums of panel `panel` and the one after it where only the largest results are asked for. */
void rf_finish_largest(const rf_linear *linear, rf_largest *largest, int panel, int num_rows, float (*sums)[32][16]);

/* 16 biases of a panel, zero where there is none. */
void rf_read_bias(const rf_linear *linear, int panel, float *bias);

/* What follows the sums of panels `index` and after it, by order of computing, of rows from `row` on. */
void rf_finish(const rf_linear *linear, const rf_operands *operands, int index, int row, int num_rows,
               float (*sums)[32][16]);

#endif
