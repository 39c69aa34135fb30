/* Ejection search: all blocks below a height, found by putting one block in and throwing others out.
 *
 * A block that has no place goes where what it overlaps weighs least; that is thrown out and waits
 * in its turn (guided ejection search, Nagata & Braysy 2009). Each time a block has to throw others
 * out, throwing it out becomes dearer. What lives with a block is found in a tree of the latest ends
 * over blocks sorted by start; what overlaps it at each address, by a sweep over their edges.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core.h"

enum { MAX_PENALTY = 1000000 };

typedef struct {
  int32_t at;
  int64_t weight;
} edge;

typedef struct {
  int32_t n, leaves, height;
  const int32_t *start, *end, *size, *align;
  const int64_t *base;
  int64_t *penalty;
  int32_t *offset;  /* -1: has no place */
  int32_t *latest;  /* tree of maxima over the ends of placed blocks, root at 1 */
  int32_t *earlier; /* blocks that start before this one: all below this index */
  int32_t *near;
  edge *edges, *spare;
  int32_t *waiting, waits;
  uint64_t random;
} ejection;

static uint64_t next_random(ejection *s) { /* xorshift64 */
  s->random ^= s->random << 13;
  s->random ^= s->random >> 7;
  s->random ^= s->random << 17;
  return s->random;
}

static void set_end(ejection *s, int32_t i, int32_t end) {
  int32_t k = i + s->leaves;
  s->latest[k] = end;
  for (k /= 2; k; k /= 2) {
    int32_t left = s->latest[2 * k], right = s->latest[2 * k + 1];
    int32_t most = left > right ? left : right;
    if (s->latest[k] == most) break;
    s->latest[k] = most;
  }
}

/* Append the placed blocks among the first `count` that end after `t` to near. */
static int32_t alive_at(ejection *s, int32_t node, int32_t low, int32_t width, int32_t count,
                        int32_t t, int32_t m) {
  if (low >= count || s->latest[node] <= t) return m;
  if (width == 1) {
    s->near[m] = low;
    return m + 1;
  }
  m = alive_at(s, 2 * node, low, width / 2, count, t, m);
  return alive_at(s, 2 * node + 1, low + width / 2, width / 2, count, t, m);
}

static int32_t neighbours(ejection *s, int32_t i) {
  int32_t m = alive_at(s, 1, 0, s->leaves, s->earlier[i], s->start[i], 0);
  for (int32_t k = s->earlier[i]; k < s->n && s->start[k] < s->end[i]; k++)
    if (s->offset[k] >= 0) s->near[m++] = k;
  return m;
}

static void sort_edges(ejection *s, int32_t m) {
  edge *a = s->edges, *b = s->spare;
  if (m < 32) {
    for (int32_t x = 1; x < m; x++) {
      edge v = a[x];
      int32_t y = x;
      for (; y > 0 && a[y - 1].at > v.at; y--) a[y] = a[y - 1];
      a[y] = v;
    }
    return;
  }
  for (int shift = 0; shift < 30; shift += 10) { /* addresses are below 2^30 */
    int32_t count[1024] = {0}, sum = 0;
    for (int32_t x = 0; x < m; x++) count[(a[x].at >> shift) & 1023]++;
    if (count[(a[0].at >> shift) & 1023] == m) continue;
    for (int k = 0; k < 1024; k++) {
      int32_t here = count[k];
      count[k] = sum;
      sum += here;
    }
    for (int32_t x = 0; x < m; x++) b[count[(a[x].at >> shift) & 1023]++] = a[x];
    edge *t = a;
    a = b;
    b = t;
  }
  if (a != s->edges) memcpy(s->edges, a, (size_t)m * sizeof(edge));
}

/* The address where what block i overlaps weighs least: of free ones the tightest, of others any.
 * -1 when the block is higher than the arena. */
static int32_t cheapest(ejection *s, int32_t i, int32_t m, int64_t *cost) {
  int32_t size = s->size[i], limit = s->height - size, count = 0;
  int64_t weight = 0;
  for (int32_t x = 0; x < m; x++) {
    int32_t j = s->near[x], from = s->offset[j] - size + 1, until = s->offset[j] + s->size[j];
    int64_t w = s->base[j] * s->penalty[j];
    if (from <= 0) weight += w;
    else if (from <= limit) s->edges[count++] = (edge){from, w};
    if (until <= limit) s->edges[count++] = (edge){until, -w};
  }
  sort_edges(s, count);
  int32_t best = -1, best_room = 0, at = 0, x = 0;
  *cost = INT64_MAX;
  for (;;) { /* the weight is the same in [at, next) */
    int32_t next = x < count ? s->edges[x].at : limit + 1;
    if (next > at) {
      int32_t over = at % s->align[i], low = over ? at + s->align[i] - over : at;
      if (low < next && weight <= *cost) {
        int32_t room = next - at;
        if (weight < *cost || (weight ? (int)(next_random(s) & 1) : room < best_room)) {
          *cost = weight;
          best = low;
          best_room = room;
          if (weight && (next_random(s) & 1)) best = (next - 1) - (next - 1) % s->align[i];
        }
      }
      at = next;
    }
    if (x >= count) return best;
    for (; x < count && s->edges[x].at == at; x++) weight += s->edges[x].weight;
  }
}

static int run(ejection *s, int64_t max_steps, double seconds, int64_t *steps) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  double deadline = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec + seconds;
  for (int32_t turn = 1; s->waits; turn++) {
    if (*steps > max_steps) return TVMX_OUT_OF_STEPS;
    if ((turn & 255) == 0) {
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
      if ((double)t.tv_sec + 1e-9 * (double)t.tv_nsec > deadline) return TVMX_OUT_OF_STEPS;
    }
    int32_t pick = (int32_t)(next_random(s) % (uint64_t)s->waits), i = s->waiting[pick];
    s->waiting[pick] = s->waiting[--s->waits];
    int32_t m = neighbours(s, i);
    int64_t cost;
    int32_t at = cheapest(s, i, m, &cost);
    *steps += m + 16;
    if (at < 0) return TVMX_INFEASIBLE;
    if (cost) {
      if (s->penalty[i] < MAX_PENALTY) s->penalty[i]++;
      for (int32_t x = 0; x < m; x++) {
        int32_t j = s->near[x];
        if (s->offset[j] >= at + s->size[i] || at >= s->offset[j] + s->size[j]) continue;
        s->offset[j] = -1;
        set_end(s, j, 0);
        s->waiting[s->waits++] = j;
      }
    }
    s->offset[i] = at;
    set_end(s, i, s->end[i]);
  }
  return TVMX_SOLVED;
}

int tvmx_eject(int32_t n, const int32_t *start, const int32_t *end, const int32_t *size,
               const int32_t *align, int32_t height, const int64_t *base, int64_t *penalty,
               uint64_t seed, double seconds, int64_t *steps, int32_t *offsets) {
  int64_t max_steps = *steps;
  ejection s = {.n = n, .leaves = 1, .height = height, .start = start, .end = end, .size = size,
                .align = align, .base = base, .penalty = penalty, .offset = offsets,
                .random = seed * 2654435761u + 88172645463325252u};
  *steps = 0;
  if (n == 0) return TVMX_SOLVED;
  if (!s.random) s.random = 1;
  while (s.leaves < n) s.leaves *= 2;
  int status = TVMX_OUT_OF_MEMORY;
  s.latest = calloc(2 * (size_t)s.leaves, sizeof(int32_t));
  s.earlier = malloc(3 * (size_t)n * sizeof(int32_t));
  s.edges = malloc(4 * (size_t)n * sizeof(edge));
  if (s.latest && s.earlier && s.edges) {
    s.near = s.earlier + n;
    s.waiting = s.near + n;
    s.spare = s.edges + 2 * (size_t)n;
    for (int32_t i = 0; i < n; i++) {
      s.earlier[i] = i && start[i - 1] == start[i] ? s.earlier[i - 1] : i;
      if (offsets[i] >= 0 && offsets[i] <= height - size[i]) {
        s.latest[i + s.leaves] = end[i];
      } else {
        offsets[i] = -1;
        s.waiting[s.waits++] = i;
      }
    }
    for (int32_t k = s.leaves - 1; k; k--) {
      int32_t left = s.latest[2 * k], right = s.latest[2 * k + 1];
      s.latest[k] = left > right ? left : right;
    }
    status = run(&s, max_steps, seconds, steps);
  }
  free(s.latest);
  free(s.earlier);
  free(s.edges);
  return status;
}
