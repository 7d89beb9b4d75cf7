#include "pages.h"

#ifdef __linux__
#include <sys/mman.h>

#define LARGE ((uintptr_t)2 << 20)

void rf_prefer_large_pages(void *memory, int64_t bytes) {
  uintptr_t begin = ((uintptr_t)memory + LARGE - 1) / LARGE * LARGE;
  uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) / LARGE * LARGE;
  if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
}
#else
void rf_prefer_large_pages(void *memory, int64_t bytes) { (void)memory, (void)bytes; }
#endif
