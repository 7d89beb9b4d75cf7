/* What a step computes token by token, beside linear layers and attention. */
#ifndef RF_ROWS_H
#define RF_ROWS_H

#include "common.h"

/* y = x / rms(x) * weight. `size` is a multiple of 32: it is what linear layers read. */
void rf_normalize(const float *x, const uint16_t *weight, int size, float epsilon, uint16_t *y);

/* One head, from x to y (which may be the same): normalized by `norm`, where that is not NULL, and rotated. */
typedef struct {
  const uint16_t *cosine; /* of the token's position, `size` of each */
  const uint16_t *signed_sine;
  int size; /* head_dim */
  float norm_epsilon;
} rf_rotation;
void rf_rotate(const rf_rotation *rotation, const uint16_t *x, const uint16_t *norm, uint16_t *y);

#endif
