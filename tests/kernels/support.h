/* What the checks of the kernels share: random numbers, memory between pages that nobody may touch, faults.
 *
 * The checks are a program of its own, so that it can be built for any CPU and with sanitizers: see forms.py.
 */
#ifndef CHECK_SUPPORT_H
#define CHECK_SUPPORT_H

#include <stddef.h>
#include <stdint.h>

void seed_with(uint64_t seed);
int below(int limit);                /* 0 to limit - 1 */
int between(int first, int last);    /* both included */
double uniform(void);                /* -1 to 1 */
#define PICK(array) (array)[below((int)(sizeof(array) / sizeof *(array)))]

/* Memory that ends, or begins, where a page begins that must not be touched; filled with bytes 0xff, which are NaNs and
 * -1. What lies between it and the other end of its pages is checked in release_all. `alignment` is that of the first
 * byte. */
void *guarded(size_t bytes, size_t alignment);
/* As much address space as asked for, of which only what is touched takes memory. */
void *sparse(size_t bytes);
/* Frees all of the above. Ends the program where anything beside it was written to. */
void release_all(void);

float to_float(uint16_t bf16);
uint16_t to_bf16(double x); /* to nearest even */
double element_at(const void *array, int64_t index, int is_bf16);
void put_element(void *array, int64_t index, int is_bf16, double x);

/* The nth allocation of the kernels from now on fails, then all succeed again; 0 for none. */
void fail_allocation(int nth);
/* So many threads can be started from now on; -1 for any number. */
void limit_threads(int count);

/* Ends the program with a message unless it holds. */
#define CHECK(condition, ...) \
  do {                        \
    if (!(condition)) fail_at(__FILE__, __LINE__, __VA_ARGS__); \
  } while (0)
__attribute__((noreturn, format(printf, 3, 4))) void fail_at(const char *file, int line, const char *format, ...);

/* The largest error of a kind of case, as a share of what is allowed, and by itself. */
typedef struct {
  const char *kind;
  int num_cases;
  double largest;
} tally_t;
void note_error(tally_t *tally, double error, double allowed);
void print_tally(const tally_t *tally);

void check_attention(int num_cases, int num_threads);
void check_far_attention(void);
void check_linears(int num_cases, int num_threads);
void check_forward(int num_cases, int num_threads);
void check_draw(int num_cases);
void check_team(int num_cases, int num_threads);

#endif
