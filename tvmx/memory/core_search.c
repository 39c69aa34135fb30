/* Depth-first search on canonical plans.
 *
 * A plan is canonical when every block rests on the floor or on another block; blocks are placed in
 * the order of their offsets (Moffitt, "MiniMalloc", ASPLOS 2023). A node is a set of unplaced
 * blocks connected in time, their supports (the top of what is placed below each), and the last
 * placed (offset, rank), below which nothing may be placed any more. What cuts the tree:
 *  - a passed-over block (support below the last offset) must be lifted by an unplaced neighbour;
 *  - no block is placed above one that would still fit entirely below it (dominance);
 *  - in each section the unplaced blocks must fit above their earliest offsets (heads), as jobs on
 *    one machine: max over h of h + sum of sizes with head >= h;
 *  - when only one block of a section can come first, it does, and lifts the heads of the others;
 *  - blocks that no longer meet in time are independent problems, the smallest first.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core.h"

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
/* The section sums are the hot loop; pick the vector width of the machine when loaded. */
#define VECTOR_CLONES __attribute__((target_clones("arch=skylake-avx512", "avx2", "default")))
#else
#define VECTOR_CLONES
#endif

enum { MAX_LIFT_ROUNDS = 5 };

typedef struct {
  int32_t n, height;
  const int32_t *start, *end, *size, *align, *rank;
  int32_t *offset, *support, *head;
  char *placed, *inside;
  int32_t *near_at, *near; /* neighbours in time, in compressed rows */
  int32_t *load, *first, *second, *who, *lift; /* per section */
  int32_t *order, *skipped;
  int32_t *trail_block, *trail_support;
  int64_t trail;
  int32_t *stack; /* index lists of the open nodes */
  int64_t stack_top;
  double *weights;
  int64_t steps, max_steps;
  double deadline;
  int stopped;
} search;

static double processor_time(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int32_t align_up(int32_t x, int32_t a) {
  if (a == 1) return x;
  int32_t r = x % a;
  return r ? x + a - r : x;
}

static int passed_over(const search *s, int32_t i, int32_t last, int32_t last_rank) {
  return s->support[i] < last || (s->support[i] == last && s->rank[i] < last_rank);
}

/* Add a block to the sections [0, length); returns the largest sum. first/second/who keep the two
 * lowest heads because blocks come with falling heads. */
VECTOR_CLONES
static int32_t load_sections(int32_t length, int32_t size, int32_t head, int32_t block,
                             int32_t *restrict load, int32_t *restrict first,
                             int32_t *restrict second, int32_t *restrict who) {
  int32_t most = 0;
  for (int32_t q = 0; q < length; q++) {
    int32_t v = load[q] + size;
    load[q] = v;
    most = v > most ? v : most;
    second[q] = first[q];
    first[q] = head;
    who[q] = block;
  }
  return most;
}

static void sort_by_falling_head(const search *s, int32_t *list, int32_t m) {
  static const int32_t gaps[] = {1750, 701, 301, 132, 57, 23, 10, 4, 1};
  for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++) {
    int32_t h = gaps[g];
    for (int32_t x = h; x < m; x++) {
      int32_t v = list[x], head = s->head[v], y = x;
      for (; y >= h && s->head[list[y - h]] < head; y -= h) list[y] = list[y - h];
      list[y] = v;
    }
  }
}

/* Blame everything that still has to fit into the overfull section from `head` up. */
static void blame(search *s, const int32_t *list, int32_t m, int32_t block) {
  int32_t worst = s->start[block];
  for (int32_t q = s->start[block]; q < s->end[block]; q++)
    if (s->load[q] > s->load[worst]) worst = q;
  for (int32_t x = 0; x < m; x++)
    if (s->start[list[x]] <= worst && worst < s->end[list[x]]) s->weights[list[x]] += 1;
}

/* Heads of passed-over blocks: on top of the lowest unplaced neighbour that can get below them. */
static int lift_skipped(search *s, const int32_t *list, int32_t m, int32_t skipped, int32_t last) {
  int alive = 1;
  for (int32_t x = 0; x < m; x++) s->inside[list[x]] = 1;
  for (int32_t x = 0; x < skipped && alive; x++) {
    int32_t j = s->skipped[x], lowest = INT32_MAX, limit = s->support[j] + s->size[j];
    for (int32_t t = s->near_at[j]; t < s->near_at[j + 1]; t++) {
      int32_t k = s->near[t];
      if (!s->inside[k]) continue;
      /* a passed-over neighbour itself ends up above the last offset */
      int32_t head = s->head[k] < 0 ? last + 1 : s->head[k];
      if (head < limit && head + s->size[k] < lowest) lowest = head + s->size[k];
    }
    s->steps += (s->near_at[j + 1] - s->near_at[j]) / 8;
    if (lowest == INT32_MAX || lowest > s->height - s->size[j]) {
      s->weights[j] += 1;
      alive = 0;
    } else {
      s->order[x] = align_up(lowest, s->align[j]);
    }
  }
  for (int32_t x = 0; x < m; x++) s->inside[list[x]] = 0;
  for (int32_t x = 0; x < skipped && alive; x++) s->head[s->skipped[x]] = s->order[x];
  return alive;
}

/* Heads of the blocks in `list`, sorted by start; 0 when they cannot all fit. *ceiling becomes the
 * offset that the next block must stay below. */
static int propagate(search *s, const int32_t *list, int32_t m, int32_t last, int32_t last_rank,
                     int32_t *ceiling) {
  int32_t skipped = 0, low = s->start[list[0]], high = 0;
  *ceiling = INT32_MAX;
  s->steps += m;
  for (int32_t x = 0; x < m; x++) {
    int32_t i = list[x], top = s->support[i] + s->size[i];
    if (s->support[i] > s->height - s->size[i]) {
      s->weights[i] += 1;
      return 0;
    }
    if (top < *ceiling) *ceiling = top;
    if (s->end[i] > high) high = s->end[i];
    if (passed_over(s, i, last, last_rank)) {
      s->skipped[skipped++] = i;
      s->head[i] = -1;
    } else {
      s->head[i] = s->support[i];
    }
  }
  if (skipped && !lift_skipped(s, list, m, skipped, last)) return 0;
  memcpy(s->order, list, (size_t)m * sizeof(int32_t));
  for (int round = 0; round < MAX_LIFT_ROUNDS; round++) {
    if (round) s->steps += m;
    sort_by_falling_head(s, s->order, m);
    memset(s->load + low, 0, (size_t)(high - low) * sizeof(int32_t));
    for (int32_t q = low; q < high; q++) s->first[q] = s->second[q] = INT32_MAX;
    for (int32_t x = 0; x < m; x++) {
      int32_t i = s->order[x], a = s->start[i];
      int32_t most = load_sections(s->end[i] - a, s->size[i], s->head[i], i, s->load + a,
                                   s->first + a, s->second + a, s->who + a);
      if (most > s->height - s->head[i]) {
        blame(s, s->order, x + 1, i);
        return 0;
      }
    }
    int forced = 0, changed = 0;
    for (int32_t q = low; q < high; q++) {
      int only = s->second[q] != INT32_MAX && s->second[q] > s->height - s->load[q];
      s->lift[q] = only ? s->first[q] + s->size[s->who[q]] : 0;
      forced |= only;
    }
    if (!forced) break;
    for (int32_t x = 0; x < m; x++) {
      int32_t i = list[x], head = s->head[i];
      for (int32_t q = s->start[i]; q < s->end[i]; q++)
        if (s->lift[q] > head && s->who[q] != i) head = s->lift[q];
      if (head == s->head[i]) continue;
      s->head[i] = align_up(head, s->align[i]);
      changed = 1;
      if (s->head[i] > s->height - s->size[i]) {
        s->weights[i] += 1;
        return 0;
      }
    }
    if (!changed) break;
  }
  return 1;
}

static int32_t *push(search *s, int64_t count) {
  int32_t *p = s->stack + s->stack_top;
  s->stack_top += count;
  return p;
}

static void place(search *s, int32_t i, int32_t at) {
  int32_t top = at + s->size[i];
  s->placed[i] = 1;
  s->offset[i] = at;
  for (int32_t t = s->near_at[i]; t < s->near_at[i + 1]; t++) {
    int32_t k = s->near[t];
    if (s->placed[k] || s->support[k] >= top) continue;
    s->trail_block[s->trail] = k;
    s->trail_support[s->trail++] = s->support[k];
    s->support[k] = align_up(top, s->align[k]);
  }
  s->steps += (s->near_at[i + 1] - s->near_at[i]) / 8;
}

static void undo(search *s, int64_t mark) {
  while (s->trail > mark) {
    s->trail--;
    s->support[s->trail_block[s->trail]] = s->trail_support[s->trail];
  }
}

static int solve_parts(search *s, int32_t *list, int32_t m, int32_t last, int32_t last_rank);

/* Place all of `list`, one component in time, above (last, last_rank). */
static int solve(search *s, int32_t *list, int32_t m, int32_t last, int32_t last_rank) {
  int32_t ceiling, count = 0;
  if (m == 0) return 1;
  if (s->steps > s->max_steps || ((s->steps & 63) == 0 && processor_time() > s->deadline)) {
    s->stopped = 1;
    return 0;
  }
  if (!propagate(s, list, m, last, last_rank, &ceiling)) return 0;
  int64_t mark = s->stack_top, trail = s->trail;
  int32_t *candidates = push(s, m);
  for (int32_t x = 0; x < m; x++) {
    int32_t i = list[x], at = s->support[i];
    if (s->head[i] != at || at >= ceiling || passed_over(s, i, last, last_rank)) continue;
    int32_t y = count++;
    for (; y > 0; y--) {
      int32_t j = candidates[y - 1];
      if (s->support[j] < at || (s->support[j] == at && s->rank[j] < s->rank[i])) break;
      candidates[y] = j;
    }
    candidates[y] = i;
  }
  s->stack_top = mark + count;
  int32_t *rest = push(s, m);
  int found = 0;
  for (int32_t x = 0; x < count && !found && !s->stopped; x++) {
    int32_t i = candidates[x], at = s->support[i], kept = 0;
    for (int32_t y = 0; y < m; y++)
      if (list[y] != i) rest[kept++] = list[y];
    place(s, i, at);
    found = solve_parts(s, rest, kept, at, s->rank[i]);
    if (!found) {
      s->placed[i] = 0;
      undo(s, trail);
    }
  }
  s->stack_top = mark;
  return found;
}

static int solve_parts(search *s, int32_t *list, int32_t m, int32_t last, int32_t last_rank) {
  int64_t mark = s->stack_top;
  int32_t parts = 1, from = 0, until = -1;
  int ok = 1;
  for (int32_t x = 0; x < m; x++) {
    if (x && s->start[list[x]] >= until) parts++;
    if (s->end[list[x]] > until) until = s->end[list[x]];
  }
  if (parts == 1) return solve(s, list, m, last, last_rank);
  int32_t *begin = push(s, parts), *length = push(s, parts);
  parts = 0;
  until = -1;
  for (int32_t x = 0; x < m; x++) {
    if (x > from && s->start[list[x]] >= until) {
      begin[parts] = from;
      length[parts++] = x - from;
      from = x;
    }
    if (s->end[list[x]] > until) until = s->end[list[x]];
  }
  if (m > from) {
    begin[parts] = from;
    length[parts++] = m - from;
  }
  int32_t ceiling;
  for (int32_t k = 0; k < parts && ok; k++)
    ok = propagate(s, list + begin[k], length[k], last, last_rank, &ceiling);
  for (int32_t k = 1; k < parts && ok; k++) { /* smallest first: the cheapest to refute */
    int32_t b = begin[k], l = length[k], y = k;
    for (; y > 0 && length[y - 1] > l; y--) {
      begin[y] = begin[y - 1];
      length[y] = length[y - 1];
    }
    begin[y] = b;
    length[y] = l;
  }
  for (int32_t k = 0; k < parts && ok; k++)
    ok = solve(s, list + begin[k], length[k], last, last_rank);
  if (!ok) /* the parts solved before the one that failed are open again */
    for (int32_t x = 0; x < m; x++) s->placed[list[x]] = 0;
  s->stack_top = mark;
  return ok;
}

static int64_t find_neighbours(search *s, int fill) {
  int64_t total = 0;
  for (int32_t i = 0; i < s->n; i++) {
    if (fill) s->near_at[i] = (int32_t)total;
    for (int32_t k = 0; k < s->n && s->start[k] < s->end[i]; k++) {
      if (k == i || s->end[k] <= s->start[i]) continue;
      if (fill) s->near[total] = k;
      total++;
    }
  }
  if (fill) s->near_at[s->n] = (int32_t)total;
  return total;
}

int tvmx_dfs(int32_t n, int32_t sections, const int32_t *start, const int32_t *end,
             const int32_t *size, const int32_t *align, const int32_t *rank, int32_t height,
             double seconds, int64_t *steps, double *weights, int32_t *offsets) {
  search s = {.n = n, .height = height, .start = start, .end = end, .size = size, .align = align,
              .rank = rank, .offset = offsets, .weights = weights, .max_steps = *steps,
              .deadline = processor_time() + seconds};
  *steps = 0;
  if (n == 0) return TVMX_SOLVED;
  int64_t edges = find_neighbours(&s, 0);
  /* Open lists: candidates and rest of each solve, m falling by one per level, and two words per
   * part, of which a path meets at most two per block. What is not reached is never touched. */
  int64_t lists = (int64_t)n * (n + 1) + 8 * (int64_t)n + 64;
  if (edges >= INT32_MAX) return TVMX_OUT_OF_MEMORY;
  int64_t words = 5 * (int64_t)n + 1 + edges + 5 * (int64_t)sections + 2 * edges + lists + n;
  int32_t *memory = malloc((size_t)words * sizeof(int32_t));
  char *flags = calloc((size_t)n, 2);
  int status = TVMX_OUT_OF_MEMORY;
  if (memory && flags) {
    int32_t *p = memory;
    s.support = p, p += n;
    s.head = p, p += n;
    s.order = p, p += n;
    s.skipped = p, p += n;
    s.near_at = p, p += n + 1;
    s.near = p, p += edges;
    s.load = p, p += sections;
    s.first = p, p += sections;
    s.second = p, p += sections;
    s.who = p, p += sections;
    s.lift = p, p += sections;
    s.trail_block = p, p += edges;
    s.trail_support = p, p += edges;
    int32_t *all = p;
    p += n;
    s.stack = p;
    s.placed = flags;
    s.inside = flags + n;
    find_neighbours(&s, 1);
    for (int32_t i = 0; i < n; i++) {
      s.support[i] = 0;
      all[i] = i;
    }
    int found = solve_parts(&s, all, n, 0, -1);
    status = found ? TVMX_SOLVED : s.stopped ? TVMX_OUT_OF_STEPS : TVMX_INFEASIBLE;
    *steps = s.steps;
  }
  free(memory);
  free(flags);
  return status;
}
