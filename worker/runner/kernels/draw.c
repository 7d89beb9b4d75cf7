/* Of each row the token whose score and noise are the largest together.
 *
 * The noise of a token is -log(-log(1 - u)), with u in (0, 1) made of a hash; it is less than -log(u). The bits of a
 * float, taken as an integer, say its logarithm but for 0.06, and never too much. So a few integer operations give a
 * bound of a token's score and noise, and only where that is above the largest so far are logarithms taken: some ten
 * times in a vocabulary.
 */
#include "draw.h"

#include <math.h>

static const float a_bit = 0.693147181f / (1 << 23); /* what a float's bits grow by, its logarithm grows by that, or less */
static const float highest = (127 + 31) * 0.693147181f + 1e-3f; /* with more than what rounding does to a bound */
static const float below_one = 1.0f - 1.0f / (1 << 24);

/* 31 bits for each token; the multipliers and shifts of Wellons' lowbias32, the second half of the key between them. */
static inline words hash_tokens(words tokens, const uint32_t *stream) {
  words x = tokens ^ stream[0];
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= stream[1];
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x & 0x7fffffffu;
}

static double noise_of(uint32_t hashed) {
  float uniform = ((float)(int32_t)hashed + 0.5f) * (1.0f / (1u << 31));
  return -log(-log1p(-(double)(uniform < below_one ? uniform : below_one)));
}

static int64_t draw_row(const float *logits, int vocab_size, float largest, float temperature, float least,
                        const uint32_t *stream) {
  float factor = fminf(1 / temperature, 1e38f); /* finite: 0 for the likeliest token stays 0 */
  double reached = -INFINITY;
  int64_t token = 0;
  words tokens;
  for (int lane = 0; lane < RF_WIDTH; lane++) tokens[lane] = (uint32_t)lane;
  for (int first = 0; first < vocab_size; first += RF_WIDTH, tokens += RF_WIDTH) {
    float padded[RF_WIDTH];
    const float *some = logits + first;
    if (first + RF_WIDTH > vocab_size) {
      for (int lane = 0; lane < RF_WIDTH; lane++) padded[lane] = -INFINITY;
      memcpy(padded, some, (size_t)(vocab_size - first) * sizeof *some);
      some = padded;
    }
    words hashed = hash_tokens(tokens, stream);
    floats as_floats = __builtin_convertvector((ints)hashed, floats);
    floats bounds = (v_load(some) - largest) * factor + (highest - a_bit * __builtin_convertvector((ints)as_floats, floats));
    ints may_win = bounds > (float)reached;
    if (!v_any(may_win)) continue;
    for (int lane = 0; lane < RF_WIDTH; lane++) {
      float score = (some[lane] - largest) / temperature;
      if (!may_win[lane] || score < least) continue;
      double value = score + noise_of(hashed[lane]);
      if (value > reached) reached = value, token = first + lane;
    }
  }
  return token;
}

void rf_draw(const rf_drawing *drawing) {
  for (int i = 0; i < drawing->num_rows; i++)
    drawing->tokens[i] = draw_row(drawing->logits + drawing->rows[i] * drawing->vocab_size, drawing->vocab_size,
                                  drawing->largest[i], drawing->temperature[i], drawing->least[i],
                                  drawing->streams + 2 * i);
}
