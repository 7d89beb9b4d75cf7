#include "forward.h"

#include "amx.h"
#include "rows.h"

#define PHASES 8
#define ROWS_AT_ONCE 4
/* So few tokens are normalized by every member for itself, which takes less than to wait for who does it for all. */
#define FEW_TOKENS 8

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

int32_t rf_have_vectors(void) {
#if defined(__AVX2__) || defined(__ARM_NEON)
  return 1;
#else
  return 0;
#endif
}

/* Buffers of a step. The MLP's live where those of attention are dead. */
typedef struct {
  float *hidden;
  uint16_t *normed; /* of each member, one after another, where each has its own */
  uint16_t *qkv;
  uint16_t *attended;
  uint16_t *activated;
} buffers_t;

static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static int query_size(const rf_model *m) { return m->shape.num_heads * m->shape.head_dim; }
static int kv_size(const rf_model *m) { return m->shape.num_kv_heads * m->shape.head_dim; }
static int qkv_size(const rf_model *m) { return query_size(m) + 2 * kv_size(m); }
static int inner_size(const rf_model *m) { return m->num_layers ? m->layers[0].down.in_features : 0; }

static int64_t lay_out(const rf_model *model, int64_t num_tokens, int num_members, char *base, buffers_t *buffers) {
  int copies = num_tokens <= FEW_TOKENS ? num_members : 1;
  int64_t normed = padded(num_tokens * model->hidden_size * 4);
  int64_t qkv = normed + padded(copies * num_tokens * model->hidden_size * 2);
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

int64_t rf_workspace_bytes(const rf_team *team, const rf_model *model, int32_t num_tokens) {
  return lay_out(model, num_tokens, rf_team_size(team), NULL, NULL);
}

typedef struct {
  const rf_model *model;
  const rf_step *step;
  const rf_attention_plan *plan;
  int items_own_kv_heads; /* see rf_attention_plan_owns_kv_heads */
  buffers_t buffers;
} work_t;

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
  for (int i = 0; i < size; i += RF_WIDTH) v_store(to + i, v_from_bf16(from + i));
}

static void result_row(const work_t *work, int layer, int row) {
  (void)layer;
  int size = work->model->hidden_size;
  const float *from = work->buffers.hidden + (int64_t)row * size;
  for (int i = 0; i < size; i += RF_WIDTH) v_store_bf16(work->step->hidden + (int64_t)row * size + i, v_load(from + i));
}

static void normalize_rows(const work_t *work, const uint16_t *weight, int row, int end, uint16_t *normed) {
  int64_t size = work->model->hidden_size;
  for (; row < end; row++)
    rf_normalize(work->buffers.hidden + row * size, weight, (int)size, work->model->norm_epsilon, normed + row * size);
}

/* Gives where this member finds all rows of the hidden state, normalized. */
static const uint16_t *norm_phase(rf_team *team, int member, int phase, const work_t *work, const uint16_t *weight) {
  int num_tokens = work->step->num_tokens;
  uint16_t *normed = work->buffers.normed;
  if (num_tokens <= FEW_TOKENS) {
    normed += (int64_t)member * num_tokens * work->model->hidden_size;
    normalize_rows(work, weight, 0, num_tokens, normed);
    return normed;
  }
  for (int row; (row = rf_team_claim(team, phase) * ROWS_AT_ONCE) < num_tokens;)
    normalize_rows(work, weight, row, rf_min(row + ROWS_AT_ONCE, num_tokens), normed);
  rf_team_barrier(team);
  return normed;
}

/* A token's queries, keys and values of some KV heads: queries are rotated in place, the others go to their slot of the
 * pool. */
static void rotate_heads(const work_t *work, int layer, int row, int kv_head, int num_kv_heads) {
  const rf_model *model = work->model;
  const rf_layer *weights = &model->layers[layer];
  int64_t size = model->shape.head_dim, position = work->step->positions[row];
  int64_t slot = work->step->slots[row] * kv_size(model);
  int group = model->shape.num_heads / model->shape.num_kv_heads;
  rf_rotation rotation = {model->cosine + position * size, model->signed_sine + position * size, (int)size,
                          model->norm_epsilon};
  uint16_t *queries = work->buffers.qkv + (int64_t)row * qkv_size(model);
  for (int head = kv_head * group; head < (kv_head + num_kv_heads) * group; head++)
    rf_rotate(&rotation, queries + head * size, weights->query_norm, queries + head * size);
  const uint16_t *keys = queries + query_size(model), *values = keys + kv_size(model);
  for (int head = kv_head; head < kv_head + num_kv_heads; head++)
    rf_rotate(&rotation, keys + head * size, weights->key_norm, work->step->keys[layer] + slot + head * size);
  memcpy(work->step->values[layer] + slot + kv_head * size, values + kv_head * size,
         (size_t)(num_kv_heads * size) * sizeof *values);
}

static void rotate_row(const work_t *work, int layer, int row) {
  rotate_heads(work, layer, row, 0, work->model->shape.num_kv_heads);
}

typedef struct {
  const work_t *work;
  int layer;
} rotated_t;

static void rotate_item(const void *argument, int row, int kv_head, int num_kv_heads) {
  const rotated_t *rotated = argument;
  rotate_heads(rotated->work, rotated->layer, row, kv_head, num_kv_heads);
}

static void linear_phase(rf_team *team, int member, int phase, const rf_linear *linear, const uint16_t *x, void *y,
                         int64_t y_stride, rf_output output, int num_rows) {
  rf_operands operands = {x, linear->in_features, y, y_stride, num_rows, (int32_t)output};
  rf_apply_phase(team, member, phase, linear, &operands);
  rf_team_barrier(team);
}

static void attention_phases(rf_team *team, int member, int phase, const work_t *work, int layer) {
  const rf_model *model = work->model;
  const rf_layer *weights = &model->layers[layer];
  const buffers_t *buffers = &work->buffers;
  int num_tokens = work->step->num_tokens;
  const uint16_t *normed = norm_phase(team, member, phase, work, weights->attention_norm);
  linear_phase(team, member, phase + 1, &weights->qkv, normed, buffers->qkv, qkv_size(model), RF_STORE, num_tokens);
  rotated_t rotated = {work, layer};
  rf_attention_layer attention = {
      .q = buffers->qkv,
      .keys = work->step->keys[layer],
      .values = work->step->values[layer],
      .out = buffers->attended,
      .q_stride = qkv_size(model),
      .kv_stride = kv_size(model),
      .out_stride = query_size(model),
  };
  if (work->items_own_kv_heads) {
    rf_attend_phase(team, member, phase + 3, work->plan, &attention, rotate_item, &rotated);
  } else {
    rows_phase(team, phase + 2, num_tokens, rotate_row, work, layer);
    rf_team_barrier(team);
    rf_attend_phase(team, member, phase + 3, work->plan, &attention, NULL, NULL);
  }
  rf_team_barrier(team);
  linear_phase(team, member, phase + 4, &weights->output, buffers->attended, buffers->hidden, model->hidden_size,
               RF_ADD, num_tokens);
}

static void mlp_phases(rf_team *team, int member, int phase, const work_t *work, int layer) {
  const rf_layer *weights = &work->model->layers[layer];
  const buffers_t *buffers = &work->buffers;
  int num_tokens = work->step->num_tokens;
  const uint16_t *normed = norm_phase(team, member, phase, work, weights->mlp_norm);
  linear_phase(team, member, phase + 1, &weights->gate_up, normed, buffers->activated, inner_size(work->model),
               RF_SWIGLU, num_tokens);
  linear_phase(team, member, phase + 2, &weights->down, buffers->activated, buffers->hidden,
               work->model->hidden_size, RF_ADD, num_tokens);
}

static void forward_task(rf_team *team, int member, void *argument) {
  const work_t *work = argument;
  const rf_model *model = work->model;
  int num_tokens = work->step->num_tokens, phase = model->num_layers * PHASES;
  rows_phase(team, phase, num_tokens, embed_row, work, 0);
  rf_team_barrier(team);
  for (int layer = 0; layer < model->num_layers; layer++) {
    attention_phases(team, member, layer * PHASES, work, layer);
    mlp_phases(team, member, layer * PHASES + 5, work, layer);
  }
  rows_phase(team, phase + 1, num_tokens, result_row, work, 0);
}

int32_t rf_forward(rf_team *team, const rf_model *model, const rf_step *step) {
  int num_phases = model->num_layers * PHASES + 2;
  if (num_phases > RF_MAX_PHASES) return 1;
  rf_attention_plan *plan = rf_attention_plan_create(&step->batch, &model->shape, rf_team_size(team));
  if (plan == NULL) return 1;
  work_t work = {.model = model, .step = step, .plan = plan};
  work.items_own_kv_heads = rf_attention_plan_owns_kv_heads(plan);
  lay_out(model, step->num_tokens, rf_team_size(team), step->workspace, &work.buffers);
  rf_team_run(team, forward_task, &work, num_phases);
  rf_attention_plan_destroy(plan);
  return 0;
}
