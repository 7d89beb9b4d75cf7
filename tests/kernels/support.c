#define _GNU_SOURCE
#include "support.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CANARY 0xa5
#define MAX_REGIONS 4096

static uint64_t state = 1;

void seed_with(uint64_t seed) { state = seed; }

/* splitmix64 */
static uint64_t next_random(void) {
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

int below(int limit) { return (int)(next_random() % (uint64_t)limit); }
int between(int first, int last) { return first + below(last - first + 1); }
double uniform(void) { return (double)(int64_t)next_random() / 9223372036854775808.0; }

void fail_at(const char *file, int line, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fflush(stdout);
  fprintf(stderr, "%s:%d: ", file, line);
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  va_end(arguments);
  exit(1);
}

typedef struct {
  unsigned char *pages; /* between the two guards */
  size_t num_bytes;
  size_t guard; /* of each side; 0 for none */
  size_t begin; /* what the caller was given */
  size_t end;
} region_t;

static region_t regions[MAX_REGIONS];
static int num_regions;

static region_t *map(size_t num_bytes, size_t guard) {
  CHECK(num_regions < MAX_REGIONS, "too many regions");
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *base = mmap(NULL, num_bytes + 2 * guard, PROT_NONE, flags, -1, 0);
  CHECK(base != MAP_FAILED, "no address space");
  CHECK(mprotect(base + guard, num_bytes, PROT_READ | PROT_WRITE) == 0, "no memory");
  regions[num_regions] = (region_t){.pages = (unsigned char *)base + guard, .num_bytes = num_bytes, .guard = guard};
  return &regions[num_regions++];
}

void *guarded(size_t bytes, size_t alignment) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), used = bytes ? (bytes + page - 1) / page * page : page;
  region_t *region = map(used, page);
  region->begin = below(2) ? 0 : (used - bytes) / alignment * alignment;
  region->end = region->begin + bytes;
  memset(region->pages, CANARY, used);
  memset(region->pages + region->begin, 0xff, bytes);
  return region->pages + region->begin;
}

void *sparse(size_t bytes) { return map(bytes, 0)->pages; }

void release_all(void) {
  for (int i = 0; i < num_regions; i++) {
    region_t *region = &regions[i];
    for (size_t at = 0; region->guard != 0 && at < region->num_bytes; at++) {
      if (at == region->begin) at = region->end;
      CHECK(at >= region->num_bytes || region->pages[at] == CANARY, "something wrote beside its memory");
    }
    munmap(region->pages - region->guard, region->num_bytes + 2 * region->guard);
  }
  num_regions = 0;
}

float to_float(uint16_t bf16) {
  uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

uint16_t to_bf16(double x) {
  float narrow = (float)x;
  uint32_t bits;
  memcpy(&bits, &narrow, sizeof bits);
  if (isnan(x)) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double element_at(const void *array, int64_t index, int is_bf16) {
  return is_bf16 ? to_float(((const uint16_t *)array)[index]) : ((const float *)array)[index];
}

void put_element(void *array, int64_t index, int is_bf16, double x) {
  if (is_bf16)
    ((uint16_t *)array)[index] = to_bf16(x);
  else
    ((float *)array)[index] = (float)x;
}

void note_error(tally_t *tally, double error, double allowed) {
  CHECK(error <= allowed, "%s: an error of %g, where %g is allowed", tally->kind, error, allowed);
  tally->largest = fmax(tally->largest, error);
}

void print_tally(const tally_t *tally) {
  if (tally->num_cases)
    printf("%s: %d cases, largest error %.2g\n", tally->kind, tally->num_cases, tally->largest);
  fflush(stdout);
}

/* Faults: the linker puts these in the place of the functions that the kernels call. */
static int allocations_left, threads_left = -1;

void fail_allocation(int nth) { allocations_left = nth; }
void limit_threads(int count) { threads_left = count; }

static int fails(void) { return allocations_left > 0 && --allocations_left == 0; }

void *__real_aligned_alloc(size_t alignment, size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_malloc(size_t size);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument);

void *__wrap_aligned_alloc(size_t alignment, size_t size) {
  return fails() ? NULL : __real_aligned_alloc(alignment, size);
}
void *__wrap_calloc(size_t count, size_t size) { return fails() ? NULL : __real_calloc(count, size); }
void *__wrap_malloc(size_t size) { return fails() ? NULL : __real_malloc(size); }
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument) {
  if (threads_left == 0) return 11; /* EAGAIN */
  if (threads_left > 0) threads_left--;
  return __real_pthread_create(thread, attributes, run, argument);
}
