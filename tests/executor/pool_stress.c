/* Launches of every size on pools of 2, 3 and 5 threads at once; every task must run exactly once, and failures
 * must be reported exactly when a task failed. Prints the number of deviations. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tvmx_abi.h"

typedef struct {
  void* sync;
  int num_task;
} group_env;
extern int (*__TVMBackendParallelLaunch)(int (*)(int, group_env*, void*), void*, int);
extern void* (*__TVMBackendAllocWorkspace)(int, int, unsigned long, int, int);
extern int (*__TVMBackendFreeWorkspace)(int, int, void*);

typedef struct {
  int* hits;
  int round, fail;
} job;

static int task(int index, group_env* env, void* data) {
  job* j = data;
  __atomic_fetch_add(&j->hits[index], 1, __ATOMIC_RELAXED);
  unsigned long bytes = 64 + (unsigned long)((index + 1) * (j->round % 97)) * 64;
  char* a = __TVMBackendAllocWorkspace(1, 0, bytes, 2, 32);
  char* b = __TVMBackendAllocWorkspace(1, 0, 100, 2, 32);
  memset(a, index, bytes);
  memset(b, index + 1, 100);
  int overlap = a[0] != (char)index || a[bytes - 1] != (char)index || ((unsigned long)a | (unsigned long)b) % 64;
  __TVMBackendFreeWorkspace(1, 0, b);
  __TVMBackendFreeWorkspace(1, 0, a);
  if (overlap) __atomic_fetch_add(&j->hits[15], 1000, __ATOMIC_RELAXED);
  return j->fail && index == env->num_task - 1;
}

static void* drive(void* argument) {
  long threads = (long)argument, bad = 0;
  tvmx_pool* pool = tvmx_pool_new((int)threads, 0);
  tvmx_pool_enter(pool);
  for (int round = 0; round < 20000; round++) {
    int hits[16] = {0}, wanted = round % 5 == 0 ? round % 13 + 1 : 0;
    job j = {hits, round, round % 11 == 0};
    int status = __TVMBackendParallelLaunch(task, &j, wanted);
    int tasks = wanted ? wanted : (int)threads;
    for (int i = 0; i < 16; i++) bad += hits[i] != (i < tasks);
    bad += (status != 0) != j.fail;
    if (round % 4000 == 0) nanosleep(&(struct timespec){0, 300000}, 0); /* workers fall asleep */
  }
  tvmx_pool_free(pool);
  return (void*)bad;
}

int main(void) {
  pthread_t drivers[3];
  long sizes[3] = {2, 3, 5}, bad = 0;
  for (int i = 0; i < 3; i++) pthread_create(&drivers[i], 0, drive, (void*)sizes[i]);
  for (int i = 0; i < 3; i++) {
    void* result;
    pthread_join(drivers[i], &result);
    bad += (long)result;
  }
  printf("%ld\n", bad);
  return bad != 0;
}
