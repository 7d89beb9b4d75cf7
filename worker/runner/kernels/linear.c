#include "linear.h"

#include "linear_kernels.h"

int64_t rf_packed_bytes(int32_t out_features, int32_t in_features) {
  return (int64_t)rf_num_panels(out_features) * 16 * in_features * (int64_t)sizeof(uint16_t);
}

void rf_pack(const uint16_t *weight, int32_t out_features, int32_t in_features, uint16_t *packed) {
  for (int panel = 0; panel < rf_num_panels(out_features); panel++) {
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

typedef struct {
  /* Where in_features exceeds RF_DEPTH, sums of all blocks of an item wait here for the next pass. */
  RF_ALIGNED float sums[RF_ROWS / 32][RF_PANELS / 2][2][32][16];
} scratch_t;

size_t rf_linear_scratch_bytes(void) { return sizeof(scratch_t); }

static const rf_linear_kernel *choose_kernel(void) {
#ifdef RF_HAS_AMX
  if (rf_amx_usable) return &rf_linear_amx;
#endif
#ifdef RF_HAS_AVX512_BF16
  return &rf_linear_avx512_bf16;
#else
  return &rf_linear_float;
#endif
}

typedef struct {
  const rf_linear *linear;
  const rf_operands *operands;
  const rf_linear_kernel *kernel;
  scratch_t *scratch;
  int panel; /* of the item, by order of computing */
  int end_panel;
  int next_panel; /* of the item that this thread will probably take next; -1 where it is this one's, or none */
} work_t;

static const uint16_t *packed_panel(const work_t *work, int index) {
  const rf_linear *linear = work->linear;
  return linear->packed + (int64_t)rf_panel_at(linear, work->operands->output, index) * 16 * linear->in_features;
}

/* Of block `index` among `count` that compute the same panels, one after the other: each asks for its part of what lies
 * at their place in the next item. */
static rf_ahead ahead_of(const work_t *work, int panel, int panels, int index, int count) {
  rf_ahead ahead = {.panel_bytes = 1024 / rf_min(count, 16), .num_panels = work->next_panel < 0 ? 0 : panels};
  ahead.panel_bytes = rf_round_up(ahead.panel_bytes, 64);
  int64_t begin = (int64_t)index * ahead.panel_bytes * (work->linear->in_features / 32);
  if (begin >= (int64_t)work->linear->in_features * 32) ahead.num_panels = 0;
  for (int i = 0; i < ahead.num_panels; i++) {
    int next = work->next_panel + panel - work->panel + i;
    next = rf_min(next, rf_num_panels(work->linear->out_features) - 1);
    ahead.panels[i] = (const char *)packed_panel(work, next) + begin;
  }
  return ahead;
}

static void ask_for_results(const work_t *work, int row, int num_rows, int panel, rf_ahead *ahead) {
  static const int widths[] = {[RF_STORE] = 64, [RF_STORE_FLOAT] = 128, [RF_ADD] = 128, [RF_SWIGLU] = 32};
  const rf_operands *operands = work->operands;
  if (operands->output == RF_LARGEST) return;
  int size = operands->output == RF_STORE || operands->output == RF_SWIGLU ? 2 : 4;
  int column = rf_panel_at(work->linear, operands->output, panel) * 16;
  ahead->y = (const char *)operands->y + (row * operands->y_stride + column) * size;
  ahead->y_stride = operands->y_stride * size;
  ahead->y_rows = num_rows;
  ahead->y_bytes = widths[operands->output];
}

static rf_linear_block block_of(const work_t *work, int row, int num_rows, int panel, int panels) {
  const rf_linear *linear = work->linear;
  rf_linear_block block = {
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

/* Rows [row, row + num_rows), at most 32, for all panels of the item in one pass over the inputs: four panels at a time
 * where registers hold their sums, and two for those left over. */
static void few_rows(const work_t *work, int row, int num_rows) {
  int configured = 0, panels;
  RF_ALIGNED rf_sums sums;
  for (int panel = work->panel; panel < work->end_panel; panel += panels) {
    panels = num_rows <= 16 && work->end_panel - panel > 2 ? 4 : 2;
    if (panels != configured) work->kernel->begin(num_rows, configured = panels);
    rf_linear_block block = block_of(work, row, num_rows, panel, panels);
    block.ahead = ahead_of(work, panel, panels, 0, 1);
    work->kernel->multiply(&block, sums);
    for (int i = 0; i < panels && panel + i < work->end_panel; i += 2)
      rf_finish(work->linear, work->operands, panel + i, row, num_rows, sums + i);
  }
}

/* A multiple of 32 rows, at most RF_ROWS. */
static void many_rows(const work_t *work, int row, int num_rows) {
  int depth = work->linear->in_features;
  int passes = rf_ceil_div(depth, RF_DEPTH), step = rf_ceil_div(depth / 32, passes) * 32;
  work->kernel->begin(32, 2);
  for (int begin = 0; begin < depth; begin += step) {
    for (int i = 0; i < num_rows / 32; i++) {
      for (int panel = work->panel; panel < work->end_panel; panel += 2) {
        float(*sums)[32][16] = work->scratch->sums[0][0];
        if (passes > 1) sums = work->scratch->sums[i][(panel - work->panel) / 2];
        rf_linear_block block = block_of(work, row + 32 * i, 32, panel, 2);
        block.begin = begin;
        block.end = rf_min(begin + step, depth);
        if (begin == 0) block.ahead = ahead_of(work, panel, 2, i, num_rows / 32);
        if (block.end == depth) ask_for_results(work, row + 32 * i, 32, panel, &block.ahead);
        work->kernel->multiply(&block, sums);
        if (block.end == depth) rf_finish(work->linear, work->operands, panel, row + 32 * i, 32, sums);
      }
    }
  }
}

/* How a layer is cut: columns of panels by blocks of rows. There are as many columns as members, or a multiple, and no
 * two differ by more than a pair of panels, so that all members end together. */
typedef struct {
  int num_pairs; /* of panels, which stay together */
  int columns;
  int rows;
  int num_items;
} cut_t;

static cut_t cut_items(const rf_linear *linear, int num_rows, int num_members) {
  int panels = rf_num_panels(linear->out_features), row_blocks = rf_ceil_div(num_rows, RF_ROWS);
  cut_t cut = {.num_pairs = rf_ceil_div(panels, 2), .rows = rf_round_up(rf_ceil_div(num_rows, row_blocks), 32)};
  cut.columns = rf_round_up(rf_ceil_div(panels, num_rows > 32 ? RF_PANELS : 4), num_members);
  cut.num_items = cut.columns * row_blocks;
  return cut;
}

/* The first panel of an item's column. */
static int first_panel(const cut_t *cut, int item) {
  return (int)((int64_t)cut->num_pairs * (item % cut->columns) / cut->columns) * 2;
}

void rf_apply_phase(rf_team *team, int member, int phase, const rf_linear *linear, const rf_operands *operands) {
  if (operands->num_rows < 1) return;
  int panels = rf_num_panels(linear->out_features), num_members = rf_team_size(team);
  cut_t cut = cut_items(linear, operands->num_rows, num_members);
  work_t work = {.linear = linear, .operands = operands, .kernel = choose_kernel()};
  work.scratch = (scratch_t *)rf_team_scratch(team, member);
  for (int i; (i = rf_team_claim(team, phase)) < cut.num_items;) {
    int row = i / cut.columns * cut.rows, count = rf_min(cut.rows, operands->num_rows - row), whole = count / 32 * 32;
    int is_last = (i + 1) % cut.columns == 0;
    work.panel = first_panel(&cut, i);
    work.end_panel = is_last ? panels : first_panel(&cut, i + 1);
    work.next_panel = i + num_members < cut.num_items ? first_panel(&cut, i + num_members) : -1;
    if (whole == 32 && count == 32) {
      few_rows(&work, row, 32);
      continue;
    }
    if (whole > 0) many_rows(&work, row, whole);
    if (count > whole) few_rows(&work, row + whole, count - whole);
  }
  work.kernel->end();
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
  rf_team_run(team, apply_task, &apply, 1);
}
