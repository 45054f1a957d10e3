/* A few threads that share the tasks of one step. */
#ifndef STRATAGATE_POOL_H
#define STRATAGATE_POOL_H

typedef struct Pool Pool;
/* thread: 0 for the caller, so that scratch can be one per thread. */
typedef void (*Task)(void *context, int task, int thread);

Pool *pool_new(int num_threads);
void pool_free(Pool *pool);
int pool_num_threads(const Pool *pool);
/* Between these the other threads wait for tasks awake; outside they sleep. */
void pool_wake(Pool *pool);
void pool_rest(Pool *pool);
/* Runs every task once, in any order, and returns when all are done. */
void pool_run(Pool *pool, Task task, void *context, int num_tasks);

#endif
