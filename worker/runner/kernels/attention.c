#include "attention.h"

#include <math.h>

#include "attention_plan.h"

size_t rf_scratch_bytes(void) { return sizeof(rf_attention_scratch); }

static void rescale(rf_attention_scratch *scratch, int slot, int first, int num_rows, int head_dim, v16f scale) {
  for (int d = 0; d < rf_ceil_div(head_dim, 16); d++)
    for (int row = 0; row < num_rows; row++)
      for (int i = 0; i < 16; i++) scratch->out[slot][d][row][i] *= scale[first + row];
}

/* Attention of one item. */
typedef struct {
  const rf_attention_plan *plan;
  const rf_attention_layer *layer;
  const rf_attention_item *item;
  const rf_attention_item *next; /* that this thread will probably take next, if it is of one token too; else NULL */
  rf_attention_scratch *scratch;
} work_t;

static int element_bytes(const rf_attention_shape *shape) { return shape->is_bf16 ? 2 : 4; }

/* Where a query row lies in q or out: row `row` of those of the tile that begins with the given token. */
static void *row_of(const work_t *work, const void *base, int64_t stride, int kv_head, int token, int row) {
  const rf_attention_plan *plan = work->plan;
  const rf_attention_item *item = work->item;
  int group = plan->shape.num_heads / plan->shape.num_kv_heads;
  int64_t flat = (int64_t)plan->batch.offsets[item->sequence] + token + row / item->num_heads;
  int64_t head = (int64_t)kv_head * group + item->first_head + row % item->num_heads;
  return (char *)base + (flat * stride + head * plan->shape.head_dim) * element_bytes(&plan->shape);
}

static void begin_slot(const work_t *work, int slot, int kv_head, int token, int first, int num_rows) {
  rf_attention_scratch *scratch = work->scratch;
  int head_dim = work->plan->shape.head_dim;
  const void *rows[RF_LANES];
  for (int row = 0; row < num_rows; row++)
    rows[row] = row_of(work, work->layer->q, work->layer->q_stride, kv_head, token, row);
  work->plan->kernel->load_queries(scratch, slot, rows, first, num_rows, head_dim);
  for (int d = 0; d < rf_ceil_div(head_dim, 16); d++)
    memset(scratch->out[slot][d], 0, sizeof scratch->out[slot][d][0] * (size_t)num_rows);
  for (int lane = 0; lane < RF_LANES; lane++) scratch->maximum[slot][lane] = RF_HIDDEN, scratch->sum[slot][lane] = 0;
}

static void end_slot(const work_t *work, int slot, int tile, int kv_head, int token, int first, int num_rows) {
  rf_attention_scratch *scratch = work->scratch;
  const rf_attention_shape *shape = &work->plan->shape;
  for (int row = 0; row < num_rows; row++) {
    void *to = row_of(work, work->layer->out, work->layer->out_stride, kv_head, token, row);
    float inverse = 1.0f / scratch->sum[tile][first + row];
    for (int dim = 0; dim < shape->head_dim; dim += 16) {
      RF_ALIGNED float x[16];
      RF_ALIGNED uint16_t narrow[16];
      *(v16f *)x = work->plan->kernel->read_out(scratch, slot, row, dim, shape->head_dim);
      for (int i = 0; i < 16; i += RF_WIDTH) {
        v_store(x + i, v_load(x + i) * inverse);
        v_store_bf16(narrow + i, v_load(x + i));
      }
      size_t count = (size_t)rf_min(16, shape->head_dim - dim);
      if (shape->is_bf16)
        memcpy((uint16_t *)to + dim, narrow, count * sizeof *narrow);
      else
        memcpy((float *)to + dim, x, count * sizeof *x);
    }
  }
}

static rf_block block_at(const work_t *work, const void *pool, int kv_head, int position, int num_positions) {
  const rf_attention_plan *plan = work->plan;
  int64_t start = plan->batch.table_offsets[work->item->sequence] + position;
  return (rf_block){
      .base = (const char *)pool + (int64_t)kv_head * plan->shape.head_dim * element_bytes(&plan->shape),
      .slot_bytes = work->layer->kv_stride * element_bytes(&plan->shape),
      .slots = plan->batch.table + start,
      .count = rf_min(RF_BLOCK, num_positions - position),
  };
}

/* Lists what the block at `position` will read, in the order last to first: keys are needed first. After the last block
 * comes the first of the next item. */
static void look_ahead(const work_t *work, int position, int num_positions) {
  rf_attention_scratch *scratch = work->scratch;
  work_t next;
  if (position >= num_positions && work->next != NULL) {
    next = *work;
    next.item = work->next;
    work = &next;
    position = 0;
    num_positions = work->plan->batch.starts[work->item->sequence] + 1;
  }
  int count = 0;
  if (position < num_positions) {
    rf_block keys = block_at(work, work->layer->keys, work->item->kv_head, position, num_positions);
    rf_block values = block_at(work, work->layer->values, work->item->kv_head, position, num_positions);
    for (int i = values.count - 1; i >= 0; i--)
      scratch->ahead[count++] = values.base + values.slots[i] * values.slot_bytes;
    for (int i = keys.count - 1; i >= 0; i--)
      scratch->ahead[count++] = keys.base + keys.slots[i] * keys.slot_bytes;
  }
  scratch->num_ahead = count;
  scratch->ahead_bytes = work->item->num_kv_heads * work->plan->shape.head_dim * element_bytes(&work->plan->shape);
}

/* One token: each slot is a KV head, and all of them share the tile. */
static void attend_single(const work_t *work) {
  const rf_attention_plan *plan = work->plan;
  const rf_attention_kernel *kernel = plan->kernel;
  const rf_attention_item *item = work->item;
  rf_attention_scratch *scratch = work->scratch;
  int head_dim = plan->shape.head_dim, num_rows = item->num_heads;
  int num_positions = plan->batch.starts[item->sequence] + 1;
  float factor = RF_LOG2E / sqrtf((float)head_dim);
  for (int i = 0; i < item->num_kv_heads; i++) begin_slot(work, i, item->kv_head + i, 0, i * num_rows, num_rows);
  for (int position = 0; position < num_positions; position += RF_BLOCK) {
    rf_block block = {0};
    look_ahead(work, position + RF_BLOCK, num_positions);
    for (int i = 0; i < item->num_kv_heads; i++) {
      block = block_at(work, work->layer->keys, item->kv_head + i, position, num_positions);
      kernel->load_keys(scratch, i, &block, head_dim);
    }
    kernel->score(scratch, 0, 0, item->num_kv_heads, num_rows, block.count, head_dim);
    v16f scale;
    v16i visible = (v16i){0} + (block.count - 1);
    int scaled =
        kernel->soften(scratch, 0, item->num_kv_heads * num_rows, block.count, visible, factor, &scale);
    for (int i = 0; i < item->num_kv_heads; i++) {
      block = block_at(work, work->layer->values, item->kv_head + i, position, num_positions);
      kernel->load_values(scratch, &block, head_dim);
      if (scaled && position > 0) rescale(scratch, i, i * num_rows, num_rows, head_dim, scale);
      kernel->accumulate(scratch, i, i * num_rows, num_rows, block.count, head_dim);
    }
  }
  for (int i = 0; i < item->num_kv_heads; i++) end_slot(work, i, 0, item->kv_head + i, 0, i * num_rows, num_rows);
}

typedef struct {
  int token; /* the first */
  int num_rows;
  v16i token_of_row; /* from the first on; lanes without a row have the last row's */
} tile_t;

static int cut_tiles(const work_t *work, tile_t *tiles) {
  const rf_attention_item *item = work->item;
  int count = 0;
  for (int token = item->first_token; token < item->end_token; token += work->plan->tokens_per_tile, count++) {
    int num_tokens = rf_min(work->plan->tokens_per_tile, item->end_token - token);
    tiles[count].token = token;
    tiles[count].num_rows = num_tokens * item->num_heads;
    for (int row = 0; row < RF_LANES; row++)
      tiles[count].token_of_row[row] = rf_min(row / item->num_heads, num_tokens - 1);
    begin_slot(work, count, item->kv_head, token, 0, tiles[count].num_rows);
  }
  return count;
}

/* Several tokens: each slot is a tile, and all of them read the same KV head. */
static void attend_several(const work_t *work) {
  const rf_attention_plan *plan = work->plan;
  const rf_attention_kernel *kernel = plan->kernel;
  const rf_attention_item *item = work->item;
  rf_attention_scratch *scratch = work->scratch;
  int head_dim = plan->shape.head_dim, start = plan->batch.starts[item->sequence];
  int num_positions = start + item->end_token;
  float factor = RF_LOG2E / sqrtf((float)head_dim);
  tile_t tiles[RF_SLOTS];
  int num_tiles = cut_tiles(work, tiles);
  scratch->num_ahead = 0; /* there is more to compute than to read */
  for (int position = 0; position < num_positions; position += RF_BLOCK) {
    rf_block keys = block_at(work, work->layer->keys, item->kv_head, position, num_positions);
    rf_block values = block_at(work, work->layer->values, item->kv_head, position, num_positions);
    kernel->load_keys(scratch, 0, &keys, head_dim);
    kernel->load_values(scratch, &values, head_dim);
    for (int i = 0; i < num_tiles; i++) {
      v16i visible = tiles[i].token_of_row + (start + tiles[i].token - position);
      int num_keys = rf_min(keys.count, visible[RF_LANES - 1] + 1);
      if (num_keys <= 0) continue; /* the block begins after the tile's last token */
      kernel->score(scratch, i, 0, 1, tiles[i].num_rows, num_keys, head_dim);
      v16f scale;
      int scaled = kernel->soften(scratch, i, tiles[i].num_rows, num_keys, visible, factor, &scale);
      if (scaled && position > 0) rescale(scratch, i, 0, tiles[i].num_rows, head_dim, scale);
      kernel->accumulate(scratch, i, 0, tiles[i].num_rows, num_keys, head_dim);
    }
  }
  for (int i = 0; i < num_tiles; i++) end_slot(work, i, i, item->kv_head, tiles[i].token, 0, tiles[i].num_rows);
}

static int is_single(const rf_attention_plan *plan, int item) {
  return plan->batch.lengths[plan->items[item].sequence] == 1;
}

void rf_attend_phase(rf_team *team, int member, int phase, const rf_attention_plan *plan,
                     const rf_attention_layer *layer, rf_prepare_item prepare, const void *argument) {
  work_t work = {.plan = plan, .layer = layer, .scratch = rf_team_scratch(team, member)};
  int tile_rows = 0;
  for (int i; (i = rf_team_claim(team, phase)) < plan->num_items;) {
    int next = i + rf_team_size(team);
    work.item = &plan->items[i];
    work.next = next < plan->num_items && is_single(plan, next) ? &plan->items[next] : NULL;
    int single = is_single(plan, i);
    if (prepare != NULL)
      prepare(argument, plan->batch.offsets[work.item->sequence], work.item->kv_head, work.item->num_kv_heads);
    int rows = single ? work.item->num_heads : work.item->num_heads * plan->tokens_per_tile;
    if (rows != tile_rows) plan->kernel->begin(tile_rows = rows);
    if (single)
      attend_single(&work);
    else
      attend_several(&work);
  }
  plan->kernel->end();
}

typedef struct {
  const rf_attention_plan *plan;
  const rf_attention_layer *layer;
} attend_t;

static void attend_task(rf_team *team, int member, void *argument) {
  const attend_t *attend = argument;
  rf_attend_phase(team, member, 0, attend->plan, attend->layer, NULL, NULL);
}

void rf_attend(rf_team *team, const rf_attention_plan *plan, const rf_attention_layer *layer) {
  attend_t attend = {plan, layer};
  rf_team_run(team, attend_task, &attend, 1);
}
