/* Linear layers in bfloat16 with float32 sums, for any number of rows: y = x W^T + bias, and what follows it.
 *
 *   panel    16 output features of W, packed alike for every form, as AMX and AVX512-BF16 read it: [in / 2][16 out][2]
 *   block    32 rows by 2 panels (or 16 rows by 4): sums stay in registers over all of `in`, or over RF_DEPTH of it
 *   item     what a thread takes at a time: some panels by up to RF_ROWS rows
 *
 * A row's result does not depend on the others, nor on how many there are: each sum runs over `in` in one order.
 */
#ifndef RF_LINEAR_H
#define RF_LINEAR_H

#include "common.h"
#include "team.h"

#define RF_ROWS 256   /* rows of an item: as much of x as stays in a core's second-level cache */
#define RF_DEPTH 1536 /* inputs of a pass over an item, likewise */
#define RF_PANELS 8   /* panels of an item where there are many rows */

typedef struct {
  const uint16_t *packed;
  const uint16_t *bias; /* NULL for none */
  int32_t out_features;
  int32_t in_features; /* a multiple of 32 */
} rf_linear;

typedef enum {
  RF_STORE,  /* y as bfloat16 */
  RF_STORE_FLOAT,
  RF_ADD,    /* added to what is there, float32 */
  RF_SWIGLU, /* the first half of y is the gate of the second: silu(gate) * up as bfloat16; halves of 16 n features */
  RF_LARGEST, /* y is no matrix: rf_largest of each row */
} rf_output;

/* Of a row's results, as RF_STORE rounds them: the largest, and the first feature that has it. NaN is the largest. */
typedef struct {
  float value;
  int32_t feature;
} rf_largest;

typedef struct {
  const uint16_t *x;
  int64_t x_stride; /* elements from row to row */
  void *y;
  int64_t y_stride;
  int32_t num_rows;
  int32_t output; /* rf_output */
} rf_operands;

RF_EXPORT int64_t rf_packed_bytes(int32_t out_features, int32_t in_features);
/* W is [out_features][in_features]; `packed` is aligned to 64 bytes. */
RF_EXPORT void rf_pack(const uint16_t *weight, int32_t out_features, int32_t in_features, uint16_t *packed);
RF_EXPORT void rf_apply(rf_team *team, const rf_linear *linear, const rf_operands *operands);

/* The largest result of each of num_rows rows, without the others; y is of no account. `largest` has room for
 * rf_team_size(team) times as many: the first num_rows are the answer. */
RF_EXPORT void rf_apply_largest(rf_team *team, const rf_linear *linear, const rf_operands *operands,
                                rf_largest *largest);

/* The same as rf_apply from within a task. */
void rf_apply_phase(rf_team *team, int member, int phase, const rf_linear *linear, const rf_operands *operands);

size_t rf_linear_scratch_bytes(void);

#endif
