/* Causal grouped-query attention over the paged KV pool, in place: softmax(q k / sqrt(head_dim)) v.
 *
 *   tile     up to 16 query rows, one a vector lane: the query heads that share a KV head, of as many tokens as fit
 *   block    RF_BLOCK positions of a sequence; maximum, sum and output of each row are carried from block to block
 *            (online softmax), all in float32
 *   item     what a thread takes at a time, of one sequence: one KV head and up to RF_SLOTS tiles of tokens, or, for a
 *            sequence that has one new token, up to RF_SLOTS KV heads, whose query rows share one tile
 *   slot     of an item: one of those tiles or KV heads
 *
 * K and V are read once for all query heads that share them. A row's result depends on nothing else in its item or
 * batch: blocks begin at multiples of RF_BLOCK, and lanes never mix (of a tile with several KV heads, each head's
 * queries are zero in the lanes of the others). So a NaN stays in its sequence, too.
 */
#ifndef RF_ATTENTION_H
#define RF_ATTENTION_H

#include "common.h"
#include "team.h"

#define RF_BLOCK 64
#define RF_SLOTS 4
#define RF_MAX_HEAD_DIM 256

/* The sequences of a step. Sequence i computes positions [starts[i], starts[i] + lengths[i]), which are the flat rows
 * from offsets[i] on, and finds the KV slots of positions 0, 1, ... at table[table_offsets[i]]. */
typedef struct {
  int32_t num_sequences;
  const int32_t *starts;
  const int32_t *lengths;
  const int32_t *offsets;
  const int64_t *table_offsets;
  const int32_t *table;
} rf_batch;

/* One layer. Strides in elements: of q and out from token to token, of keys and values from KV slot to KV slot. Heads
 * of head_dim elements lie side by side. */
typedef struct {
  const void *q;
  const void *keys;
  const void *values;
  void *out;
  int64_t q_stride;
  int64_t kv_stride;
  int64_t out_stride;
} rf_attention_layer;

typedef struct {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t is_bf16; /* else float32 */
} rf_attention_shape;

typedef struct rf_attention_plan rf_attention_plan;

/* The items of a step, for a team of the given size; the arrays of the batch must outlive the plan. NULL when there is
 * no memory, or the shape is not supported. */
RF_EXPORT rf_attention_plan *rf_attention_plan_create(const rf_batch *batch, const rf_attention_shape *shape,
                                                      int32_t num_members);
RF_EXPORT void rf_attention_plan_destroy(rf_attention_plan *plan);

/* One layer by the whole team. */
RF_EXPORT void rf_attend(rf_team *team, const rf_attention_plan *plan, const rf_attention_layer *layer);

/* Called by whoever takes an item, before anything of it is read: `row` is the flat row of its token. */
typedef void (*rf_prepare_item)(const void *argument, int row, int kv_head, int num_kv_heads);

/* Every item is of one token and the only one of its KV heads: who takes it may make their queries, keys and values. */
int rf_attention_plan_owns_kv_heads(const rf_attention_plan *plan);

/* The same from within a task. `prepare` only where items own their KV heads; NULL for nothing to do. */
void rf_attend_phase(rf_team *team, int member, int phase, const rf_attention_plan *plan,
                     const rf_attention_layer *layer, rf_prepare_item prepare, const void *argument);

size_t rf_scratch_bytes(void);

#endif
