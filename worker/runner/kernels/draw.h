/* The token that each row of logits draws: see worker/sampling/host_draw.py, whose form in numpy draws the same. */
#ifndef RF_DRAW_H
#define RF_DRAW_H

#include "common.h"

typedef struct {
  const float *logits; /* [num_logits][vocab_size]; NaN and +inf nowhere */
  int32_t vocab_size;
  int32_t num_rows;
  /* All below: of each row that draws. */
  const int64_t *rows; /* its logits */
  const float *largest; /* of its logits, finite */
  const float *temperature;
  const float *least; /* score, (logit - largest) / temperature, that a token must have; 0 at most */
  const uint32_t *streams; /* two each */
  int64_t *tokens; /* result */
} rf_drawing;

RF_EXPORT void rf_draw(const rf_drawing *drawing);

#endif
