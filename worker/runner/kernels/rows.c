#include "rows.h"

#include <math.h>

#include "attention.h"

static float inverse_rms(float sum_of_squares, int size, float epsilon) {
  return 1.0f / sqrtf(sum_of_squares / (float)size + epsilon);
}

void rf_normalize(const float *x, const uint16_t *weight, int size, float epsilon, uint16_t *y) {
  floats sums[2] = {{0}};
  for (int i = 0; i < size; i += 2 * RF_WIDTH) {
    floats a = v_load(x + i), b = v_load(x + i + RF_WIDTH);
    sums[0] += a * a;
    sums[1] += b * b;
  }
  float scale = inverse_rms(v_sum(sums[0] + sums[1]), size, epsilon);
  for (int i = 0; i < size; i += RF_WIDTH) v_store_bf16(y + i, v_load(x + i) * scale * v_from_bf16(weight + i));
}

static void widen(const uint16_t *from, int count, float *to) {
  int i = 0;
  for (; i + RF_WIDTH <= count; i += RF_WIDTH) v_store(to + i, v_from_bf16(from + i));
  for (; i < count; i++) to[i] = bf16_to_float(from[i]);
}

static void narrow(const float *from, int count, uint16_t *to) {
  int i = 0;
  for (; i + RF_WIDTH <= count; i += RF_WIDTH) v_store_bf16(to + i, v_load(from + i));
  for (; i < count; i++) to[i] = float_to_bf16(from[i]);
}

static void normalize_head(float *head, const uint16_t *norm, int size, float epsilon) {
  float sum = 0;
  for (int i = 0; i < size; i++) sum += head[i] * head[i];
  float scale = inverse_rms(sum, size, epsilon);
  for (int i = 0; i < size; i++) head[i] *= scale * bf16_to_float(norm[i]);
}

void rf_rotate(const rf_rotation *rotation, const uint16_t *x, const uint16_t *norm, uint16_t *y) {
  int size = rotation->size, half = size / 2;
  float head[RF_MAX_HEAD_DIM], cosine[RF_MAX_HEAD_DIM], sine[RF_MAX_HEAD_DIM];
  widen(x, size, head);
  widen(rotation->cosine, size, cosine);
  widen(rotation->signed_sine, size, sine);
  if (norm != NULL) normalize_head(head, norm, size, rotation->norm_epsilon);
  for (int i = 0; i < half; i++) {
    float low = head[i], high = head[i + half];
    head[i] = low * cosine[i] + high * sine[i];
    head[i + half] = high * cosine[i + half] + low * sine[i + half];
  }
  narrow(head, size, y);
}
