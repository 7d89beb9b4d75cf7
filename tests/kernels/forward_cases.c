/* Whole steps of small random models against the same in double precision, one token after another. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "forward.h"
#include "support.h"

#define MAX_LAYERS 3
#define MAX_SEQUENCES 12
#define MAX_GROUP 18
#define VOCABULARY 50
#define POSITIONS 120

/* A model, with its weights as they were before packing. */
typedef struct {
  rf_model model;
  rf_layer layers[MAX_LAYERS];
  const uint16_t *qkv[MAX_LAYERS], *output[MAX_LAYERS], *gate_up[MAX_LAYERS], *down[MAX_LAYERS];
  int inner;
} model_t;

static const int head_dims[] = {16, 32, 48, 64};
/* Query heads of a KV head: of the last, a tile of attention has no room for all. */
static const int groups[] = {2, 4, 6, MAX_GROUP};

static int kv_size(const model_t *m) { return m->model.shape.num_kv_heads * m->model.shape.head_dim; }
static int query_size(const model_t *m) { return m->model.shape.num_heads * m->model.shape.head_dim; }

static uint16_t *random_elements(int64_t count, double middle, double scale) {
  uint16_t *elements = guarded((size_t)count * 2, 2);
  for (int64_t i = 0; i < count; i++) elements[i] = to_bf16(middle + scale * uniform());
  return elements;
}

static const uint16_t *make_linear(rf_linear *linear, int out, int in, int has_bias) {
  uint16_t *weight = random_elements((int64_t)out * in, 0, 1.5 / sqrt((double)in));
  uint16_t *packed = guarded((size_t)rf_packed_bytes(out, in), 64);
  rf_pack(weight, out, in, packed);
  *linear = (rf_linear){packed, has_bias ? random_elements(out, 0, 0.5) : NULL, out, in};
  return weight;
}

static void make_rotation(model_t *m) {
  int size = m->model.shape.head_dim;
  uint16_t *cosine = guarded((size_t)(POSITIONS * size) * 2, 2), *sine = guarded((size_t)(POSITIONS * size) * 2, 2);
  for (int position = 0; position < POSITIONS; position++) {
    for (int i = 0; i < size; i++) {
      double angle = position * pow(1e4, -2.0 * (i % (size / 2)) / size);
      cosine[position * size + i] = to_bf16(cos(angle));
      sine[position * size + i] = to_bf16(i < size / 2 ? -sin(angle) : sin(angle));
    }
  }
  m->model.cosine = cosine;
  m->model.signed_sine = sine;
}

static model_t *make_model(void) {
  model_t *m = guarded(sizeof *m, 64);
  int head_dim = PICK(head_dims), num_kv_heads = between(1, 3), num_heads = num_kv_heads * PICK(groups);
  *m = (model_t){.inner = 32 * between(1, 5)};
  m->model = (rf_model){.num_layers = between(1, MAX_LAYERS), .hidden_size = 32 * between(1, 5), .norm_epsilon = 1e-5f};
  m->model.shape = (rf_attention_shape){num_heads, num_kv_heads, head_dim, 1};
  m->model.layers = m->layers;
  m->model.embedding = random_elements(VOCABULARY * m->model.hidden_size, 0, 1);
  make_rotation(m);
  int has_bias = below(2), has_head_norms = below(2), hidden = m->model.hidden_size;
  for (int i = 0; i < m->model.num_layers; i++) {
    rf_layer *layer = &m->layers[i];
    layer->attention_norm = random_elements(hidden, 1, 0.3);
    layer->mlp_norm = random_elements(hidden, 1, 0.3);
    if (has_head_norms) layer->query_norm = random_elements(head_dim, 1, 0.3);
    if (has_head_norms) layer->key_norm = random_elements(head_dim, 1, 0.3);
    m->qkv[i] = make_linear(&layer->qkv, query_size(m) + 2 * kv_size(m), hidden, has_bias);
    m->output[i] = make_linear(&layer->output, hidden, query_size(m), 0);
    m->gate_up[i] = make_linear(&layer->gate_up, 2 * m->inner, hidden, 0);
    m->down[i] = make_linear(&layer->down, hidden, m->inner, 0);
  }
  return m;
}

/* The plain form of one sequence: K and V of all its tokens so far, by layer, position and element. */
typedef struct {
  double keys[MAX_LAYERS][POSITIONS][3 * 64];
  double values[MAX_LAYERS][POSITIONS][3 * 64];
} history_t;

static void plain_linear(const uint16_t *weight, const rf_linear *linear, const double *x, double *y) {
  for (int out = 0; out < linear->out_features; out++) {
    y[out] = linear->bias ? to_float(linear->bias[out]) : 0;
    for (int in = 0; in < linear->in_features; in++)
      y[out] += x[in] * to_float(weight[(int64_t)out * linear->in_features + in]);
  }
}

static void plain_norm(const double *x, const uint16_t *weight, int size, double epsilon, double *y) {
  double sum = 0;
  for (int i = 0; i < size; i++) sum += x[i] * x[i];
  for (int i = 0; i < size; i++) y[i] = x[i] / sqrt(sum / size + epsilon) * to_float(weight[i]);
}

static void plain_rotation(const model_t *m, double *head, const uint16_t *norm, int position) {
  int size = m->model.shape.head_dim;
  double before[64];
  if (norm) plain_norm(head, norm, size, m->model.norm_epsilon, head);
  memcpy(before, head, (size_t)size * sizeof *head);
  for (int i = 0; i < size; i++)
    head[i] = before[i] * to_float(m->model.cosine[position * size + i]) +
              before[(i + size / 2) % size] * to_float(m->model.signed_sine[position * size + i]);
}

static void plain_attention(const model_t *m, const history_t *history, int layer, int position, double *q) {
  int size = m->model.shape.head_dim, group = m->model.shape.num_heads / m->model.shape.num_kv_heads;
  for (int head = 0; head < m->model.shape.num_heads; head++) {
    double result[64] = {0}, sum = 0, *query = q + head * size;
    for (int key = 0; key <= position; key++) {
      double product = 0;
      for (int i = 0; i < size; i++) product += query[i] * history->keys[layer][key][head / group * size + i];
      double weight = exp(product / sqrt(size));
      sum += weight;
      for (int i = 0; i < size; i++) result[i] += weight * history->values[layer][key][head / group * size + i];
    }
    for (int i = 0; i < size; i++) query[i] = result[i] / sum;
  }
}

static void plain_layer(const model_t *m, history_t *history, int layer, int position, double *hidden) {
  const rf_layer *l = &m->layers[layer];
  int size = m->model.shape.head_dim, keys = query_size(m), values = keys + kv_size(m);
  double normed[160], qkv[3 * MAX_GROUP * 64 + 2 * 3 * 64], gate_up[2 * 160], result[160];
  plain_norm(hidden, l->attention_norm, m->model.hidden_size, m->model.norm_epsilon, normed);
  plain_linear(m->qkv[layer], &l->qkv, normed, qkv);
  for (int head = 0; head < keys / size; head++) plain_rotation(m, qkv + head * size, l->query_norm, position);
  for (int at = keys; at < values; at += size) plain_rotation(m, qkv + at, l->key_norm, position);
  memcpy(history->keys[layer][position], qkv + keys, (size_t)kv_size(m) * sizeof *qkv);
  memcpy(history->values[layer][position], qkv + values, (size_t)kv_size(m) * sizeof *qkv);
  plain_attention(m, history, layer, position, qkv);
  plain_linear(m->output[layer], &l->output, qkv, result);
  for (int i = 0; i < m->model.hidden_size; i++) hidden[i] += result[i];
  plain_norm(hidden, l->mlp_norm, m->model.hidden_size, m->model.norm_epsilon, normed);
  plain_linear(m->gate_up[layer], &l->gate_up, normed, gate_up);
  for (int i = 0; i < m->inner; i++) gate_up[i] *= gate_up[m->inner + i] / (1 + exp(-gate_up[i]));
  plain_linear(m->down[layer], &l->down, gate_up, result);
  for (int i = 0; i < m->model.hidden_size; i++) hidden[i] += result[i];
}

/* Sequences, computed in two steps: some tokens, then the rest. */
typedef struct {
  int num_sequences;
  int32_t lengths[MAX_SEQUENCES], cuts[MAX_SEQUENCES];
  int64_t ids[MAX_SEQUENCES][POSITIONS];
  int32_t table[MAX_SEQUENCES * POSITIONS];
  uint16_t *keys[MAX_LAYERS], *values[MAX_LAYERS];
} sequences_t;

static void make_sequences(sequences_t *s, const model_t *m) {
  int num_slots = MAX_SEQUENCES * POSITIONS;
  s->num_sequences = below(3) ? between(1, 3) : between(9, MAX_SEQUENCES);
  int longest = s->num_sequences > 3 ? 20 : POSITIONS, decodes_all = below(2);
  for (int i = 0; i < num_slots; i++) {
    int other = below(i + 1);
    s->table[i] = s->table[other];
    s->table[other] = i;
  }
  for (int i = 0; i < s->num_sequences; i++) {
    s->lengths[i] = between(2, longest);
    s->cuts[i] = decodes_all || below(2) ? s->lengths[i] - 1 : between(1, s->lengths[i] - 1);
    for (int j = 0; j < s->lengths[i]; j++) s->ids[i][j] = below(VOCABULARY);
  }
  for (int layer = 0; layer < m->model.num_layers; layer++) {
    s->keys[layer] = guarded((size_t)(num_slots * kv_size(m)) * 2, 2);
    s->values[layer] = guarded((size_t)(num_slots * kv_size(m)) * 2, 2);
  }
}

/* Positions from starts to ends of all sequences: the hidden states, sequence after sequence. */
static uint16_t *step(const model_t *m, sequences_t *s, rf_team *team, const int32_t *starts, const int32_t *ends) {
  int32_t lengths[MAX_SEQUENCES], offsets[MAX_SEQUENCES];
  int64_t table_offsets[MAX_SEQUENCES];
  int count = 0;
  for (int i = 0; i < s->num_sequences; count += lengths[i++]) {
    lengths[i] = ends[i] - starts[i];
    offsets[i] = count;
    table_offsets[i] = i * POSITIONS;
  }
  int64_t *ids = guarded((size_t)count * 8, 8), *positions = guarded((size_t)count * 8, 8);
  int64_t *slots = guarded((size_t)count * 8, 8);
  for (int i = 0; i < s->num_sequences; i++) {
    for (int j = 0; j < lengths[i]; j++) {
      ids[offsets[i] + j] = s->ids[i][starts[i] + j];
      positions[offsets[i] + j] = starts[i] + j;
      slots[offsets[i] + j] = s->table[i * POSITIONS + starts[i] + j];
    }
  }
  rf_step step = {
      .batch = {s->num_sequences, starts, lengths, offsets, table_offsets, s->table},
      .num_tokens = count,
      .input_ids = ids,
      .positions = positions,
      .slots = slots,
      .keys = s->keys,
      .values = s->values,
      .workspace = guarded((size_t)rf_workspace_bytes(team, &m->model, count), 64),
      .hidden = guarded((size_t)count * (size_t)m->model.hidden_size * 2, 2),
  };
  fail_allocation(1);
  CHECK(rf_forward(team, &m->model, &step) == 1, "a step without memory for its plan was computed");
  fail_allocation(0);
  CHECK(rf_forward(team, &m->model, &step) == 0, "a step failed");
  return step.hidden;
}

/* The second step's hidden states, of which rounding to bfloat16 between phases leaves two digits. */
static void compare(const model_t *m, const sequences_t *s, const uint16_t *hidden, tally_t *tally) {
  static history_t history;
  double squares = 0, differences = 0;
  for (int i = 0; i < s->num_sequences; i++) {
    for (int position = 0; position < s->lengths[i]; position++) {
      double x[160];
      for (int d = 0; d < m->model.hidden_size; d++)
        x[d] = to_float(m->model.embedding[s->ids[i][position] * m->model.hidden_size + d]);
      for (int layer = 0; layer < m->model.num_layers; layer++) plain_layer(m, &history, layer, position, x);
      if (position < s->cuts[i]) continue;
      for (int d = 0; d < m->model.hidden_size; d++, hidden++) {
        differences += pow(to_float(*hidden) - x[d], 2);
        squares += x[d] * x[d];
      }
    }
  }
  note_error(tally, sqrt(differences / squares), 0.03);
  tally->num_cases++;
}

void check_forward(int num_cases, int num_threads) {
  tally_t tally = {.kind = "whole steps"};
  rf_team *team = rf_team_create(num_threads), *alone = rf_team_create(1);
  static sequences_t s;
  for (int i = 0; i < num_cases; i++) {
    const int32_t zeros[MAX_SEQUENCES] = {0};
    model_t *m = make_model();
    make_sequences(&s, m);
    step(m, &s, team, zeros, s.cuts);
    uint16_t *hidden = step(m, &s, team, s.cuts, s.lengths);
    compare(m, &s, hidden, &tally);
    int count = 0;
    for (int j = 0; j < s.num_sequences; j++) count += s.lengths[j] - s.cuts[j];
    uint16_t *again = step(m, &s, alone, s.cuts, s.lengths);
    CHECK(memcmp(hidden, again, (size_t)count * (size_t)m->model.hidden_size * 2) == 0,
          "a step depends on the number of threads");
    release_all();
  }
  rf_team_destroy(team);
  rf_team_destroy(alone);
  print_tally(&tally);
}
