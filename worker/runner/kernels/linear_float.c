/* Products of linear layers in float32 by vector extensions, for CPUs without instructions for bfloat16.
 *
 * A word of a panel holds two inputs of one output: shifted left it is the first as a float, its upper half the second.
 * Of CHUNK inputs at a time, x is widened once for all panels of the block; chunk and panels stay in the first-level
 * cache, and the sums of some rows by one or two panels in registers. Each sum runs over the inputs in their order.
 */
#include "linear_kernels.h"

/* Rows at a time, and sums that registers hold beside a panel's inputs, what splits them, and one of x. */
#if defined(__AVX512F__)
#define ROWS 8
#define SUMS 16
#elif defined(__AVX__)
#define ROWS 5
#define SUMS 10
#elif defined(__aarch64__)
#define ROWS 6
#define SUMS 24
#else
#define ROWS 2
#define SUMS 8
#endif
#define PARTS (16 / RF_WIDTH) /* of a panel */
#define CHUNK 64

static void widen(const uint16_t *from, int count, float *to) {
  for (int i = 0; i < count; i += RF_WIDTH) v_store(to + i, v_from_bf16(from + i));
}

/* `rows` and `panels` are constants where this is inlined. */
static inline __attribute__((always_inline)) void multiply_rows(const float (*x)[CHUNK], int rows, int count,
                                                                const uint16_t *const *packed, int panels,
                                                                float (*sums)[32][16], int first_row) {
  floats s[8][2][PARTS];
  for (int row = 0; row < rows; row++)
    for (int i = 0; i < panels * PARTS; i++)
      s[row][i / PARTS][i % PARTS] = *(floats *)&sums[i / PARTS][first_row + row][i % PARTS * RF_WIDTH];
  for (int in = 0; in < count; in += 2) {
    for (int second = 0; second < 2; second++) {
      floats w[2][PARTS];
      for (int i = 0; i < panels * PARTS; i++) {
        words pairs = *(const words *)(packed[i / PARTS] + in * 16 + i % PARTS * 2 * RF_WIDTH);
        pairs = second ? (words)(pairs & 0xffff0000u) : (words)(pairs << 16);
        w[i / PARTS][i % PARTS] = (floats)pairs;
      }
      for (int row = 0; row < rows; row++)
        for (int i = 0; i < panels * PARTS; i++)
          s[row][i / PARTS][i % PARTS] += w[i / PARTS][i % PARTS] * x[first_row + row][in + second];
    }
  }
  for (int row = 0; row < rows; row++)
    for (int i = 0; i < panels * PARTS; i++)
      *(floats *)&sums[i / PARTS][first_row + row][i % PARTS * RF_WIDTH] = s[row][i / PARTS][i % PARTS];
}

/* Two panels: together where there are registers for the sums of so many rows, which keeps more of them busy at once. */
static inline __attribute__((always_inline)) void multiply_panels(const float (*x)[CHUNK], int rows, int count,
                                                                  const uint16_t *const packed[2],
                                                                  float (*sums)[32][16], int first_row) {
  if (rows * 2 * PARTS <= SUMS) {
    multiply_rows(x, rows, count, packed, 2, sums, first_row);
  } else {
    multiply_rows(x, rows, count, packed, 1, sums, first_row);
    multiply_rows(x, rows, count, packed + 1, 1, sums + 1, first_row);
  }
}

static void multiply_chunk(const float (*x)[CHUNK], int num_rows, int count, const uint16_t *const packed[2],
                           float (*sums)[32][16]) {
  for (int row = 0; row < num_rows; row += ROWS) {
    switch (rf_min(num_rows - row, ROWS)) {
#define CASE(n) \
  case n: multiply_panels(x, n, count, packed, sums, row); break;
      CASE(1)
      CASE(2)
#if ROWS > 2
      CASE(3)
      CASE(4)
      CASE(5)
#endif
#if ROWS > 5
      CASE(6)
#endif
#if ROWS > 6
      CASE(7)
      CASE(8)
#endif
#undef CASE
    }
  }
}

static void multiply(const rf_linear_block *block, float (*sums)[32][16]) {
  RF_ALIGNED float x[32][CHUNK];
  if (block->begin == 0)
    for (int panel = 0; panel < block->num_panels; panel++)
      memset(sums[panel], 0, (size_t)block->num_rows * sizeof sums[panel][0]);
  for (int in = block->begin; in < block->end; in += CHUNK) {
    int count = rf_min(CHUNK, block->end - in);
    for (int row = 0; row < block->num_rows; row++) widen(block->x + row * block->x_stride + in, count, x[row]);
    for (int panel = 0; panel < block->num_panels; panel += 2) {
      const uint16_t *const panels[2] = {block->panels[panel] + in * 16, block->panels[panel + 1] + in * 16};
      multiply_chunk((const float(*)[CHUNK])x, block->num_rows, count, panels, sums + panel);
    }
  }
}

static void begin(int num_rows, int num_panels) { (void)num_rows, (void)num_panels; }
static void end(void) {}

const rf_linear_kernel rf_linear_float = {begin, end, multiply};
