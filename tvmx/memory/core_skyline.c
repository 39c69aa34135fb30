/* Chains on the skyline: the lowest stretch of the floor is covered by blocks that follow one another.
 *
 * The floor is a row of segments of sections with one height each. The lowest segment takes the chain
 * of blocks within it whose scores, less what the chain leaves uncovered, are the largest in sum (from
 * right to left by dynamic programming); a segment that no block fits rises to its lower neighbour.
 * Blocks of one lifespan are a class, of which only the next in line is looked at.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"

typedef struct {
  int64_t height;
  int32_t from;
} waiting;

typedef struct {
  int32_t end, next, last; /* blocks next to last - 1 are not placed yet */
} class;

typedef struct {
  int32_t sections, entries;
  int32_t *until, *from; /* a segment ends at until[its start] (0: none) and starts at from[its end] */
  int64_t *height;       /* by its start */
  waiting *heap;         /* of segments; an entry whose height is no longer right is skipped */
} skyline;

static int before(waiting a, waiting b) {
  return a.height != b.height ? a.height < b.height : a.from < b.from;
}

static void wait_for(skyline *s, int32_t from) {
  waiting v = {s->height[from], from};
  int32_t k = s->entries++;
  for (; k && before(v, s->heap[(k - 1) / 2]); k = (k - 1) / 2) s->heap[k] = s->heap[(k - 1) / 2];
  s->heap[k] = v;
}

static waiting lowest(skyline *s) {
  waiting top = s->heap[0], v = s->heap[--s->entries];
  int32_t k = 0;
  for (;;) {
    int32_t child = 2 * k + 1;
    if (child >= s->entries) break;
    if (child + 1 < s->entries && before(s->heap[child + 1], s->heap[child])) child++;
    if (!before(s->heap[child], v)) break;
    s->heap[k] = s->heap[child];
    k = child;
  }
  s->heap[k] = v;
  return top;
}

static void add_segment(skyline *s, int32_t from, int32_t until, int64_t height) {
  s->until[from] = until;
  s->from[until] = from;
  s->height[from] = height;
  wait_for(s, from);
}

/* A segment that no block fits rises to the lower of its neighbours and becomes part of it. */
static void rise(skyline *s, int32_t from, int64_t left, int64_t right) {
  int32_t until = s->until[from], start = from;
  int64_t to = left < right ? left : right;
  s->until[from] = 0;
  if (left == to) start = s->from[from];
  if (right == to) {
    int32_t end = s->until[until];
    s->until[until] = 0;
    until = end;
  }
  add_segment(s, start, until, to);
}

int tvmx_skyline(int32_t n, int32_t sections, const int32_t *start, const int32_t *end,
                 const int64_t *size, const int64_t *align, const double *score, double waste,
                 double flush, int64_t *steps, int64_t *offsets) {
  int64_t max_steps = *steps, spent = 0;
  int32_t placed = 0, classes = 0;
  size_t places = (size_t)sections + 1;
  int status = TVMX_OUT_OF_MEMORY;
  skyline s = {.sections = sections};
  /* Each block placed adds at most a segment and what it leaves uncovered another; each rise ends one. */
  s.heap = malloc((8 * (size_t)n + 8 * places) * sizeof(waiting));
  s.until = calloc(2 * places, sizeof(int32_t));
  s.height = malloc(places * sizeof(int64_t));
  class *all = malloc((size_t)(n ? n : 1) * sizeof(class));
  int32_t *ints = calloc(4 * places, sizeof(int32_t)), *first = ints, *count = ints + places,
          *pick = count + places, *alive = pick + places;
  double *gain = malloc(places * sizeof(double));
  if (!s.heap || !s.until || !s.height || !all || !ints || !gain) goto done;
  s.from = s.until + places;
  for (int32_t x = 0, i = 0; x < sections; x++) {
    first[x] = classes;
    for (; i < n && start[i] == x; classes++) {
      int32_t same = i;
      while (same < n && start[same] == x && end[same] == end[i]) same++;
      all[classes] = (class){end[i], i, same};
      i = same;
    }
    count[x] = classes - first[x];
  }
  for (int32_t i = 0; i < n; i++) alive[start[i]]++, alive[end[i]]--;
  for (int32_t x = 1; x < sections; x++) alive[x] += alive[x - 1];
  if (sections) add_segment(&s, 0, sections, 0);
  while (placed < n) {
    waiting top = lowest(&s);
    int32_t a = top.from, b = s.until[a];
    int64_t h = top.height;
    if (!b || s.height[a] != h) continue;
    if (spent > max_steps) {
      status = TVMX_OUT_OF_STEPS;
      goto done;
    }
    int64_t left = a ? s.height[s.from[a]] : INT64_MAX;
    int64_t right = b < sections ? s.height[b] : INT64_MAX;
    int64_t to = left < right ? left : right;
    double lost = waste * (to == INT64_MAX ? 1.0 : (double)(to - h));
    gain[b] = 0;
    for (int32_t x = b - 1; x >= a; x--) {
      gain[x] = gain[x + 1] - (alive[x] ? lost : 0);
      pick[x] = -1;
      int32_t c = first[x], last = c + count[x];
      for (; c < last && all[c].end <= b; c++) {
        int32_t i = all[c].next, e = all[c].end;
        int64_t over = h % align[i], pad = over ? align[i] - over : 0, upper = h + pad + size[i];
        double v = score[i];
        if (x == a && upper == left) v += flush * score[i];
        if (e == b && upper == right) v += flush * score[i];
        /* on the whole floor something has to be taken */
        if (pad && to != INT64_MAX) v -= waste * (double)pad * (e - x);
        v += gain[e];
        if (v > gain[x]) gain[x] = v, pick[x] = c;
      }
      spent += 1 + c - first[x];
    }
    int32_t x = a;
    while (x < b && pick[x] < 0) x++;
    if (x == b) {
      rise(&s, a, left, right);
      continue;
    }
    s.until[a] = 0;
    int32_t at = a ? s.from[a] : -1, beside = at; /* the segment that ends at x */
    for (x = a; x < b;) {
      int32_t y = x;
      int64_t upper = h;
      if (pick[x] < 0) {
        while (y < b && pick[y] < 0) y++;
      } else {
        class *c = &all[pick[x]];
        int32_t i = c->next++;
        int64_t over = h % align[i];
        y = c->end;
        offsets[i] = over ? h + align[i] - over : h;
        upper = offsets[i] + size[i];
        placed++;
        for (int32_t t = x; t < y; t++) alive[t]--;
        spent += (y - x) / 8;
        if (c->next == c->last) {
          class *none = &all[first[x] + --count[x]];
          spent += (none - c) / 8;
          memmove(c, c + 1, (size_t)(none - c) * sizeof(class));
        }
      }
      if (at >= 0 && s.height[at] == upper) {
        s.until[at] = y;
        s.from[y] = at;
        if (at == beside) wait_for(&s, at);
      } else {
        add_segment(&s, x, y, upper);
        at = x;
      }
      x = y;
    }
    if (b < sections && s.height[b] == s.height[at]) {
      int32_t until = s.until[b];
      s.until[b] = 0;
      s.until[at] = until;
      s.from[until] = at;
    }
  }
  status = TVMX_SOLVED;
done:
  *steps = spent;
  free(s.heap);
  free(s.until);
  free(s.height);
  free(all);
  free(ints);
  free(gain);
  return status;
}
