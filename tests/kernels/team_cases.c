/* Teams: barriers and claims under many tasks, several callers, fewer threads than asked for, no memory, and a fork. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"
#include "team.h"

#define PHASES 20
#define CLAIMS 64
#define MAX_MEMBERS 8

/* Not atomic: only the barriers keep the members apart. */
typedef struct {
  int claimed[PHASES][CLAIMS];
  int arrived[MAX_MEMBERS];
  int num_items;
} counts_t;

static void count_task(rf_team *team, int member, void *argument) {
  counts_t *counts = argument;
  memset(rf_team_scratch(team, member), member, 64);
  for (int phase = 0; phase < PHASES; phase++) {
    for (int i; (i = rf_team_claim(team, phase)) < counts->num_items;) counts->claimed[phase][i]++;
    counts->arrived[member]++;
    rf_team_barrier(team);
    for (int other = 0; other < rf_team_size(team); other++)
      CHECK(counts->arrived[other] == phase + 1, "a member passed a barrier before another arrived");
    rf_team_barrier(team);
  }
}

static void run_task(rf_team *team) {
  counts_t counts = {.num_items = between(0, CLAIMS)};
  rf_team_run(team, count_task, &counts, PHASES);
  for (int phase = 0; phase < PHASES; phase++)
    for (int i = 0; i < CLAIMS; i++)
      CHECK(counts.claimed[phase][i] == (i < counts.num_items), "an item was claimed %d times", counts.claimed[phase][i]);
}

static void check_threads_that_cannot_be_had(int num_threads) {
  for (int available = 0; available < num_threads; available++) {
    limit_threads(available);
    rf_team *team = rf_team_create(num_threads);
    limit_threads(-1);
    CHECK(rf_team_size(team) == rf_min(available + 1, num_threads), "a team of %d", rf_team_size(team));
    run_task(team);
    rf_team_destroy(team);
  }
}

static void check_memory_that_cannot_be_had(void) {
  CHECK(rf_team_create(0) == NULL, "a team of nobody");
  for (int nth = 1; nth <= 3; nth++) {
    fail_allocation(nth);
    CHECK(rf_team_create(2) == NULL, "a team without memory");
    fail_allocation(0);
  }
}

static void *call_often(void *team) {
  for (int i = 0; i < 20; i++) {
    counts_t counts = {.num_items = CLAIMS};
    rf_team_run(team, count_task, &counts, PHASES);
    CHECK(counts.arrived[0] == PHASES, "a task did not run");
  }
  return NULL;
}

static void check_callers_take_turns(int num_threads) {
  rf_team *team = rf_team_create(num_threads);
  pthread_t other;
  CHECK(pthread_create(&other, NULL, call_often, team) == 0, "no thread");
  call_often(team);
  pthread_join(other, NULL);
  rf_team_destroy(team);
}

#if !defined(__SANITIZE_THREAD__) /* which cannot follow a child of several threads */
/* The child has none of the team's threads: it computes alone, and can free the team. */
static void check_fork(int num_threads) {
  rf_team *team = rf_team_create(num_threads);
  run_task(team);
  fflush(NULL);
  pid_t child = fork();
  if (child == 0) {
    run_task(team);
    CHECK(rf_team_size(team) == 1, "a team of %d in a child", rf_team_size(team));
    rf_team_destroy(team);
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0, "a child ended with %d", status);
  run_task(team);
  rf_team_destroy(team);
}
#endif

void check_team(int num_cases, int num_threads) {
  check_memory_that_cannot_be_had();
  check_threads_that_cannot_be_had(num_threads);
  check_callers_take_turns(num_threads);
#if !defined(__SANITIZE_THREAD__)
  check_fork(num_threads);
#endif
  for (int i = 0; i < num_cases; i++) {
    rf_team *team = rf_team_create(between(1, MAX_MEMBERS));
    for (int run = between(0, 20); run > 0; run--) run_task(team);
    rf_team_destroy(team);
  }
  printf("teams: %d\n", num_cases);
  fflush(stdout);
}
