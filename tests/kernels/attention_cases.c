/* Attention over random batches against the plainest form of it, in double precision. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "support.h"

#define MAX_SEQUENCES 8
#define MAX_WORK 4000000.0 /* multiplications of a case, so that the plain form stays quick */

typedef struct {
  rf_attention_shape shape;
  rf_batch batch;
  rf_attention_layer layer;
  int num_tokens;
} case_t;

static const int head_dims[] = {1, 2, 7, 16, 24, 32, 40, 48, 64, 64, 80, 96, 112, 128, 128, 176, 250, 256};
static const int groups[] = {1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33};
static const int all_starts[] = {0, 0, 1, 15, 16, 62, 63, 64, 65, 127, 200, 511, 700};
static const int all_lengths[] = {0, 1, 1, 1, 1, 2, 3, 15, 16, 17, 63, 64, 65, 130};
static const int page_sizes[] = {1, 2, 5, 16, 16, 32, 64};

static double work_of(const case_t *c, int start, int length) {
  return (double)length * (start + length) * c->shape.num_heads * c->shape.head_dim;
}

/* Slots of page_size follow one another; the pages of all sequences are in random order. */
static void deal_slots(int32_t *slots, int count, int page_size, int32_t *pages, int *pages_left) {
  int page = 0;
  for (int i = 0; i < count; i++) {
    if (i % page_size == 0) {
      int taken = below(*pages_left);
      page = pages[taken];
      pages[taken] = pages[--*pages_left];
    }
    slots[i] = page * page_size + i % page_size;
  }
}

static void choose_shape(case_t *c) {
  c->shape.is_bf16 = below(2);
  c->shape.head_dim = PICK(head_dims);
  c->shape.num_kv_heads = between(1, 5);
  c->shape.num_heads = c->shape.num_kv_heads * PICK(groups);
}

static int choose_sequences(case_t *c, int32_t *starts, int32_t *lengths, int32_t *offsets, int64_t *table_offsets) {
  int num_positions = 0;
  double work = 0;
  for (int i = 0; i < c->batch.num_sequences; i++) {
    starts[i] = PICK(all_starts);
    lengths[i] = PICK(all_lengths);
    if (work + work_of(c, starts[i], lengths[i]) > MAX_WORK) starts[i] = lengths[i] = 1;
    work += work_of(c, starts[i], lengths[i]);
    offsets[i] = c->num_tokens;
    table_offsets[i] = num_positions;
    c->num_tokens += lengths[i];
    num_positions += starts[i] + lengths[i];
  }
  return num_positions;
}

static void fill(void *to, int64_t count, int is_bf16, double scale) {
  for (int64_t i = 0; i < count; i++) put_element(to, i, is_bf16, scale * uniform());
}

/* All that belongs to no sequence is NaN. */
static case_t make_case(void) {
  case_t c = {.batch.num_sequences = between(0, MAX_SEQUENCES)};
  choose_shape(&c);
  size_t count = (size_t)c.batch.num_sequences, size = c.shape.is_bf16 ? 2 : 4;
  int32_t *starts = guarded(count * 4, 4), *lengths = guarded(count * 4, 4), *offsets = guarded(count * 4, 4);
  int64_t *table_offsets = guarded(count * 8, 8);
  int num_positions = choose_sequences(&c, starts, lengths, offsets, table_offsets), page_size = PICK(page_sizes);
  int num_pages = num_positions / page_size + c.batch.num_sequences + 2, pages_left = num_pages;
  int32_t *table = guarded((size_t)num_positions * 4, 4), *pages = guarded((size_t)num_pages * 4, 4);
  for (int i = 0; i < num_pages; i++) pages[i] = i;
  int kv_size = c.shape.num_kv_heads * c.shape.head_dim, q_size = c.shape.num_heads * c.shape.head_dim;
  c.layer.kv_stride = kv_size;
  c.layer.q_stride = q_size + (below(2) ? 0 : 2 * kv_size); /* as in a layer's q k v */
  c.layer.out_stride = q_size;
  size_t pool_bytes = (size_t)num_pages * (size_t)page_size * (size_t)kv_size * size;
  char *keys = guarded(pool_bytes, size), *values = guarded(pool_bytes, size);
  size_t q_elements = c.num_tokens ? (size_t)((c.num_tokens - 1) * c.layer.q_stride + q_size) : 0;
  void *q = guarded(q_elements * size, size);
  fill(q, (int64_t)q_elements, c.shape.is_bf16, below(2) ? 1 : 6);
  for (size_t i = 0; i < count; i++) {
    int32_t *own = table + table_offsets[i], length = starts[i] + lengths[i];
    deal_slots(own, length, page_size, pages, &pages_left);
    for (int position = 0; position < length; position++) {
      int64_t at = own[position] * c.layer.kv_stride * (int64_t)size;
      fill(keys + at, kv_size, c.shape.is_bf16, 1);
      fill(values + at, kv_size, c.shape.is_bf16, 1);
    }
  }
  c.batch = (rf_batch){c.batch.num_sequences, starts, lengths, offsets, table_offsets, table};
  c.layer.q = q;
  c.layer.keys = keys;
  c.layer.values = values;
  return c;
}

static void *attended(const case_t *c, rf_team *team, rf_attention_plan *plan) {
  size_t size = c->shape.is_bf16 ? 2 : 4;
  rf_attention_layer layer = c->layer;
  layer.out = guarded((size_t)c->num_tokens * (size_t)layer.out_stride * size, size);
  rf_attend(team, plan, &layer);
  return layer.out;
}

/* One head of one token: result[head_dim]. */
static void plain_head(const case_t *c, int sequence, int token, int head, double *result) {
  int head_dim = c->shape.head_dim, is_bf16 = c->shape.is_bf16, num_keys = c->batch.starts[sequence] + token + 1;
  int64_t column = (int64_t)(head / (c->shape.num_heads / c->shape.num_kv_heads)) * head_dim;
  int64_t q = (c->batch.offsets[sequence] + token) * c->layer.q_stride + (int64_t)head * head_dim;
  const int32_t *slots = c->batch.table + c->batch.table_offsets[sequence];
  double *scores = malloc((size_t)num_keys * sizeof *scores), maximum = -INFINITY, sum = 0;
  for (int key = 0; key < num_keys; key++) {
    double product = 0;
    for (int d = 0; d < head_dim; d++)
      product += element_at(c->layer.q, q + d, is_bf16) *
                 element_at(c->layer.keys, slots[key] * c->layer.kv_stride + column + d, is_bf16);
    scores[key] = product / sqrt(head_dim);
    maximum = fmax(maximum, scores[key]);
  }
  for (int d = 0; d < head_dim; d++) result[d] = 0;
  for (int key = 0; key < num_keys; key++) {
    double weight = exp(scores[key] - maximum);
    sum += weight;
    for (int d = 0; d < head_dim; d++)
      result[d] += weight * element_at(c->layer.values, slots[key] * c->layer.kv_stride + column + d, is_bf16);
  }
  for (int d = 0; d < head_dim; d++) result[d] /= sum;
  free(scores);
}

static void compare(const case_t *c, const void *out, tally_t *tally) {
  int head_dim = c->shape.head_dim;
  double expected[RF_MAX_HEAD_DIM];
  for (int sequence = 0; sequence < c->batch.num_sequences; sequence++) {
    for (int token = 0; token < c->batch.lengths[sequence]; token++) {
      int64_t row = (c->batch.offsets[sequence] + token) * c->layer.out_stride;
      for (int head = 0; head < c->shape.num_heads; head++) {
        plain_head(c, sequence, token, head, expected);
        for (int d = 0; d < head_dim; d++) {
          double got = element_at(out, row + head * head_dim + d, c->shape.is_bf16);
          note_error(tally, fabs(got - expected[d]), c->shape.is_bf16 ? 0.02 : 4e-6);
        }
      }
    }
  }
  tally->num_cases++;
}

/* A token that is computed with those before it, as of a prompt, and after them, as an answer's, has the same bits. */
static void check_token_alone(const case_t *c, rf_team *team, const char *together) {
  int sequence = c->batch.num_sequences ? below(c->batch.num_sequences) : 0;
  if (c->num_tokens == 0 || c->batch.lengths[sequence] == 0) return;
  int token = below(c->batch.lengths[sequence]), first = c->batch.offsets[sequence] + token;
  int32_t start = c->batch.starts[sequence] + token, length = 1, offset = 0;
  size_t size = c->shape.is_bf16 ? 2 : 4, bytes = (size_t)(c->shape.num_heads * c->shape.head_dim) * size;
  rf_batch batch = {1, &start, &length, &offset, c->batch.table_offsets + sequence, c->batch.table};
  rf_attention_layer layer = c->layer;
  layer.q = (const char *)layer.q + first * layer.q_stride * (int64_t)size;
  layer.out = guarded(bytes, size);
  rf_attention_plan *plan = rf_attention_plan_create(&batch, &c->shape, rf_team_size(team));
  rf_attend(team, plan, &layer);
  const char *expected = together + first * layer.out_stride * (int64_t)size;
  CHECK(memcmp(expected, layer.out, bytes) == 0, "a token depends on those beside it");
  rf_attention_plan_destroy(plan);
}

void check_attention(int num_cases, int num_threads) {
  tally_t tallies[] = {{.kind = "attention in float32"}, {.kind = "attention in bfloat16"}};
  rf_team *team = rf_team_create(num_threads), *alone = rf_team_create(1);
  for (int i = 0; i < num_cases; i++) {
    case_t c = make_case();
    rf_attention_plan *plan = rf_attention_plan_create(&c.batch, &c.shape, num_threads);
    rf_attention_plan *other = rf_attention_plan_create(&c.batch, &c.shape, 1);
    void *out = attended(&c, team, plan), *again = attended(&c, alone, other);
    compare(&c, out, &tallies[c.shape.is_bf16]);
    size_t bytes = (size_t)c.num_tokens * (size_t)c.layer.out_stride * (c.shape.is_bf16 ? 2 : 4);
    CHECK(memcmp(out, again, bytes) == 0, "attention depends on the number of threads");
    check_token_alone(&c, team, out);
    rf_attention_plan_destroy(plan);
    rf_attention_plan_destroy(other);
    release_all();
  }
  rf_team_destroy(team);
  rf_team_destroy(alone);
  print_tally(&tallies[0]);
  print_tally(&tallies[1]);
}

/* Slots, tokens and heads so far from each other that their distance in elements does not fit into 32 bits. */
void check_far_attention(void) {
  enum { HEAD_DIM = 64, SLOTS = 40, STRIDE = 1 << 27 };
  tally_t tally = {.kind = "attention over more than 2^32 elements"};
  int32_t starts[] = {37, 20}, lengths[] = {1, 5}, offsets[] = {0, 1}, table[SLOTS];
  int64_t table_offsets[] = {0, 10};
  for (int i = 0; i < SLOTS; i++) table[i] = i < 16 ? i : SLOTS + 15 - i;
  rf_team *team = rf_team_create(2);
  for (int is_bf16 = 0; is_bf16 < 2; is_bf16++) {
    size_t bytes = (size_t)SLOTS * STRIDE * (is_bf16 ? 2 : 4);
    case_t c = {.shape = {2, 1, HEAD_DIM, is_bf16}, .batch = {2, starts, lengths, offsets, table_offsets, table}};
    void *q = sparse(bytes), *keys = sparse(bytes), *values = sparse(bytes);
    c.layer = (rf_attention_layer){q, keys, values, sparse(bytes), STRIDE, STRIDE, STRIDE};
    for (int64_t row = 0; row < SLOTS; row++) {
      for (int64_t i = 0; i < HEAD_DIM; i++) {
        put_element(keys, row * STRIDE + i, is_bf16, uniform());
        put_element(values, row * STRIDE + i, is_bf16, uniform());
        if (row < 6) put_element(q, row * STRIDE + i, is_bf16, uniform());
        if (row < 6) put_element(q, row * STRIDE + HEAD_DIM + i, is_bf16, uniform());
      }
    }
    rf_attention_plan *plan = rf_attention_plan_create(&c.batch, &c.shape, 2);
    rf_attend(team, plan, &c.layer);
    compare(&c, c.layer.out, &tally);
    rf_attention_plan_destroy(plan);
    release_all();
  }
  rf_team_destroy(team);
  print_tally(&tally);
}
