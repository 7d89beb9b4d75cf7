#include "forward.h"

#include <math.h>

#include "amx.h"

#define PHASES 8
#define ROWS_AT_ONCE 4

void rf_init(void) { rf_amx_ask(); }

const char *rf_features(void) {
  if (rf_amx_usable) return "AMX";
#if defined(RF_HAS_AVX512_BF16)
  return "AVX512-BF16";
#elif defined(__AVX512F__)
  return "AVX512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "no vector instructions";
#endif
}

/* Buffers of a step. The MLP's live where those of attention are dead. */
typedef struct {
  float *hidden;
  uint16_t *normed;
  uint16_t *qkv;
  uint16_t *attended;
  uint16_t *activated;
} buffers_t;

static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static int query_size(const rf_model *m) { return m->shape.num_heads * m->shape.head_dim; }
static int qkv_size(const rf_model *m) { return query_size(m) + 2 * m->shape.num_kv_heads * m->shape.head_dim; }
static int inner_size(const rf_model *m) { return m->num_layers ? m->layers[0].down.in_features : 0; }

static int64_t lay_out(const rf_model *model, int64_t num_tokens, char *base, buffers_t *buffers) {
  int64_t normed = padded(num_tokens * model->hidden_size * 4);
  int64_t qkv = normed + padded(num_tokens * model->hidden_size * 2);
  int64_t attended = qkv + padded(num_tokens * qkv_size(model) * 2);
  int64_t end = attended + padded(num_tokens * query_size(model) * 2);
  int64_t mlp_end = qkv + padded(num_tokens * inner_size(model) * 2);
  if (buffers != NULL) {
    buffers->hidden = (float *)base;
    buffers->normed = (uint16_t *)(base + normed);
    buffers->qkv = buffers->activated = (uint16_t *)(base + qkv);
    buffers->attended = (uint16_t *)(base + attended);
  }
  return end > mlp_end ? end : mlp_end;
}

int64_t rf_workspace_bytes(const rf_model *model, int32_t num_tokens) { return lay_out(model, num_tokens, NULL, NULL); }

typedef struct {
  const rf_model *model;
  const rf_step *step;
  const rf_attention_plan *plan;
  buffers_t buffers;
} work_t;

static float inverse_rms(float sum_of_squares, int size, float epsilon) {
  return 1.0f / sqrtf(sum_of_squares / (float)size + epsilon);
}

/* hidden_size is a multiple of 32: it is what linear layers read. */
static void normalize(const float *x, const uint16_t *weight, int size, float epsilon, uint16_t *y) {
  v16f sums[2] = {{0}};
  for (int i = 0; i < size; i += 32) {
    v16f a = v_load(x + i), b = v_load(x + i + 16);
    sums[0] += a * a;
    sums[1] += b * b;
  }
  float scale = inverse_rms(v_sum(sums[0] + sums[1]), size, epsilon);
  for (int i = 0; i < size; i += 16) v_store_bf16(y + i, v_load(x + i) * scale * v_from_bf16(weight + i));
}

/* Calls `row` for each row below `count`, a few at a time for each thread. */
typedef void (*row_task)(const work_t *work, int layer, int row);

static void rows_phase(rf_team *team, int phase, int count, row_task task, const work_t *work, int layer) {
  for (int i; (i = rf_team_claim(team, phase) * ROWS_AT_ONCE) < count;)
    for (int row = i; row < rf_min(i + ROWS_AT_ONCE, count); row++) task(work, layer, row);
}

static void embed_row(const work_t *work, int layer, int row) {
  (void)layer;
  int size = work->model->hidden_size;
  const uint16_t *from = work->model->embedding + work->step->input_ids[row] * size;
  float *to = work->buffers.hidden + (int64_t)row * size;
  for (int i = 0; i < size; i += 16) v_store(to + i, v_from_bf16(from + i));
}

static void normalize_row(const work_t *work, const uint16_t *weight, int64_t from, int64_t to) {
  int size = work->model->hidden_size;
  normalize(work->buffers.hidden + from * size, weight, size, work->model->norm_epsilon,
            work->buffers.normed + to * size);
}

static void begin_row(const work_t *work, int layer, int row) {
  if (layer == 0) embed_row(work, layer, row);
  normalize_row(work, work->model->layers[layer].attention_norm, row, row);
}

static void mlp_norm_row(const work_t *work, int layer, int row) {
  normalize_row(work, work->model->layers[layer].mlp_norm, row, row);
}

static void result_row(const work_t *work, int layer, int row) {
  (void)layer;
  int size = work->model->hidden_size;
  const float *from = work->buffers.hidden + (int64_t)row * size;
  for (int i = 0; i < size; i += 16) v_store_bf16(work->step->hidden + (int64_t)row * size + i, v_load(from + i));
}

/* One head, from x to y (which may be the same): normalized where the model does so, and rotated. */
static void rotate_head(const rf_model *model, const uint16_t *x, const uint16_t *norm, int64_t position, uint16_t *y) {
  int size = model->shape.head_dim, half = size / 2;
  const uint16_t *cosine = model->cosine + position * size, *sine = model->signed_sine + position * size;
  float head[RF_MAX_HEAD_DIM], sum = 0;
  for (int i = 0; i < size; i++) head[i] = bf16_to_float(x[i]);
  if (norm != NULL) {
    for (int i = 0; i < size; i++) sum += head[i] * head[i];
    float scale = inverse_rms(sum, size, model->norm_epsilon);
    for (int i = 0; i < size; i++) head[i] *= scale * bf16_to_float(norm[i]);
  }
  for (int i = 0; i < half; i++) {
    float low = head[i], high = head[i + half];
    head[i] = low * bf16_to_float(cosine[i]) + high * bf16_to_float(sine[i]);
    head[i + half] = high * bf16_to_float(cosine[i + half]) + low * bf16_to_float(sine[i + half]);
  }
  for (int i = 0; i < size; i++) y[i] = float_to_bf16(head[i]);
}

/* Queries are rotated in place; keys and values go to their slot of the pool. */
static void rotate_row(const work_t *work, int layer, int row) {
  const rf_model *model = work->model;
  const rf_layer *weights = &model->layers[layer];
  int size = model->shape.head_dim, kv_size = model->shape.num_kv_heads * size;
  int64_t position = work->step->positions[row], slot = work->step->slots[row];
  uint16_t *q = work->buffers.qkv + (int64_t)row * qkv_size(model), *k = q + query_size(model);
  uint16_t *key = work->step->keys[layer] + slot * kv_size, *value = work->step->values[layer] + slot * kv_size;
  for (int head = 0; head < model->shape.num_heads; head++)
    rotate_head(model, q + head * size, weights->query_norm, position, q + head * size);
  for (int head = 0; head < model->shape.num_kv_heads; head++)
    rotate_head(model, k + head * size, weights->key_norm, position, key + head * size);
  memcpy(value, k + kv_size, (size_t)kv_size * sizeof *value);
}

static void linear_phase(rf_team *team, int member, int phase, const rf_linear *linear, const uint16_t *x, void *y,
                         int64_t y_stride, rf_output output, int num_rows) {
  rf_operands operands = {x, linear->in_features, y, y_stride, num_rows, (int32_t)output};
  rf_apply_phase(team, member, phase, linear, &operands);
  rf_team_barrier(team);
}

static void attention_phases(rf_team *team, int member, int phase, const work_t *work, int layer) {
  const rf_model *model = work->model;
  const buffers_t *buffers = &work->buffers;
  int num_tokens = work->step->num_tokens;
  rows_phase(team, phase, num_tokens, begin_row, work, layer);
  rf_team_barrier(team);
  linear_phase(team, member, phase + 1, &model->layers[layer].qkv, buffers->normed, buffers->qkv, qkv_size(model),
               RF_STORE, num_tokens);
  rows_phase(team, phase + 2, num_tokens, rotate_row, work, layer);
  rf_team_barrier(team);
  rf_attention_layer attention = {
      .q = buffers->qkv,
      .keys = work->step->keys[layer],
      .values = work->step->values[layer],
      .out = buffers->attended,
      .q_stride = qkv_size(model),
      .kv_stride = (int64_t)model->shape.num_kv_heads * model->shape.head_dim,
      .out_stride = query_size(model),
  };
  rf_attend_phase(team, member, phase + 3, work->plan, &attention);
  rf_team_barrier(team);
  linear_phase(team, member, phase + 4, &model->layers[layer].output, buffers->attended, buffers->hidden,
               model->hidden_size, RF_ADD, num_tokens);
}

static void mlp_phases(rf_team *team, int member, int phase, const work_t *work, int layer) {
  const rf_layer *weights = &work->model->layers[layer];
  const buffers_t *buffers = &work->buffers;
  int num_tokens = work->step->num_tokens;
  rows_phase(team, phase, num_tokens, mlp_norm_row, work, layer);
  rf_team_barrier(team);
  linear_phase(team, member, phase + 1, &weights->gate_up, buffers->normed, buffers->activated,
               inner_size(work->model), RF_SWIGLU, num_tokens);
  linear_phase(team, member, phase + 2, &weights->down, buffers->activated, buffers->hidden,
               work->model->hidden_size, RF_ADD, num_tokens);
}

static void forward_task(rf_team *team, int member, void *argument) {
  const work_t *work = argument;
  const rf_model *model = work->model;
  int phase = 0;
  for (int layer = 0; layer < model->num_layers; layer++, phase += PHASES) {
    attention_phases(team, member, phase, work, layer);
    mlp_phases(team, member, phase + 5, work, layer);
  }
  rows_phase(team, phase, work->step->num_tokens, result_row, work, 0);
}

int32_t rf_forward(rf_team *team, const rf_model *model, const rf_step *step) {
  if ((model->num_layers + 1) * PHASES > RF_MAX_PHASES) return 1;
  rf_attention_plan *plan = rf_attention_plan_create(&step->batch, &model->shape, rf_team_size(team));
  if (plan == NULL) return 1;
  work_t work = {.model = model, .step = step, .plan = plan};
  lay_out(model, step->num_tokens, step->workspace, &work.buffers);
  rf_team_run(team, forward_task, &work, (model->num_layers + 1) * PHASES);
  rf_attention_plan_destroy(plan);
  return 0;
}
