#include "attention_plan.h"

#include <stdlib.h>

static const rf_attention_kernel *choose_kernel(const rf_attention_shape *shape) {
  if (!shape->is_bf16) return &rf_attention_f32;
#ifdef RF_HAS_AMX
  if (rf_amx_usable && shape->head_dim % 16 == 0) return &rf_attention_amx;
#endif
#ifdef RF_HAS_AVX512_BF16
  if (shape->head_dim % 16 == 0) return &rf_attention_avx512_bf16;
#endif
  return &rf_attention_bf16_as_f32;
}

/* KV heads that share a tile save most of the softmax's work, but each item should have a few others beside it. */
static int choose_kv_heads_per_item(const rf_attention_plan *plan, int num_members) {
  int num_kv_heads = plan->shape.num_kv_heads;
  int most = rf_min(rf_min(RF_SLOTS, RF_LANES / plan->heads_per_tile), num_kv_heads);
  if (num_members == 1) return most;
  int num_single = 0;
  for (int i = 0; i < plan->batch.num_sequences; i++) num_single += plan->batch.lengths[i] == 1;
  return rf_max(1, rf_min(most, num_single * num_kv_heads / (3 * num_members)));
}

/* A prompt's last tokens, which see most, come first, so that the end of the phase is made of small pieces. Counts only
 * where `items` is NULL. */
static int list_items(const rf_attention_plan *plan, rf_attention_item *items) {
  const rf_batch *batch = &plan->batch;
  int num_kv_heads = plan->shape.num_kv_heads, group = plan->shape.num_heads / num_kv_heads;
  int tokens_per_item = plan->tokens_per_tile * RF_SLOTS, count = 0;
  for (int sequence = 0; sequence < batch->num_sequences; sequence++) {
    int length = batch->lengths[sequence], step = length == 1 ? plan->kv_heads_per_item : 1;
    for (int i = rf_ceil_div(length, tokens_per_item) - 1; i >= 0; i--) {
      for (int kv_head = 0; kv_head < num_kv_heads; kv_head += step) {
        for (int head = 0; head < group; head += plan->heads_per_tile, count++) {
          if (items == NULL) continue;
          items[count] = (rf_attention_item){
              .sequence = sequence,
              .kv_head = kv_head,
              .num_kv_heads = rf_min(step, num_kv_heads - kv_head),
              .first_head = head,
              .num_heads = rf_min(plan->heads_per_tile, group - head),
              .first_token = i * tokens_per_item,
              .end_token = rf_min((i + 1) * tokens_per_item, length),
          };
        }
      }
    }
  }
  return count;
}

rf_attention_plan *rf_attention_plan_create(const rf_batch *batch, const rf_attention_shape *shape,
                                            int32_t num_members) {
  if (shape->head_dim < 1 || shape->head_dim > RF_MAX_HEAD_DIM || shape->num_kv_heads < 1 || shape->num_heads < 1 ||
      shape->num_heads % shape->num_kv_heads != 0 || num_members < 1)
    return NULL;
  rf_attention_plan *plan = calloc(1, sizeof *plan);
  if (plan == NULL) return NULL;
  int group = shape->num_heads / shape->num_kv_heads;
  plan->batch = *batch;
  plan->shape = *shape;
  plan->kernel = choose_kernel(shape);
  plan->heads_per_tile = rf_ceil_div(group, rf_ceil_div(group, RF_LANES));
  plan->tokens_per_tile = RF_LANES / plan->heads_per_tile;
  plan->kv_heads_per_item = choose_kv_heads_per_item(plan, num_members);
  plan->num_items = list_items(plan, NULL);
  plan->items = malloc((size_t)rf_max(plan->num_items, 1) * sizeof *plan->items);
  if (plan->items == NULL) {
    free(plan);
    return NULL;
  }
  list_items(plan, plan->items);
  return plan;
}

int rf_attention_plan_owns_kv_heads(const rf_attention_plan *plan) {
  int is_whole_group = plan->heads_per_tile == plan->shape.num_heads / plan->shape.num_kv_heads, count = 0;
  for (int i = 0; i < plan->batch.num_sequences; i++) count += plan->batch.lengths[i] == 1;
  return is_whole_group && count == plan->batch.num_sequences;
}

void rf_attention_plan_destroy(rf_attention_plan *plan) {
  if (plan == NULL) return;
  free(plan->items);
  free(plan);
}
