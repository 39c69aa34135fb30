/* The compiled core of the planner: plain C on flat arrays, no Python, no allocation kept. */
#ifndef TVMX_MEMORY_CORE_H
#define TVMX_MEMORY_CORE_H

#include <stdint.h>

enum { TVMX_SOLVED = 0, TVMX_INFEASIBLE = 1, TVMX_OUT_OF_STEPS = 2, TVMX_OUT_OF_MEMORY = 3 };

/* Place n blocks in `order`, each at its lowest fitting offset, or in the smallest gap that holds it.
 * Blocks with pinned[i] >= 0 go there first. Lifespans are half-open. Returns a TVMX_ status. */
int tvmx_place(int32_t n, const int64_t *start, const int64_t *end, const int64_t *size,
               const int64_t *align, const int64_t *pinned, const int64_t *order,
               int smallest_gap, int64_t *offsets);

/* Place n blocks, always the one whose support is lowest, ties by rank. Sections as below. */
int tvmx_stack(int32_t n, int32_t sections, const int32_t *start, const int32_t *end,
               const int64_t *size, const int64_t *align, const int32_t *rank, int64_t *offsets);

/* Place n blocks by chains on the skyline, see core_skyline.c. Blocks sorted by (start, end); of blocks
 * of one lifespan the first is placed first. `waste` is what a byte of a section left uncovered costs in
 * scores, `flush` the share of its score that a block gains where its top meets the next segment's.
 * Gives up after *steps steps; *steps becomes the steps taken. */
int tvmx_skyline(int32_t n, int32_t sections, const int32_t *start, const int32_t *end,
                 const int64_t *size, const int64_t *align, const double *score, double waste,
                 double flush, int64_t *steps, int64_t *offsets);

/* One depth-first search for offsets of n blocks below `height`; blocks are given sorted by start,
 * start and end index sections of time in [0, sections). Candidates of one offset are tried by `rank`.
 * `weights[i]` grows with each dead end that block i took part in. Gives up after *steps steps or at
 * `seconds` of processor time; *steps becomes the steps taken. */
int tvmx_dfs(int32_t n, int32_t sections, const int32_t *start, const int32_t *end,
             const int32_t *size, const int32_t *align, const int32_t *rank, int32_t height,
             double seconds, int64_t *steps, double *weights, int32_t *offsets);

/* Move blocks until all lie below `height`: `offsets` hold where they are, -1 for nowhere, and the
 * result. Blocks sorted by start as above; throwing out block i costs base[i] * penalty[i], and
 * penalties grow. Deterministic for a seed unless `seconds` of processor time end it. */
int tvmx_eject(int32_t n, const int32_t *start, const int32_t *end, const int32_t *size,
               const int32_t *align, int32_t height, const int64_t *base, int64_t *penalty,
               uint64_t seed, double seconds, int64_t *steps, int32_t *offsets);

#endif
