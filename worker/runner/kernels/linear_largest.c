/* The largest result of each row of a linear layer: what greedy decoding asks of the head, whose other results then
 * need not go through memory. */
#include <math.h>

#include "linear_kernels.h"

/* Goes on from `largest` by 32 results, of which only the first `count` exist. Features come in their order. */
static void go_on(rf_largest *largest, int feature, int count, const float *results) {
  for (int i = 0; i < count && !isnan(largest->value); i++)
    if (results[i] > largest->value || isnan(results[i])) *largest = (rf_largest){results[i], feature + i};
}

void rf_finish_largest(const rf_linear *linear, rf_largest *largest, int panel, int num_rows, float (*sums)[32][16]) {
  RF_ALIGNED float bias[32], results[32];
  RF_ALIGNED uint16_t rounded[32];
  rf_read_bias(linear, panel, bias);
  rf_read_bias(linear, panel + 1, bias + 16);
  int count = rf_min(32, linear->out_features - panel * 16);
  for (int row = 0; row < num_rows; row++) {
    ints is_less = (ints){0} == 0;
    for (int i = 0; i < 32; i += RF_WIDTH) {
      v_store_bf16(rounded + i, v_load(sums[i / 16][row] + i % 16) + v_load(bias + i));
      v_store(results + i, v_from_bf16(rounded + i));
      is_less &= v_load(results + i) <= largest[row].value; /* a NaN is not */
    }
    if (v_any(~is_less)) go_on(&largest[row], panel * 16, count, results); /* hardly ever */
  }
}

typedef struct {
  const rf_linear *linear;
  const rf_operands *operands;
  rf_largest *largest;
} apply_t;

static void apply_task(rf_team *team, int member, void *argument) {
  const apply_t *apply = argument;
  rf_operands own = *apply->operands;
  rf_largest *largest = apply->largest + (int64_t)member * own.num_rows;
  for (int row = 0; row < own.num_rows; row++) largest[row] = (rf_largest){-INFINITY, 0};
  own.y = largest;
  own.output = RF_LARGEST;
  rf_apply_phase(team, member, 0, apply->linear, &own);
}

static int is_ahead(rf_largest a, rf_largest b) {
  if (isnan(b.value) || isnan(a.value)) return isnan(a.value) && (!isnan(b.value) || a.feature < b.feature);
  return a.value > b.value || (a.value == b.value && a.feature < b.feature);
}

void rf_apply_largest(rf_team *team, const rf_linear *linear, const rf_operands *operands, rf_largest *largest) {
  apply_t apply = {linear, operands, largest};
  rf_team_run(team, apply_task, &apply, 1);
  for (int member = 1; member < rf_team_size(team); member++)
    for (int row = 0; row < operands->num_rows; row++) {
      rf_largest other = largest[member * (int64_t)operands->num_rows + row];
      if (is_ahead(other, largest[row])) largest[row] = other;
    }
}
