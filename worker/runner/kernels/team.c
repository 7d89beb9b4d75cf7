#include "team.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "attention.h"
#include "linear.h"

#if defined(__x86_64__) || defined(__i386__)
#define RF_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RF_PAUSE() __asm__ volatile("isb")
#else
#define RF_PAUSE() ((void)0)
#endif
#define PAUSES_A_LOOK 32 /* at the clock: a pause takes 14 to 70 ns, depending on the CPU */

/* How long a wait spins. At most as long as it takes to be woken up in a virtual machine: so it costs at most twice
 * what it would if one knew how long it will be. But where other processes want the cores, those waited for have none,
 * and who spins is in the way of whoever has to go on first, and pays with its own share. There waits that end in vain
 * outnumber the others: so these raise the time by a little, and those lower it by much. */
#define LEAST_SPIN_NS 4000
#define MOST_SPIN_NS 50000
#define SPIN_NS_MORE 1000

typedef struct {
  rf_team *team;
  int index;
  pthread_t thread;
} member_t;

struct rf_team {
  int size;
  pid_t process; /* whose threads the members are */
  pthread_mutex_t turn; /* of whoever calls rf_team_run */
  member_t *members; /* [size]; the first is whoever calls rf_team_run */
  char *scratch;
  size_t scratch_bytes;
  rf_task task;
  void *argument;
  int stopping;
  /* Barrier: the last of a round resets `arrived` and raises `round`. */
  RF_ALIGNED atomic_int arrived;
  RF_ALIGNED atomic_uint round;
  atomic_int spin_ns;
  /* Those who have spun long enough sleep here until `round` moves. */
  RF_ALIGNED pthread_mutex_t mutex;
  pthread_cond_t moved;
  atomic_int sleepers;
  RF_ALIGNED atomic_int claims[RF_MAX_PHASES];
};

int rf_team_size(const rf_team *team) { return team->size; }

void *rf_team_scratch(rf_team *team, int member) { return team->scratch + (size_t)member * team->scratch_bytes; }

int rf_team_claim(rf_team *team, int phase) {
  return atomic_fetch_add_explicit(&team->claims[phase], 1, memory_order_relaxed);
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether `round` has moved before this thread has spun for long enough. A wait for the next task, which depends on the
 * caller, says nothing of waits within one. */
static int spin(rf_team *team, unsigned seen, int within_task) {
  int spin_ns = atomic_load_explicit(&team->spin_ns, memory_order_relaxed);
  int64_t give_up_ns = 0;
  for (int i = 1; atomic_load_explicit(&team->round, memory_order_acquire) == seen; i++) {
    RF_PAUSE();
    if (i % PAUSES_A_LOOK != 0) continue;
    int64_t now = now_ns();
    if (give_up_ns == 0) give_up_ns = now + spin_ns;
    if (now < give_up_ns) continue;
    if (!within_task) return 0;
    atomic_store_explicit(&team->spin_ns, rf_max(spin_ns / 4, LEAST_SPIN_NS), memory_order_relaxed);
    return 0;
  }
  if (within_task && spin_ns < MOST_SPIN_NS)
    atomic_store_explicit(&team->spin_ns, spin_ns + SPIN_NS_MORE, memory_order_relaxed);
  return 1;
}

static void wait_for_move(rf_team *team, unsigned seen, int within_task) {
  if (spin(team, seen, within_task)) return;
  pthread_mutex_lock(&team->mutex);
  atomic_fetch_add(&team->sleepers, 1);
  while (atomic_load(&team->round) == seen) pthread_cond_wait(&team->moved, &team->mutex);
  atomic_fetch_sub(&team->sleepers, 1);
  pthread_mutex_unlock(&team->mutex);
}

static void meet(rf_team *team, int within_task) {
  if (team->size == 1) return;
  unsigned seen = atomic_load(&team->round);
  if (atomic_fetch_add(&team->arrived, 1) + 1 < team->size) {
    wait_for_move(team, seen, within_task);
    return;
  }
  atomic_store(&team->arrived, 0);
  atomic_fetch_add(&team->round, 1);
  /* Sequentially consistent, as in wait_for_move: either the sleeper sees the new round, or we see the sleeper. */
  if (atomic_load(&team->sleepers) > 0) {
    pthread_mutex_lock(&team->mutex); /* whoever has seen the old round waits by now */
    pthread_mutex_unlock(&team->mutex);
    pthread_cond_broadcast(&team->moved); /* without the lock, which those woken up would wait for */
  }
}

void rf_team_barrier(rf_team *team) { meet(team, 1); }

static void *serve(void *argument) {
  member_t *self = argument;
  rf_team *team = self->team;
  pthread_mutex_lock(&team->mutex); /* until the team's size is final */
  pthread_mutex_unlock(&team->mutex);
  for (;;) {
    meet(team, 0); /* a task is there */
    if (team->stopping) return NULL;
    team->task(team, self->index, team->argument);
    rf_team_barrier(team);
  }
}

static void make_locks(rf_team *team) {
  pthread_mutex_init(&team->turn, NULL);
  pthread_mutex_init(&team->mutex, NULL);
  pthread_cond_init(&team->moved, NULL);
}

/* A child of a fork has a copy of the team and none of its threads, for which it would wait for ever. It goes on alone:
 * what is computed does not depend on the size of the team. */
static void leave_parents_threads(rf_team *team) {
  if (team->process == getpid()) return;
  team->process = getpid();
  team->size = 1;
  make_locks(team);
}

void rf_team_run(rf_team *team, rf_task task, void *argument, int num_phases) {
  leave_parents_threads(team);
  pthread_mutex_lock(&team->turn);
  team->task = task;
  team->argument = argument;
  memset(team->claims, 0, (size_t)num_phases * sizeof *team->claims);
  rf_team_barrier(team);
  task(team, 0, argument);
  rf_team_barrier(team);
  pthread_mutex_unlock(&team->turn);
}

static void release(rf_team *team) {
  free(team->members);
  free(team->scratch);
  free(team);
}

/* Starts members 1 and up, or as many of them as the system has threads for. */
static void start_threads(rf_team *team, int num_members) {
  pthread_mutex_lock(&team->mutex);
  for (team->size = 1; team->size < num_members; team->size++) {
    member_t *member = &team->members[team->size];
    *member = (member_t){.team = team, .index = team->size};
    if (pthread_create(&member->thread, NULL, serve, member) != 0) break;
  }
  pthread_mutex_unlock(&team->mutex);
}

rf_team *rf_team_create(int num_members) {
  if (num_members < 1) return NULL;
  rf_team *team = aligned_alloc(64, sizeof *team);
  if (team == NULL) return NULL;
  memset(team, 0, sizeof *team);
  team->process = getpid();
  team->spin_ns = MOST_SPIN_NS;
  team->scratch_bytes = (size_t)rf_round_up((int)rf_max((int)rf_scratch_bytes(), (int)rf_linear_scratch_bytes()), 4096);
  team->scratch = aligned_alloc(4096, team->scratch_bytes * (size_t)num_members);
  team->members = calloc((size_t)num_members, sizeof *team->members);
  if (team->scratch == NULL || team->members == NULL) {
    release(team);
    return NULL;
  }
  make_locks(team);
  start_threads(team, num_members);
  return team;
}

void rf_team_destroy(rf_team *team) {
  if (team == NULL) return;
  leave_parents_threads(team);
  team->stopping = 1;
  rf_team_barrier(team);
  for (int i = 1; i < team->size; i++) pthread_join(team->members[i].thread, NULL);
  pthread_cond_destroy(&team->moved);
  pthread_mutex_destroy(&team->mutex);
  pthread_mutex_destroy(&team->turn);
  release(team);
}
