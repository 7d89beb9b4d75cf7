/* How the attention of a step is cut into items, once for all layers. */
#ifndef RF_ATTENTION_PLAN_H
#define RF_ATTENTION_PLAN_H

#include "attention_kernels.h"

typedef struct {
  int32_t sequence;
  int32_t kv_head;
  int32_t num_kv_heads; /* several only where there is one token */
  int32_t first_head;   /* of the query heads of kv_head */
  int32_t num_heads;    /* query heads of each KV head */
  int32_t first_token;  /* within the sequence's new tokens */
  int32_t end_token;
} rf_attention_item;

struct rf_attention_plan {
  rf_batch batch;
  rf_attention_shape shape;
  const rf_attention_kernel *kernel;
  int heads_per_tile;   /* query heads of one KV head in a tile */
  int tokens_per_tile;  /* of a sequence with several new tokens */
  int kv_heads_per_item; /* of a sequence with one */
  int num_items;
  rf_attention_item *items;
};

#endif
