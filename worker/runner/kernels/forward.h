/* All layers of a model of the Llama family in one call: the same as worker/model/llama.py, with the KV cache.
 *
 *   phases of a layer, a barrier after each:
 *     norm, q k v, rotate and write K and V, attention, + output, norm, silu(gate) * up, + down
 *
 * Barriers cost more than small phases. So norms of a few tokens are computed by every member for itself; and where all
 * sequences have one new token, whoever takes an item of attention rotates its queries and keys. Then five are left.
 *
 * Weights, K and V are bfloat16; the hidden state is float32 throughout, all else between phases bfloat16.
 */
#ifndef RF_FORWARD_H
#define RF_FORWARD_H

#include "attention.h"
#include "linear.h"

typedef struct {
  const uint16_t *attention_norm;
  rf_linear qkv;
  const uint16_t *query_norm; /* of each head; NULL for none, as key_norm */
  const uint16_t *key_norm;
  rf_linear output;
  const uint16_t *mlp_norm;
  rf_linear gate_up;
  rf_linear down;
} rf_layer;

typedef struct {
  int32_t num_layers;
  int32_t hidden_size;
  rf_attention_shape shape;
  float norm_epsilon;
  const uint16_t *embedding;
  const rf_layer *layers;
  /* Of each position, head_dim factors: x becomes x * cosine + x with halves swapped * signed_sine. */
  const uint16_t *cosine;
  const uint16_t *signed_sine;
} rf_model;

typedef struct {
  rf_batch batch;
  int32_t num_tokens;
  const int64_t *input_ids; /* [num_tokens], as positions and slots */
  const int64_t *positions;
  const int64_t *slots;
  uint16_t *const *keys; /* the pools of each layer, [slot][kv head][dim] */
  uint16_t *const *values;
  void *workspace;  /* rf_workspace_bytes, aligned to 64 bytes */
  uint16_t *hidden; /* result: [num_tokens][hidden_size], before the last norm */
} rf_step;

RF_EXPORT int64_t rf_workspace_bytes(const rf_team *team, const rf_model *model, int32_t num_tokens);
/* 0, or 1 when there is no memory or the model has too many layers. */
RF_EXPORT int32_t rf_forward(rf_team *team, const rf_model *model, const rf_step *step);

/* Once a process, before all else: asks the system for what the CPU has. */
RF_EXPORT void rf_init(void);
/* What is used, for people: "AMX", "AVX512-BF16", ... */
RF_EXPORT const char *rf_features(void);
/* Whether any vector instructions are. */
RF_EXPORT int32_t rf_have_vectors(void);

#endif
