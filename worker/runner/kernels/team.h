/* A team of threads that lives as long as its runner: one parallel section after another, with cheap barriers inside.
 *
 * OpenMP is not used: its barriers either spin without bound, which stalls cores that are shared with other processes,
 * or go to the kernel each time, which costs more than a layer's smaller phases. Here a waiting thread spins for as
 * long as it takes to wake one up, and then sleeps.
 */
#ifndef RF_TEAM_H
#define RF_TEAM_H

#include <stdatomic.h>

#include "common.h"

typedef struct rf_team rf_team;

/* `task` runs on every member at once, on member 0 in the calling thread. */
typedef void (*rf_task)(rf_team *team, int member, void *argument);

/* NULL when the system has no memory. With fewer threads than asked for when it has no more threads. */
RF_EXPORT rf_team *rf_team_create(int num_members);
/* Nobody may be in rf_team_run. */
RF_EXPORT void rf_team_destroy(rf_team *team);
RF_EXPORT int rf_team_size(const rf_team *team);

/* For a task that claims in so many phases, at most RF_MAX_PHASES. Callers take turns. In a child of a fork, which has
 * none of the threads, the caller is the only member. */
#define RF_MAX_PHASES 4096
void rf_team_run(rf_team *team, rf_task task, void *argument, int num_phases);

/* For tasks: all members arrive before any goes on. */
void rf_team_barrier(rf_team *team);

/* For tasks: memory of one member, of the size that rf_scratch_bytes gives, aligned to 64 bytes. */
void *rf_team_scratch(rf_team *team, int member);

/* For tasks: hands out 0, 1, 2, ... to whoever asks; counters are zero when a task begins and count one phase each. */
int rf_team_claim(rf_team *team, int phase);

#endif
