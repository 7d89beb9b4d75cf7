/* Checks the kernels: main SEED CASES THREADS. Prints what the kernels use, and for each kind of case the largest error;
 * ends with 1 and a message at the first result that is wrong. */
#include <stdio.h>
#include <stdlib.h>

#include "forward.h"
#include "support.h"

int main(int argc, char **argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: %s SEED CASES THREADS\n", argv[0]);
    return 2;
  }
  int num_cases = atoi(argv[2]), num_threads = atoi(argv[3]);
  seed_with(strtoull(argv[1], NULL, 10));
  rf_init();
  printf("uses %s\n", rf_features());
  check_team(num_cases / 10 + 1, num_threads);
  check_attention(num_cases, num_threads);
  check_far_attention();
  check_linears(num_cases, num_threads);
  check_draw(num_cases);
  check_forward(num_cases / 10 + 1, num_threads);
  return 0;
}
