/* AMX, the matrix unit of Intel's server CPUs: eight tiles of up to 16 rows of 64 bytes.
 *
 * _tile_dpbf16ps(c, a, b): c[rows][16] += a[rows][32] b[32][16] in float32, where b lies as 16 rows of 16 pairs (two rows
 * of b side by side).
 */
#ifndef RF_AMX_H
#define RF_AMX_H

#include "common.h"

/* The system grants AMX to a process that asks. Sets rf_amx_usable. */
void rf_amx_ask(void);

#ifdef RF_HAS_AMX
/* Each thread, before it uses tiles: rows of each. */
static inline void rf_amx_configure(const int rows[8]) {
  RF_ALIGNED uint8_t config[64] = {1 /* the only palette */};
  for (int tile = 0; tile < 8; tile++) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = (uint8_t)rows[tile];
  }
  /* GCC thinks that the instruction reads 8 bytes only, and would leave out the others. */
  __asm__ volatile("" : : "r"(config) : "memory");
  _tile_loadconfig(config);
}

/* And after: the system would save the tiles at every switch of threads. */
static inline void rf_amx_end(void) { _tile_release(); }
#endif

#endif
