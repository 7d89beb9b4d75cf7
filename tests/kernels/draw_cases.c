/* Tokens drawn from random logits, against scores and noise of all tokens in double precision. */
#include <math.h>
#include <stdlib.h>

#include "draw.h"
#include "support.h"

static const int sizes[] = {1, 2, 15, 16, 17, 31, 33, 100, 1000, 5003};
static const double temperatures[] = {1e-45, 1e-30, 0.05, 0.8, 1, 4, 1e30};
static const double spreads[] = {0, 0.01, 1, 20, 1e5};

static double noise_of(uint32_t token, const uint32_t *stream) {
  uint32_t x = token ^ stream[0];
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= stream[1];
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  float uniform = ((float)(int32_t)(x & 0x7fffffffu) + 0.5f) * 0x1p-31f;
  return -log(-log1p(-fmin(uniform, 1 - 0x1p-24)));
}

static double value_of(const rf_drawing *d, int i, int64_t token) {
  float score = (d->logits[d->rows[i] * d->vocab_size + token] - d->largest[i]) / d->temperature[i];
  return score < d->least[i] ? -INFINITY : score + noise_of((uint32_t)token, d->streams + 2 * i);
}

static void check_row(const rf_drawing *d, int i, tally_t *tally) {
  double best = -INFINITY;
  for (int64_t token = 0; token < d->vocab_size; token++) best = fmax(best, value_of(d, i, token));
  int64_t drawn = d->tokens[i];
  CHECK(drawn >= 0 && drawn < d->vocab_size, "token %lld of %d", (long long)drawn, d->vocab_size);
  note_error(tally, best - value_of(d, i, drawn), 1e-9);
}

static void check_case(tally_t *tally) {
  int vocab_size = PICK(sizes), num_logits = between(1, 4), num_rows = between(1, num_logits);
  size_t floats = (size_t)num_rows * sizeof(float);
  float *logits = guarded((size_t)(num_logits * vocab_size) * sizeof *logits, 4);
  float *largest = guarded(floats, 4), *temperature = guarded(floats, 4), *least = guarded(floats, 4);
  int64_t *rows = guarded((size_t)num_rows * sizeof *rows, 8), *tokens = guarded((size_t)num_rows * sizeof *tokens, 8);
  uint32_t *streams = guarded((size_t)num_rows * 2 * sizeof *streams, 4);
  double spread = PICK(spreads);
  for (int i = 0; i < num_logits * vocab_size; i++) logits[i] = (float)(spread * uniform());
  for (int i = 0; i < num_rows; i++) {
    rows[i] = num_logits - 1 - i;
    float *own = logits + rows[i] * vocab_size;
    for (int token = 1; token < vocab_size; token++)
      if (below(10) == 0) own[token] = -INFINITY;
    largest[i] = own[0];
    for (int token = 1; token < vocab_size; token++) largest[i] = fmaxf(largest[i], own[token]);
    temperature[i] = (float)PICK(temperatures);
    least[i] = below(2) ? -INFINITY : (float)(-5 * fabs(uniform()));
    streams[2 * i] = (uint32_t)(int32_t)(uniform() * INT32_MAX);
    streams[2 * i + 1] = (uint32_t)(int32_t)(uniform() * INT32_MAX);
  }
  rf_drawing drawing = {logits, vocab_size, num_rows, rows, largest, temperature, least, streams, tokens};
  rf_draw(&drawing);
  tally->num_cases++;
  for (int i = 0; i < num_rows; i++) check_row(&drawing, i, tally);
  release_all();
}

void check_draw(int num_cases) {
  tally_t tally = {.kind = "drawn tokens"};
  for (int i = 0; i < num_cases; i++) check_case(&tally);
  print_tally(&tally);
}
