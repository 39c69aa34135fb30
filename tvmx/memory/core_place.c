/* First-fit and smallest-gap placement in a given order. */
#include <stdlib.h>
#include <string.h>

#include "core.h"

typedef struct {
  int64_t at, top;
} span;

static int by_address(const void *a, const void *b) {
  const span *x = a, *y = b;
  return (x->at > y->at) - (x->at < y->at);
}

static void sort_spans(span *s, int32_t n) {
  if (n > 48) {
    qsort(s, (size_t)n, sizeof(span), by_address);
    return;
  }
  for (int32_t i = 1; i < n; i++) {
    span v = s[i];
    int32_t j = i;
    for (; j > 0 && s[j - 1].at > v.at; j--) s[j] = s[j - 1];
    s[j] = v;
  }
}

static int64_t align_up(int64_t x, int64_t a) {
  int64_t r = x % a;
  return r ? x + a - r : x;
}

static int64_t find_gap(const span *s, int32_t n, int64_t size, int64_t align, int smallest) {
  int64_t cursor = 0, best = -1, best_room = 0;
  for (int32_t i = 0; i < n; i++) {
    if (s[i].at > cursor) {
      int64_t place = align_up(cursor, align), room = s[i].at - cursor;
      if (s[i].at - place >= size && (best < 0 || room < best_room)) {
        best = place;
        best_room = room;
        if (!smallest) return best;
      }
    }
    if (s[i].top > cursor) cursor = s[i].top;
  }
  return best >= 0 ? best : align_up(cursor, align);
}

typedef struct {
  int64_t key;
  int32_t i;
} keyed;

static int by_key(const void *a, const void *b) {
  const keyed *x = a, *y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  return x->i - y->i;
}

/* Blocks by start, and for each bucket of `stride` such blocks the latest end of it and all before
 * it in a tree of maxima: finding what lives with a block skips whole buckets. */
typedef struct {
  int32_t n, leaves;
  keyed *by_start;
  int64_t *latest; /* tree of maxima over leaves, root at 1; ends of placed blocks only */
} timeline;

static int timeline_init(timeline *t, int32_t n, const int64_t *start) {
  t->n = n;
  for (t->leaves = 1; t->leaves < n; t->leaves *= 2) continue;
  t->by_start = malloc((size_t)n * sizeof(keyed));
  t->latest = malloc(2 * (size_t)t->leaves * sizeof(int64_t));
  if (!t->by_start || !t->latest) return 0;
  for (int32_t i = 0; i < n; i++) t->by_start[i] = (keyed){start[i], i};
  qsort(t->by_start, (size_t)n, sizeof(keyed), by_key);
  for (int32_t i = 0; i < 2 * t->leaves; i++) t->latest[i] = INT64_MIN;
  return 1;
}

static void timeline_add(timeline *t, int32_t leaf, int64_t end) {
  for (int32_t k = leaf + t->leaves; k; k /= 2) {
    if (t->latest[k] >= end) break;
    t->latest[k] = end;
  }
}

/* Placed blocks among the first `count` by start whose end is after `s`, as spans; -1 when there
 * are more than `most`. */
static int32_t timeline_collect(const timeline *t, int32_t count, int64_t s, const int64_t *size,
                                const int64_t *offsets, int32_t most, span *out) {
  int32_t stack[128], depth = 0, found = 0;
  stack[depth++] = 1;
  while (depth) {
    int32_t k = stack[--depth], low = k, width = 1;
    if (t->latest[k] <= s) continue;
    while (low < t->leaves) low *= 2, width *= 2;
    low -= t->leaves;
    if (low >= count) continue;
    if (width == 1) {
      int32_t i = t->by_start[low].i;
      if (found == most) return -1;
      out[found++] = (span){offsets[i], offsets[i] + size[i]};
      continue;
    }
    stack[depth++] = 2 * k + 1;
    stack[depth++] = 2 * k;
  }
  return found;
}

/* The placed blocks sorted by address: read through when a large part of them lives at once. */
typedef struct {
  span bytes;
  int64_t start, end;
} seat;

static void take_seat(seat *seats, int32_t count, seat new) {
  int32_t low = 0, high = count;
  while (low < high) {
    int32_t mid = low + (high - low) / 2;
    if (seats[mid].bytes.at <= new.bytes.at) low = mid + 1;
    else high = mid;
  }
  memmove(seats + low + 1, seats + low, (size_t)(count - low) * sizeof(seat));
  seats[low] = new;
}

int tvmx_place(int32_t n, const int64_t *start, const int64_t *end, const int64_t *size,
               const int64_t *align, const int64_t *pinned, const int64_t *order,
               int smallest_gap, int64_t *offsets) {
  timeline t = {0};
  int status = TVMX_OUT_OF_MEMORY;
  span *near = malloc((size_t)(n ? n : 1) * sizeof(span));
  seat *seats = malloc((size_t)(n ? n : 1) * sizeof(seat));
  int32_t seated = 0;
  int32_t *leaf = malloc((size_t)(n ? n : 1) * sizeof(int32_t));
  if (n == 0) {
    status = TVMX_SOLVED;
    goto done;
  }
  if (!near || !seats || !leaf || !timeline_init(&t, n, start)) goto done;
  for (int32_t k = 0; k < n; k++) leaf[t.by_start[k].i] = k;
  for (int32_t i = 0; i < n; i++) {
    if (pinned[i] < 0) continue;
    offsets[i] = pinned[i];
    take_seat(seats, seated++, (seat){{offsets[i], offsets[i] + size[i]}, start[i], end[i]});
    timeline_add(&t, leaf[i], end[i]);
  }
  for (int32_t x = 0; x < n; x++) {
    int32_t i = (int32_t)order[x];
    if (pinned[i] >= 0) continue;
    /* blocks that start before this one ends: a prefix of by_start */
    int32_t low = 0, high = n;
    while (low < high) {
      int32_t mid = low + (high - low) / 2;
      if (t.by_start[mid].key < end[i]) low = mid + 1;
      else high = mid;
    }
    int32_t m = timeline_collect(&t, low, start[i], size, offsets, 48 + seated / 48, near);
    if (m >= 0) {
      sort_spans(near, m);
    } else {
      m = 0;
      for (int32_t k = 0; k < seated; k++) { /* without a branch: whether they meet cannot be foretold */
        near[m] = seats[k].bytes;
        m += (seats[k].start < end[i]) & (start[i] < seats[k].end);
      }
    }
    offsets[i] = find_gap(near, m, size[i], align[i], smallest_gap);
    timeline_add(&t, leaf[i], end[i]);
    take_seat(seats, seated++, (seat){{offsets[i], offsets[i] + size[i]}, start[i], end[i]});
  }
  status = TVMX_SOLVED;
done:
  free(near);
  free(seats);
  free(leaf);
  free(t.by_start);
  free(t.latest);
  return status;
}
