/* Lowest first: always place the block whose support is lowest, ties by rank.
 *
 * The floor of each section is the top of what was placed there. Blocks wait in a heap under the
 * support they had when last looked at; a support only grows, so the top of the heap is looked at
 * again and either goes back or is the lowest. Where thousands live at once every block placed lifts the
 * rest, so that after many looks a block is placed as it comes. Floors are a tree of maxima with range assignment:
 * a placed block's top is above every floor under it.
 */
#include <stdlib.h>

#include "core.h"

enum { LOOKS = 1000000, LOOKS_PER_BLOCK = 32 };

typedef struct {
  int32_t leaves;
  int64_t *most; /* largest floor below each tree node */
  int64_t *all;  /* floor of every leaf below the node when >= 0, not yet handed down */
} floors;

static int64_t largest(floors *f, int32_t node, int32_t low, int32_t high, int32_t a, int32_t b) {
  if (a <= low && high <= b) return f->most[node];
  if (f->all[node] >= 0) return f->all[node];
  int32_t mid = low + (high - low) / 2;
  int64_t left = a < mid ? largest(f, 2 * node, low, mid, a, b) : 0;
  int64_t right = b > mid ? largest(f, 2 * node + 1, mid, high, a, b) : 0;
  return left > right ? left : right;
}

static void assign(floors *f, int32_t node, int32_t low, int32_t high, int32_t a, int32_t b,
                   int64_t top) {
  if (a <= low && high <= b) {
    f->most[node] = f->all[node] = top;
    return;
  }
  if (f->all[node] >= 0) {
    for (int32_t k = 2 * node; k <= 2 * node + 1; k++) f->most[k] = f->all[k] = f->all[node];
    f->all[node] = -1;
  }
  int32_t mid = low + (high - low) / 2;
  if (a < mid) assign(f, 2 * node, low, mid, a, b, top);
  if (b > mid) assign(f, 2 * node + 1, mid, high, a, b, top);
  int64_t left = f->most[2 * node], right = f->most[2 * node + 1];
  f->most[node] = left > right ? left : right;
}

typedef struct {
  int64_t support;
  int32_t rank, block;
} waiting;

static int before(waiting a, waiting b) {
  return a.support != b.support ? a.support < b.support : a.rank < b.rank;
}

static void sink(waiting *heap, int32_t n, int32_t k) {
  if (k >= n) return;
  waiting v = heap[k];
  for (;;) {
    int32_t child = 2 * k + 1;
    if (child >= n) break;
    if (child + 1 < n && before(heap[child + 1], heap[child])) child++;
    if (!before(heap[child], v)) break;
    heap[k] = heap[child];
    k = child;
  }
  heap[k] = v;
}

int tvmx_stack(int32_t n, int32_t sections, const int32_t *start, const int32_t *end,
               const int64_t *size, const int64_t *align, const int32_t *rank, int64_t *offsets) {
  int status = TVMX_OUT_OF_MEMORY;
  floors f = {.leaves = 1};
  while (f.leaves < sections) f.leaves *= 2;
  f.most = calloc(2 * (size_t)f.leaves, sizeof(int64_t));
  f.all = malloc(2 * (size_t)f.leaves * sizeof(int64_t));
  waiting *heap = malloc((size_t)(n ? n : 1) * sizeof(waiting));
  if (!f.most || !f.all || !heap) goto done;
  for (int32_t k = 0; k < 2 * f.leaves; k++) f.all[k] = -1;
  for (int32_t i = 0; i < n; i++) heap[i] = (waiting){0, rank[i], i};
  for (int32_t k = n / 2; k >= 0; k--) sink(heap, n, k);
  for (int64_t looks = LOOKS + (int64_t)LOOKS_PER_BLOCK * n; n; looks--) {
    int32_t i = heap[0].block;
    int64_t at = largest(&f, 1, 0, f.leaves, start[i], end[i]), over = at % align[i];
    if (over) at += align[i] - over;
    if (at == heap[0].support || looks < 0) {
      offsets[i] = at;
      assign(&f, 1, 0, f.leaves, start[i], end[i], at + size[i]);
      heap[0] = heap[--n];
    } else {
      heap[0].support = at;
    }
    sink(heap, n, 0);
  }
  status = TVMX_SOLVED;
done:
  free(f.most);
  free(f.all);
  free(heap);
  return status;
}
