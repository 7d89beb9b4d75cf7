/* What becomes of the sums of a linear layer: bias, activation, and the form in which they are stored. */
#include "linear_kernels.h"

/* Two panels: 32 columns, the last `32 - count` of which do not exist, of some rows. A row's columns are written in one
 * go, because they are a whole line of the cache. */
typedef struct {
  const rf_operands *operands;
  v16f bias[2];
  int column; /* the first */
  int count;
} target_t;

v16f rf_read_bias(const rf_linear *linear, int panel) {
  RF_ALIGNED uint16_t bias[16] = {0};
  int count = rf_min(16, linear->out_features - panel * 16);
  if (linear->bias == NULL || count <= 0) return (v16f){0};
  memcpy(bias, linear->bias + panel * 16, (size_t)count * sizeof *bias);
  return v_from_bf16(bias);
}

/* The first `count` of a row's 32 columns. */
static void store_columns(uint16_t *y, int count, v16f low, v16f high) {
  RF_ALIGNED uint16_t row[32];
  if (count == 32) {
#ifdef RF_HAS_AVX512_BF16
    _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    v_store_bf16(y, low);
    v_store_bf16(y + 16, high);
#endif
    return;
  }
  v_store_bf16(row, low);
  v_store_bf16(row + 16, high);
  memcpy(y, row, (size_t)count * sizeof *y);
}

static void store_rows(const target_t *to, int row, int num_rows, float (*a)[16], float (*b)[16]) {
  for (int i = 0; i < num_rows; i++)
    store_columns((uint16_t *)to->operands->y + (row + i) * to->operands->y_stride + to->column, to->count,
                  v_load(a[i]) + to->bias[0], v_load(b[i]) + to->bias[1]);
}

static void store_float_rows(const target_t *to, int row, int num_rows, float (*a)[16], float (*b)[16], int add) {
  RF_ALIGNED float part[32] = {0};
  for (int i = 0; i < num_rows; i++) {
    float *y = (float *)to->operands->y + (row + i) * to->operands->y_stride + to->column;
    float *whole = to->count == 32 ? y : part;
    v16f low = v_load(a[i]) + to->bias[0], high = v_load(b[i]) + to->bias[1];
    if (add && whole == part) memcpy(part, y, (size_t)to->count * sizeof *y);
    if (add) low += v_load(whole), high += v_load(whole + 16);
    v_store(whole, low);
    v_store(whole + 16, high);
    if (whole == part) memcpy(y, part, (size_t)to->count * sizeof *y);
  }
}

static void store_gated_rows(const target_t *to, int row, int num_rows, float (*gates)[16], float (*ups)[16]) {
  for (int i = 0; i < num_rows; i++) {
    v16f gate = v_load(gates[i]) + to->bias[0], up = v_load(ups[i]) + to->bias[1];
    v_store_bf16((uint16_t *)to->operands->y + (row + i) * to->operands->y_stride + to->column, v_silu(gate) * up);
  }
}

/* What follows the sums of panels `index` and after it, by order of computing. */
void rf_finish(const rf_linear *linear, const rf_operands *operands, int index, int row, int num_rows,
               float (*sums)[32][16]) {
  if (operands->output == RF_LARGEST) {
    rf_finish_largest(linear, (rf_largest *)operands->y + row, index, num_rows, sums);
    return;
  }
  int panel = rf_panel_at(linear, operands->output, index), second = rf_panel_at(linear, operands->output, index + 1);
  target_t to = {
      .operands = operands,
      .bias = {rf_read_bias(linear, panel), rf_read_bias(linear, second)},
      .column = panel * 16,
      .count = rf_min(32, linear->out_features - panel * 16),
  };
  if (operands->output == RF_SWIGLU)
    store_gated_rows(&to, row, num_rows, sums[0], sums[1]);
  else if (operands->output == RF_STORE)
    store_rows(&to, row, num_rows, sums[0], sums[1]);
  else
    store_float_rows(&to, row, num_rows, sums[0], sums[1], operands->output == RF_ADD);
}
