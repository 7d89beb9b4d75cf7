/* Memory in large pages, where the system has them: weights and KV are read from end to end or in scattered rows, and
 * with pages of 4 KiB a core then spends a tenth to a third of the time on finding where they lie. */
#ifndef RF_PAGES_H
#define RF_PAGES_H

#include "common.h"

/* Asks for large pages for what is not touched yet of the memory. A wish: nothing happens where they cannot be had. */
RF_EXPORT void rf_prefer_large_pages(void *memory, int64_t bytes);

#endif
