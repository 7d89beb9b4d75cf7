/* Linear layers of random shapes, with all that may follow them, against sums in double precision. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "linear.h"
#include "support.h"

typedef struct {
  rf_linear linear;
  rf_operands operands;
  const uint16_t *weight;
  size_t y_size;   /* of an element */
  int y_columns;
  double *before; /* what y held, where it is added to */
} case_t;

static const int all_rows[] = {1, 1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100, 129, 255, 256, 257, 300};
static const int inputs[] = {32, 64, 96, 160, 576, 1536, 1568, 3200};
static const int outputs[] = {1, 7, 15, 16, 17, 31, 32, 33, 47, 48, 96, 100, 144, 272};

static uint16_t *random_elements(int64_t count, double scale) {
  uint16_t *elements = guarded((size_t)count * 2, 2);
  for (int64_t i = 0; i < count; i++) elements[i] = to_bf16(scale * uniform());
  return elements;
}

/* Of the wanted sum in double: the sum, and in `magnitude` that of what is added. */
static double plain_sum(const case_t *c, int row, int out, double *magnitude) {
  const uint16_t *x = c->operands.x + row * c->operands.x_stride;
  const uint16_t *w = c->weight + (int64_t)out * c->linear.in_features;
  double sum = c->linear.bias ? to_float(c->linear.bias[out]) : 0;
  *magnitude = fabs(sum);
  for (int i = 0; i < c->linear.in_features; i++) {
    double product = (double)to_float(x[i]) * to_float(w[i]);
    sum += product;
    *magnitude += fabs(product);
  }
  return sum;
}

static case_t make_case(int output, int most_rows) {
  case_t c = {.operands.output = output, .operands.num_rows = rf_min(PICK(all_rows), most_rows)};
  c.linear.in_features = PICK(inputs);
  c.linear.out_features = output == RF_SWIGLU ? 32 * between(1, 9) : PICK(outputs);
  int64_t out = c.linear.out_features, in = c.linear.in_features, rows = c.operands.num_rows;
  c.weight = random_elements(out * in, 1);
  c.linear.bias = below(2) ? random_elements(out, 1) : NULL;
  uint16_t *packed = guarded((size_t)rf_packed_bytes(c.linear.out_features, c.linear.in_features), 64);
  rf_pack(c.weight, c.linear.out_features, c.linear.in_features, packed);
  c.linear.packed = packed;
  c.operands.x_stride = in + (below(2) ? 0 : 2 * between(1, 40));
  c.operands.x = random_elements((rows - 1) * c.operands.x_stride + in, 4.0 / sqrt((double)in));
  c.y_columns = (int)(output == RF_SWIGLU ? out / 2 : out);
  c.y_size = output == RF_STORE || output == RF_SWIGLU ? 2 : 4;
  c.operands.y_stride = c.y_columns + (below(2) ? 0 : between(1, 40));
  c.operands.y = guarded((size_t)((rows - 1) * c.operands.y_stride + c.y_columns) * c.y_size, c.y_size);
  return c;
}

static void remember(case_t *c) {
  c->before = calloc((size_t)c->operands.num_rows * (size_t)c->y_columns, sizeof *c->before);
  for (int row = 0; c->operands.output == RF_ADD && row < c->operands.num_rows; row++) {
    for (int out = 0; out < c->y_columns; out++) {
      float *y = (float *)c->operands.y + row * c->operands.y_stride + out;
      c->before[row * c->y_columns + out] = *y = (float)uniform();
    }
  }
}

static double expected_at(const case_t *c, int row, int out, double *allowed) {
  double magnitude, up_magnitude, sum = plain_sum(c, row, out, &magnitude);
  double wanted = sum + c->before[row * c->y_columns + out];
  *allowed = 1e-5 * (magnitude + 1);
  if (c->operands.output == RF_SWIGLU) {
    double up = plain_sum(c, row, out + c->y_columns, &up_magnitude);
    wanted = sum / (1 + exp(-sum)) * up;
    *allowed = 1e-5 * (magnitude + 1) * (up_magnitude + 1);
  }
  if (c->y_size == 2) *allowed += fabs(wanted) / 256;
  return wanted;
}

static void compare(const case_t *c, tally_t *tally) {
  int last = c->operands.num_rows - 1;
  for (int row = 0; row <= last; row++) {
    for (int out = 0; out < c->operands.y_stride; out++) {
      int64_t at = row * c->operands.y_stride + out;
      if (out >= c->y_columns) {
        if (row == last) break;
        const unsigned char *bytes = (const unsigned char *)c->operands.y + at * (int64_t)c->y_size;
        CHECK(bytes[0] == 0xff && bytes[c->y_size - 1] == 0xff, "%s: wrote between rows", tally->kind);
        continue;
      }
      double allowed, wanted = expected_at(c, row, out, &allowed);
      double error = fabs(element_at(c->operands.y, at, c->y_size == 2) - wanted);
      note_error(tally, error, allowed);
    }
  }
  tally->num_cases++;
}

/* Every row by itself, by a team of another size, gives the same bits. */
static void check_rows_alone(const case_t *c, rf_team *team) {
  int row = below(c->operands.num_rows);
  rf_operands alone = c->operands;
  alone.x += row * alone.x_stride;
  alone.num_rows = 1;
  alone.y = guarded((size_t)c->y_columns * c->y_size, c->y_size);
  for (int out = 0; c->operands.output == RF_ADD && out < c->y_columns; out++) {
    ((float *)alone.y)[out] = (float)c->before[row * c->y_columns + out];
  }
  rf_apply(team, &c->linear, &alone);
  const char *together = (const char *)c->operands.y + row * c->operands.y_stride * (int64_t)c->y_size;
  CHECK(memcmp(together, alone.y, (size_t)c->y_columns * c->y_size) == 0, "a row depends on those beside it, or on the team");
}

/* Of each row the largest of the results that are stored, and where it is first. */
static void check_largest(const case_t *c, rf_team *team) {
  rf_largest *largest = guarded((size_t)(c->operands.num_rows * rf_team_size(team)) * sizeof *largest, sizeof *largest);
  rf_apply_largest(team, &c->linear, &c->operands, largest);
  for (int row = 0; row < c->operands.num_rows; row++) {
    int first = 0;
    const uint16_t *y = (const uint16_t *)c->operands.y + row * c->operands.y_stride;
    for (int out = 1; out < c->y_columns; out++)
      if (to_float(y[out]) > to_float(y[first])) first = out;
    CHECK(largest[row].feature == first, "feature %d is said to be the largest, %d is", largest[row].feature, first);
    CHECK(largest[row].value == to_float(y[first]), "%g and not %g", largest[row].value, to_float(y[first]));
  }
}

void check_linears(int num_cases, int num_threads) {
  tally_t tallies[] = {
      [RF_STORE] = {.kind = "linear to bfloat16"},
      [RF_STORE_FLOAT] = {.kind = "linear to float32"},
      [RF_ADD] = {.kind = "linear, added"},
      [RF_SWIGLU] = {.kind = "linear, gated"},
  };
  rf_team *team = rf_team_create(num_threads), *other_team = rf_team_create(num_threads > 1 ? 1 : 2);
  for (int i = 0; i < num_cases; i++) {
    case_t c = make_case(i % 4, i % 8 ? 40 : 300);
    remember(&c);
    rf_apply(team, &c.linear, &c.operands);
    compare(&c, &tallies[i % 4]);
    check_rows_alone(&c, other_team);
    if (c.operands.output == RF_STORE) check_largest(&c, team);
    free(c.before);
    release_all();
  }
  rf_team_destroy(team);
  rf_team_destroy(other_team);
  for (int i = 0; i < 4; i++) print_tally(&tallies[i]);
}
