/* What becomes of the sums of a linear layer: bias, activation, and the form in which they are stored. */
#include "linear_kernels.h"

/* Two panels: 32 columns, the last `32 - count` of which do not exist, of some rows. A row's columns are written in one
 * go, because they are a whole line of the cache. */
typedef struct {
  const rf_operands *operands;
  RF_ALIGNED float bias[2][16];
  int column; /* the first */
  int count;
} target_t;

void rf_read_bias(const rf_linear *linear, int panel, float *bias) {
  int count = linear->bias ? rf_min(16, linear->out_features - panel * 16) : 0;
  for (int i = 0; i < 16; i++) bias[i] = i < count ? bf16_to_float(linear->bias[panel * 16 + i]) : 0;
}

/* The first `count` of a row's 32 columns. */
static void store_columns(uint16_t *y, int count, const float *columns) {
  RF_ALIGNED uint16_t part[32];
  uint16_t *whole = count == 32 ? y : part;
#ifdef RF_HAS_AVX512_BF16
  v16f low = v_load(columns), high = v_load(columns + 16);
  _mm512_storeu_si512(whole, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
  for (int i = 0; i < 32; i += RF_WIDTH) v_store_bf16(whole + i, v_load(columns + i));
#endif
  if (whole == part) memcpy(y, part, (size_t)count * sizeof *y);
}

/* A row's 32 columns, of sums of both panels. */
static inline void add_bias(const target_t *to, const float *a, const float *b, float *columns) {
  for (int i = 0; i < 16; i += RF_WIDTH) {
    v_store(columns + i, v_load(a + i) + v_load(to->bias[0] + i));
    v_store(columns + 16 + i, v_load(b + i) + v_load(to->bias[1] + i));
  }
}

static void store_rows(const target_t *to, int row, int num_rows, float (*a)[16], float (*b)[16]) {
  RF_ALIGNED float columns[32];
  for (int i = 0; i < num_rows; i++) {
    add_bias(to, a[i], b[i], columns);
    store_columns((uint16_t *)to->operands->y + (row + i) * to->operands->y_stride + to->column, to->count, columns);
  }
}

static inline void store_floats(float *y, const float *columns, int count, int add) {
  for (int i = 0; i < count; i++) y[i] = add ? y[i] + columns[i] : columns[i];
}

static void store_float_rows(const target_t *to, int row, int num_rows, float (*a)[16], float (*b)[16], int add) {
  RF_ALIGNED float columns[32];
  for (int i = 0; i < num_rows; i++) {
    float *y = (float *)to->operands->y + (row + i) * to->operands->y_stride + to->column;
    add_bias(to, a[i], b[i], columns);
    store_floats(y, columns, to->count, add);
  }
}

static void store_gated_rows(const target_t *to, int row, int num_rows, float (*gates)[16], float (*ups)[16]) {
  for (int i = 0; i < num_rows; i++) {
    uint16_t *y = (uint16_t *)to->operands->y + (row + i) * to->operands->y_stride + to->column;
    for (int j = 0; j < 16; j += RF_WIDTH) {
      floats gate = v_load(gates[i] + j) + v_load(to->bias[0] + j), up = v_load(ups[i] + j) + v_load(to->bias[1] + j);
      v_store_bf16(y + j, v_silu(gate) * up);
    }
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
      .column = panel * 16,
      .count = rf_min(32, linear->out_features - panel * 16),
  };
  rf_read_bias(linear, panel, to.bias[0]);
  rf_read_bias(linear, second, to.bias[1]);
  if (operands->output == RF_SWIGLU)
    store_gated_rows(&to, row, num_rows, sums[0], sums[1]);
  else if (operands->output == RF_STORE)
    store_rows(&to, row, num_rows, sums[0], sums[1]);
  else
    store_float_rows(&to, row, num_rows, sums[0], sums[1], operands->output == RF_ADD);
}
