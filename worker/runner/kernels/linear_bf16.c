/* Products of linear layers by AMX and by AVX512-BF16. */
#include "linear_kernels.h"

#ifdef RF_HAS_AVX512_BF16

#include "amx.h"

#ifdef RF_HAS_AMX

#define Y_ROWS_A_STEP 2

static inline void look_ahead(rf_ahead *ahead) {
  for (int i = 0; i < ahead->num_panels; i++) {
    for (int at = 0; at < ahead->panel_bytes; at += 64) _mm_prefetch(ahead->panels[i] + at, _MM_HINT_T1);
    ahead->panels[i] += ahead->panel_bytes;
  }
  for (int i = 0; i < Y_ROWS_A_STEP && ahead->y_rows > 0; i++, ahead->y_rows--) {
    for (int at = 0; at < ahead->y_bytes; at += 64) __builtin_prefetch(ahead->y + at, 1);
    ahead->y += ahead->y_stride;
  }
}

/* Tiles: 0 to 3 sums, 4 and 5 x, 6 and 7 panels; with four panels 4 is x and 5 to 7 are panels. */
static void begin_amx(int num_rows, int panels) {
  int first = rf_min(num_rows, 16), second = panels == 4 ? 16 : rf_max(num_rows - 16, 1);
  int sums = panels == 4 ? first : second;
  const int rows[8] = {first, first, sums, sums, first, second, 16, 16};
  rf_amx_configure(rows);
}

static inline void load_sums(const rf_linear_block *block, float (*sums)[32][16]) {
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
static void multiply_two_panels(const rf_linear_block *block, float (*sums)[32][16]) {
  const uint16_t *x = block->x, *a = block->panels[0], *b = block->panels[1];
  int64_t stride = block->x_stride * 2;
  int two = block->num_rows > 16;
  rf_ahead ahead = block->ahead;
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
static void multiply_four_panels(const rf_linear_block *block, float (*sums)[32][16]) {
  const uint16_t *x = block->x;
  const uint16_t *a = block->panels[0], *b = block->panels[1], *c = block->panels[2], *d = block->panels[3];
  int64_t stride = block->x_stride * 2;
  rf_ahead ahead = block->ahead;
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

static void multiply_amx(const rf_linear_block *block, float (*sums)[32][16]) {
  if (block->num_panels == 4)
    multiply_four_panels(block, sums);
  else
    multiply_two_panels(block, sums);
}

const rf_linear_kernel rf_linear_amx = {begin_amx, rf_amx_end, multiply_amx};

#endif

/* AVX512-BF16: `rows` rows by two panels; a constant where this is inlined. */
static inline __attribute__((always_inline)) void multiply_rows(const rf_linear_block *block, int first, int rows,
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

static void multiply_avx512(const rf_linear_block *block, float (*sums)[32][16]) {
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

static void begin_avx512(int num_rows, int num_panels) { (void)num_rows, (void)num_panels; }
static void end_avx512(void) {}

const rf_linear_kernel rf_linear_avx512_bf16 = {begin_avx512, end_avx512, multiply_avx512};

#endif
