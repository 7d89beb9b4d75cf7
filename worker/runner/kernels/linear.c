#include "linear.h"

#include "amx.h"

static int num_panels(int out_features) { return rf_ceil_div(out_features, 16); }

int64_t rf_packed_bytes(int32_t out_features, int32_t in_features) {
  return (int64_t)num_panels(out_features) * 16 * in_features * (int64_t)sizeof(uint16_t);
}

void rf_pack(const uint16_t *weight, int32_t out_features, int32_t in_features, uint16_t *packed) {
  for (int panel = 0; panel < num_panels(out_features); panel++) {
    for (int in = 0; in < in_features; in += 2) {
      for (int column = 0; column < 16; column++, packed += 2) {
        int out = panel * 16 + column;
        if (out < out_features)
          memcpy(packed, weight + (int64_t)out * in_features + in, 2 * sizeof *packed);
        else
          memset(packed, 0, 2 * sizeof *packed);
      }
    }
  }
}

#ifndef RF_HAS_AVX512_BF16

int32_t rf_linear_supported(void) { return 0; }
size_t rf_linear_scratch_bytes(void) { return 0; }

void rf_apply_phase(rf_team *team, int member, int phase, const rf_linear *linear, const rf_operands *operands) {
  (void)team, (void)member, (void)phase, (void)linear, (void)operands;
}

void rf_apply(rf_team *team, const rf_linear *linear, const rf_operands *operands) {
  (void)team, (void)linear, (void)operands;
}

#else

int32_t rf_linear_supported(void) { return 1; }

/* Sums of a block by panel, row and column. */
typedef float sums_t[4][32][16];

typedef struct {
  /* Where in_features exceeds RF_DEPTH, sums of all blocks of an item wait here for the next pass. */
  RF_ALIGNED float sums[RF_ROWS / 32][RF_PANELS / 2][2][32][16];
} scratch_t;

size_t rf_linear_scratch_bytes(void) { return sizeof(scratch_t); }

/* What a block asks for at each step of 32 inputs, so that nobody waits for it: lines of the panels that this thread
 * will probably compute next, which are on their way to the second-level cache meanwhile, and those that the block's
 * results go to. */
typedef struct {
  const char *panels[4];
  int num_panels; /* 0 for none */
  int panel_bytes; /* of each, at a step */
  const char *y;
  int64_t y_stride; /* bytes */
  int y_rows;       /* not asked for yet */
  int y_bytes;      /* of a row */
} ahead_t;

/* One block: rows of x by panels, from input `begin` to `end`. */
typedef struct {
  const uint16_t *x;
  int64_t x_stride;
  const uint16_t *panels[4];
  int num_rows;   /* 1 to 32 with two panels, to 16 with four */
  int num_panels; /* 2 or 4; the last may be repeated to fill up */
  int begin;
  int end;
  ahead_t ahead;
} block_t;

#define Y_ROWS_A_STEP 2

static inline void look_ahead(ahead_t *ahead) {
  for (int i = 0; i < ahead->num_panels; i++) {
    for (int at = 0; at < ahead->panel_bytes; at += 64) _mm_prefetch(ahead->panels[i] + at, _MM_HINT_T1);
    ahead->panels[i] += ahead->panel_bytes;
  }
  for (int i = 0; i < Y_ROWS_A_STEP && ahead->y_rows > 0; i++, ahead->y_rows--) {
    for (int at = 0; at < ahead->y_bytes; at += 64) __builtin_prefetch(ahead->y + at, 1);
    ahead->y += ahead->y_stride;
  }
}

#ifdef RF_HAS_AMX

/* Tiles: 0 to 3 sums, 4 and 5 x, 6 and 7 panels; with four panels 4 is x and 5 to 7 are panels. */
static void configure(int num_rows, int panels) {
  int first = rf_min(num_rows, 16), second = panels == 4 ? 16 : rf_max(num_rows - 16, 1);
  int sums = panels == 4 ? first : second;
  const int rows[8] = {first, first, sums, sums, first, second, 16, 16};
  rf_amx_configure(rows);
}

static inline void load_sums(const block_t *block, float (*sums)[32][16]) {
  if (block->begin == 0) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums[0][0], 64);
    _tile_loadd(1, sums[1][0], 64);
    _tile_loadd(2, sums[0][16], 64);
    _tile_loadd(3, sums[1][16], 64);
  }
}

/* Panels are loaded as a stream: in the first-level cache they would take the place of x, which all panels of an item
 * are multiplied by, and both together do not fit. */
static void multiply_two_panels(const block_t *block, float (*sums)[32][16]) {
  const uint16_t *x = block->x, *a = block->panels[0], *b = block->panels[1];
  int64_t stride = block->x_stride * 2;
  int two = block->num_rows > 16;
  ahead_t ahead = block->ahead;
  load_sums(block, sums);
  for (int in = block->begin; in < block->end; in += 32) {
    _tile_loadd(4, x + in, stride);
    _tile_stream_loadd(6, a + in * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, b + in * 16, 64);
    _tile_dpbf16ps(1, 4, 7);
    look_ahead(&ahead);
    if (two) {
      _tile_loadd(5, x + 16 * block->x_stride + in, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[1][0], 64);
  if (two) {
    _tile_stored(2, sums[0][16], 64);
    _tile_stored(3, sums[1][16], 64);
  }
}

/* Of few rows, where all is in the stream of weights: only in one pass over the inputs. */
static void multiply_four_panels(const block_t *block, float (*sums)[32][16]) {
  const uint16_t *x = block->x;
  const uint16_t *a = block->panels[0], *b = block->panels[1], *c = block->panels[2], *d = block->panels[3];
  int64_t stride = block->x_stride * 2;
  ahead_t ahead = block->ahead;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int in = block->begin; in < block->end; in += 32) {
    _tile_loadd(4, x + in, stride);
    _tile_stream_loadd(5, a + in * 16, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_stream_loadd(6, b + in * 16, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_stream_loadd(7, c + in * 16, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_stream_loadd(5, d + in * 16, 64);
    _tile_dpbf16ps(3, 4, 5);
    look_ahead(&ahead);
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[1][0], 64);
  _tile_stored(2, sums[2][0], 64);
  _tile_stored(3, sums[3][0], 64);
}

#endif

/* AVX512-BF16: `rows` rows by two panels; a constant where this is inlined. */
static inline __attribute__((always_inline)) void multiply_rows(const block_t *block, int first, int rows,
                                                                const uint16_t *a, const uint16_t *b,
                                                                float (*sums_a)[16], float (*sums_b)[16]) {
  __m512 s[8], t[8];
  for (int i = 0; i < rows; i++) {
    s[i] = block->begin == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums_a[first + i]);
    t[i] = block->begin == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums_b[first + i]);
  }
  const uint16_t *x = block->x + first * block->x_stride;
  for (int in = block->begin; in < block->end; in += 2) {
    __m512bh column_a = (__m512bh)_mm512_load_si512(a + in * 16);
    __m512bh column_b = (__m512bh)_mm512_load_si512(b + in * 16);
    for (int i = 0; i < rows; i++) {
      int32_t bits;
      memcpy(&bits, x + i * block->x_stride + in, sizeof bits);
      __m512bh pair = (__m512bh)_mm512_set1_epi32(bits);
      s[i] = _mm512_dpbf16_ps(s[i], column_a, pair);
      t[i] = _mm512_dpbf16_ps(t[i], column_b, pair);
    }
  }
  for (int i = 0; i < rows; i++) {
    _mm512_store_ps(sums_a[first + i], s[i]);
    _mm512_store_ps(sums_b[first + i], t[i]);
  }
}

static void multiply_avx512(const block_t *block, float (*sums)[32][16]) {
  for (int panel = 0; panel < block->num_panels; panel += 2) {
    const uint16_t *a = block->panels[panel], *b = block->panels[panel + 1];
    for (int row = 0; row < block->num_rows; row += 8) {
      switch (rf_min(block->num_rows - row, 8)) {
#define CASE(n) \
  case n: multiply_rows(block, row, n, a, b, sums[panel], sums[panel + 1]); break;
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
        CASE(5)
        CASE(6)
        CASE(7)
        CASE(8)
#undef CASE
      }
    }
  }
}

static void multiply(const block_t *block, float (*sums)[32][16]) {
#ifdef RF_HAS_AMX
  if (rf_amx_usable) {
    if (block->num_panels == 4)
      multiply_four_panels(block, sums);
    else
      multiply_two_panels(block, sums);
    return;
  }
#endif
  multiply_avx512(block, sums);
}

static void begin_shape(int num_rows, int panels) {
#ifdef RF_HAS_AMX
  if (rf_amx_usable) configure(num_rows, panels);
#else
  (void)num_rows, (void)panels;
#endif
}

/* Panels are numbered in the order in which they are computed: of a gate, gate and up take turns. */
static int panel_at(const rf_linear *linear, int output, int index) {
  if (output != RF_SWIGLU) return index;
  return index / 2 + (index % 2 ? num_panels(linear->out_features) / 2 : 0);
}

/* Two panels: 32 columns, the last `32 - count` of which do not exist, of some rows. A row's columns are written in one
 * go, because they are a whole line of the cache. */
typedef struct {
  const rf_operands *operands;
  v16f bias[2];
  int column; /* the first */
  int count;
} target_t;

static v16f read_bias(const rf_linear *linear, int panel) {
  RF_ALIGNED uint16_t bias[16] = {0};
  int count = rf_min(16, linear->out_features - panel * 16);
  if (linear->bias == NULL || count <= 0) return (v16f){0};
  memcpy(bias, linear->bias + panel * 16, (size_t)count * sizeof *bias);
  return v_from_bf16(bias);
}

static void store_rows(const target_t *to, int row, int num_rows, float (*a)[16], float (*b)[16]) {
  __mmask32 mask = to->count == 32 ? 0xffffffffu : (1u << to->count) - 1;
  for (int i = 0; i < num_rows; i++) {
    __m512 low = (__m512)(v_load(a[i]) + to->bias[0]), high = (__m512)(v_load(b[i]) + to->bias[1]);
    uint16_t *y = (uint16_t *)to->operands->y + (row + i) * to->operands->y_stride + to->column;
    _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

static void store_float_rows(const target_t *to, int row, int num_rows, float (*a)[16], float (*b)[16], int add) {
  __mmask32 mask = to->count == 32 ? 0xffffffffu : (1u << to->count) - 1;
  for (int i = 0; i < num_rows; i++) {
    __m512 low = (__m512)(v_load(a[i]) + to->bias[0]), high = (__m512)(v_load(b[i]) + to->bias[1]);
    float *y = (float *)to->operands->y + (row + i) * to->operands->y_stride + to->column;
    if (add) {
      low = _mm512_add_ps(low, _mm512_maskz_loadu_ps((__mmask16)mask, y));
      high = _mm512_add_ps(high, _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), y + 16));
    }
    _mm512_mask_storeu_ps(y, (__mmask16)mask, low);
    _mm512_mask_storeu_ps(y + 16, (__mmask16)(mask >> 16), high);
  }
}

static void store_gated_rows(const target_t *to, int row, int num_rows, float (*gates)[16], float (*ups)[16]) {
  for (int i = 0; i < num_rows; i++) {
    v16f gate = v_load(gates[i]) + to->bias[0], up = v_load(ups[i]) + to->bias[1];
    v_store_bf16((uint16_t *)to->operands->y + (row + i) * to->operands->y_stride + to->column, v_silu(gate) * up);
  }
}

/* What follows the sums of panels `index` and after it, by order of computing. */
static void finish(const rf_linear *linear, const rf_operands *operands, int index, int row, int num_rows,
                   float (*sums)[32][16]) {
  int panel = panel_at(linear, operands->output, index), second = panel_at(linear, operands->output, index + 1);
  target_t to = {
      .operands = operands,
      .bias = {read_bias(linear, panel), read_bias(linear, second)},
      .column = panel * 16,
      .count = rf_min(32, linear->out_features - panel * 16),
  };
  if (operands->output == RF_SWIGLU)
    store_gated_rows(&to, row, num_rows, sums[0], sums[1]);
  else if (operands->output == RF_STORE)
    store_rows(&to, row, num_rows, sums[0], sums[1]);
  else
    store_float_rows(&to, row, num_rows, sums[0], sums[1], operands->output == RF_ADD);
}

typedef struct {
  const rf_linear *linear;
  const rf_operands *operands;
  scratch_t *scratch;
  int panel; /* of the item, by order of computing */
  int end_panel;
  int next_panel; /* of the item that this thread will probably take next; -1 where it is this one's, or none */
} work_t;

static const uint16_t *packed_panel(const work_t *work, int index) {
  const rf_linear *linear = work->linear;
  return linear->packed + (int64_t)panel_at(linear, work->operands->output, index) * 16 * linear->in_features;
}

/* Of block `index` among `count` that compute the same panels, one after the other: each asks for its part of what lies
 * at their place in the next item. */
static ahead_t ahead_of(const work_t *work, int panel, int panels, int index, int count) {
  ahead_t ahead = {.panel_bytes = 1024 / rf_min(count, 16), .num_panels = work->next_panel < 0 ? 0 : panels};
  ahead.panel_bytes = rf_round_up(ahead.panel_bytes, 64);
  int64_t begin = (int64_t)index * ahead.panel_bytes * (work->linear->in_features / 32);
  if (begin >= (int64_t)work->linear->in_features * 32) ahead.num_panels = 0;
  for (int i = 0; i < ahead.num_panels; i++) {
    int next = work->next_panel + panel - work->panel + i;
    ahead.panels[i] = (const char *)packed_panel(work, rf_min(next, num_panels(work->linear->out_features) - 1)) + begin;
  }
  return ahead;
}

static void ask_for_results(const work_t *work, int row, int num_rows, int panel, ahead_t *ahead) {
  static const int widths[] = {[RF_STORE] = 64, [RF_STORE_FLOAT] = 128, [RF_ADD] = 128, [RF_SWIGLU] = 32};
  const rf_operands *operands = work->operands;
  int size = operands->output == RF_STORE || operands->output == RF_SWIGLU ? 2 : 4;
  int column = panel_at(work->linear, operands->output, panel) * 16;
  ahead->y = (const char *)operands->y + (row * operands->y_stride + column) * size;
  ahead->y_stride = operands->y_stride * size;
  ahead->y_rows = num_rows;
  ahead->y_bytes = widths[operands->output];
}

static block_t block_of(const work_t *work, int row, int num_rows, int panel, int panels) {
  const rf_linear *linear = work->linear;
  block_t block = {
      .x = work->operands->x + row * work->operands->x_stride,
      .x_stride = work->operands->x_stride,
      .num_rows = num_rows,
      .num_panels = panels,
      .end = linear->in_features,
  };
  for (int i = 0; i < panels; i++) {
    block.panels[i] = packed_panel(work, rf_min(panel + i, work->end_panel - 1));
  }
  return block;
}

/* Rows [row, row + num_rows), at most 32, for all panels of the item in one pass over the inputs. */
static void few_rows(const work_t *work, int row, int num_rows) {
  int panels = num_rows <= 16 ? 4 : 2;
  RF_ALIGNED sums_t sums;
  begin_shape(num_rows, panels);
  for (int panel = work->panel; panel < work->end_panel; panel += panels) {
    block_t block = block_of(work, row, num_rows, panel, panels);
    block.ahead = ahead_of(work, panel, panels, 0, 1);
    multiply(&block, sums);
    for (int i = 0; i < panels && panel + i < work->end_panel; i += 2)
      finish(work->linear, work->operands, panel + i, row, num_rows, sums + i);
  }
}

/* A multiple of 32 rows, at most RF_ROWS. */
static void many_rows(const work_t *work, int row, int num_rows) {
  int depth = work->linear->in_features;
  int passes = rf_ceil_div(depth, RF_DEPTH), step = rf_ceil_div(depth / 32, passes) * 32;
  begin_shape(32, 2);
  for (int begin = 0; begin < depth; begin += step) {
    for (int i = 0; i < num_rows / 32; i++) {
      for (int panel = work->panel; panel < work->end_panel; panel += 2) {
        float(*sums)[32][16] = work->scratch->sums[0][0];
        if (passes > 1) sums = work->scratch->sums[i][(panel - work->panel) / 2];
        block_t block = block_of(work, row + 32 * i, 32, panel, 2);
        block.begin = begin;
        block.end = rf_min(begin + step, depth);
        if (begin == 0) block.ahead = ahead_of(work, panel, 2, i, num_rows / 32);
        if (block.end == depth) ask_for_results(work, row + 32 * i, 32, panel, &block.ahead);
        multiply(&block, sums);
        if (block.end == depth) finish(work->linear, work->operands, panel, row + 32 * i, 32, sums);
      }
    }
  }
}

/* How a layer is cut: columns of panels by blocks of rows. */
typedef struct {
  int panels;
  int columns;
  int rows;
  int num_items;
} cut_t;

static cut_t cut_items(const rf_linear *linear, int num_rows, int num_members) {
  int panels = num_panels(linear->out_features), row_blocks = rf_ceil_div(num_rows, RF_ROWS);
  cut_t cut = {.panels = 4, .rows = rf_round_up(rf_ceil_div(num_rows, row_blocks), 32)};
  if (num_rows > 32) {
    /* As many columns as there are members, or a multiple, so that all of them end together. */
    int columns = rf_round_up(rf_ceil_div(panels, RF_PANELS), num_members);
    cut.panels = rf_round_up(rf_ceil_div(panels, columns), 2);
  } else if (rf_ceil_div(panels, 4) % num_members != 0) {
    cut.panels = 2;
  }
  cut.columns = rf_ceil_div(panels, cut.panels);
  cut.num_items = cut.columns * row_blocks;
  return cut;
}

void rf_apply_phase(rf_team *team, int member, int phase, const rf_linear *linear, const rf_operands *operands) {
  if (operands->num_rows < 1) return;
  int panels = num_panels(linear->out_features), num_members = rf_team_size(team);
  cut_t cut = cut_items(linear, operands->num_rows, num_members);
  work_t work = {.linear = linear, .operands = operands};
  work.scratch = (scratch_t *)rf_team_scratch(team, member);
  for (int i; (i = rf_team_claim(team, phase)) < cut.num_items;) {
    int row = i / cut.columns * cut.rows, count = rf_min(cut.rows, operands->num_rows - row), whole = count / 32 * 32;
    work.panel = i % cut.columns * cut.panels;
    work.end_panel = rf_min(work.panel + cut.panels, panels);
    work.next_panel = i + num_members < cut.num_items ? (i + num_members) % cut.columns * cut.panels : -1;
    if (whole == 32 && count == 32) {
      few_rows(&work, row, 32);
      continue;
    }
    if (whole > 0) many_rows(&work, row, whole);
    if (count > whole) few_rows(&work, row + whole, count - whole);
  }
#ifdef RF_HAS_AMX
  if (rf_amx_usable) rf_amx_end();
#endif
}

typedef struct {
  const rf_linear *linear;
  const rf_operands *operands;
} apply_t;

static void apply_task(rf_team *team, int member, void *argument) {
  const apply_t *apply = argument;
  rf_apply_phase(team, member, 0, apply->linear, apply->operands);
}

void rf_apply(rf_team *team, const rf_linear *linear, const rf_operands *operands) {
  apply_t apply = {linear, operands};
  rf_team_run(team, apply_task, &apply);
}

#endif
