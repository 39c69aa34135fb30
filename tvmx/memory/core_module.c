/* Python face of the core: `tvmx.memory._core`, on contiguous buffers of int64, int32 and double. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

static int check_length(const Py_buffer *b, Py_ssize_t items, Py_ssize_t width, const char *name) {
  if (b->len >= items * width) return 1;
  PyErr_Format(PyExc_ValueError, "%s holds %zd bytes, %zd are needed", name, b->len, items * width);
  return 0;
}

static PyObject *core_place(PyObject *self, PyObject *args) {
  (void)self;
  Py_buffer b[7];
  int n, smallest, status = TVMX_OUT_OF_MEMORY, ok = 1;
  static const char *names[] = {"start", "end", "size", "align", "pinned", "order", "offsets"};
  if (!PyArg_ParseTuple(args, "iy*y*y*y*y*y*pw*", &n, &b[0], &b[1], &b[2], &b[3], &b[4], &b[5],
                        &smallest, &b[6]))
    return NULL;
  if (n < 0) {
    PyErr_SetString(PyExc_ValueError, "n is negative");
    ok = 0;
  }
  for (int k = 0; k < 7 && ok; k++) ok = check_length(&b[k], n, sizeof(int64_t), names[k]);
  const int64_t *order = b[5].buf, *align = b[3].buf;
  for (int k = 0; k < n && ok; k++) {
    if (order[k] < 0 || order[k] >= n || align[k] < 1) {
      PyErr_SetString(PyExc_ValueError, "order is no permutation or an alignment is below 1");
      ok = 0;
    }
  }
  if (ok) {
    Py_BEGIN_ALLOW_THREADS
    status = tvmx_place(n, b[0].buf, b[1].buf, b[2].buf, align, b[4].buf, order, smallest, b[6].buf);
    Py_END_ALLOW_THREADS
    if (status == TVMX_OUT_OF_MEMORY) {
      PyErr_NoMemory();
      ok = 0;
    }
  }
  for (int k = 0; k < 7; k++) PyBuffer_Release(&b[k]);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject *core_stack(PyObject *self, PyObject *args) {
  (void)self;
  Py_buffer b[6];
  int n, sections, status = TVMX_OUT_OF_MEMORY, ok = 1;
  static const char *names[] = {"start", "end", "size", "align", "rank", "offsets"};
  if (!PyArg_ParseTuple(args, "iiy*y*y*y*y*w*", &n, &sections, &b[0], &b[1], &b[2], &b[3], &b[4],
                        &b[5]))
    return NULL;
  if (n < 0 || sections < 0) {
    PyErr_SetString(PyExc_ValueError, "n or sections is negative");
    ok = 0;
  }
  for (int k = 0; k < 6 && ok; k++)
    ok = check_length(&b[k], n, k == 2 || k == 3 || k == 5 ? 8 : 4, names[k]);
  const int32_t *start = b[0].buf, *end = b[1].buf;
  const int64_t *align = b[3].buf;
  for (int k = 0; k < n && ok; k++) {
    if (start[k] < 0 || start[k] >= end[k] || end[k] > sections || align[k] < 1) {
      PyErr_Format(PyExc_ValueError, "block %d is out of range", k);
      ok = 0;
    }
  }
  if (ok) {
    Py_BEGIN_ALLOW_THREADS
    status = tvmx_stack(n, sections, start, end, b[2].buf, align, b[4].buf, b[5].buf);
    Py_END_ALLOW_THREADS
    if (status == TVMX_OUT_OF_MEMORY) {
      PyErr_NoMemory();
      ok = 0;
    }
  }
  for (int k = 0; k < 6; k++) PyBuffer_Release(&b[k]);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject *core_skyline(PyObject *self, PyObject *args) {
  (void)self;
  Py_buffer b[6];
  int n, sections, status = TVMX_OUT_OF_MEMORY, ok = 1;
  double waste, flush;
  long long steps;
  static const char *names[] = {"start", "end", "size", "align", "score", "offsets"};
  if (!PyArg_ParseTuple(args, "iiy*y*y*y*y*ddLw*", &n, &sections, &b[0], &b[1], &b[2], &b[3], &b[4],
                        &waste, &flush, &steps, &b[5]))
    return NULL;
  if (n < 0 || sections < 0) {
    PyErr_SetString(PyExc_ValueError, "n or sections is negative");
    ok = 0;
  }
  for (int k = 0; k < 6 && ok; k++) ok = check_length(&b[k], n, k < 2 ? 4 : 8, names[k]);
  const int32_t *start = b[0].buf, *end = b[1].buf;
  const int64_t *align = b[3].buf;
  for (int k = 0; k < n && ok; k++) {
    int sorted = !k || start[k] > start[k - 1] || (start[k] == start[k - 1] && end[k] >= end[k - 1]);
    if (start[k] < 0 || start[k] >= end[k] || end[k] > sections || align[k] < 1 || !sorted) {
      PyErr_Format(PyExc_ValueError, "block %d is out of range or not sorted by start and end", k);
      ok = 0;
    }
  }
  int64_t taken = steps;
  if (ok) {
    Py_BEGIN_ALLOW_THREADS
    status = tvmx_skyline(n, sections, start, end, b[2].buf, align, b[4].buf, waste, flush, &taken,
                          b[5].buf);
    Py_END_ALLOW_THREADS
    if (status == TVMX_OUT_OF_MEMORY) {
      PyErr_NoMemory();
      ok = 0;
    }
  }
  for (int k = 0; k < 6; k++) PyBuffer_Release(&b[k]);
  if (!ok) return NULL;
  return Py_BuildValue("iL", status, (long long)taken);
}

static PyObject *core_dfs(PyObject *self, PyObject *args) {
  (void)self;
  Py_buffer b[7]; /* start end size align rank | weights offsets */
  int n, sections, height, status = TVMX_OUT_OF_MEMORY, ok = 1;
  double seconds;
  long long max_steps;
  static const char *names[] = {"start", "end", "size", "align", "rank", "weights", "offsets"};
  if (!PyArg_ParseTuple(args, "iiy*y*y*y*y*idLw*w*", &n, &sections, &b[0], &b[1], &b[2], &b[3],
                        &b[4], &height, &seconds, &max_steps, &b[5], &b[6]))
    return NULL;
  if (n < 0 || sections < 0) {
    PyErr_SetString(PyExc_ValueError, "n or sections is negative");
    ok = 0;
  }
  for (int k = 0; k < 7 && ok; k++)
    ok = check_length(&b[k], n, k == 5 ? sizeof(double) : sizeof(int32_t), names[k]);
  const int32_t *start = b[0].buf, *end = b[1].buf, *size = b[2].buf, *align = b[3].buf;
  for (int k = 0; k < n && ok; k++) {
    if (start[k] < 0 || start[k] >= end[k] || end[k] > sections || size[k] < 1 || align[k] < 1 ||
        (k && start[k] < start[k - 1]) || size[k] > (1 << 30) || align[k] > (1 << 29)) {
      PyErr_Format(PyExc_ValueError, "block %d is out of range or not sorted by start", k);
      ok = 0;
    }
  }
  if (height < 0 || height > (1 << 30)) {
    PyErr_SetString(PyExc_ValueError, "height is out of range");
    ok = 0;
  }
  int64_t steps = max_steps;
  if (ok) {
    Py_BEGIN_ALLOW_THREADS
    status = tvmx_dfs(n, sections, start, end, size, align, b[4].buf, height, seconds, &steps,
                      b[5].buf, b[6].buf);
    Py_END_ALLOW_THREADS
    if (status == TVMX_OUT_OF_MEMORY) {
      PyErr_NoMemory();
      ok = 0;
    }
  }
  for (int k = 0; k < 7; k++) PyBuffer_Release(&b[k]);
  if (!ok) return NULL;
  return Py_BuildValue("iL", status, (long long)steps);
}

static PyObject *core_eject(PyObject *self, PyObject *args) {
  (void)self;
  Py_buffer b[7]; /* start end size align base | penalty offsets */
  int n, height, status = TVMX_OUT_OF_MEMORY, ok = 1;
  double seconds;
  long long max_steps;
  unsigned long long seed;
  static const char *names[] = {"start", "end", "size", "align", "base", "penalty", "offsets"};
  if (!PyArg_ParseTuple(args, "iy*y*y*y*iy*w*KdLw*", &n, &b[0], &b[1], &b[2], &b[3], &height, &b[4],
                        &b[5], &seed, &seconds, &max_steps, &b[6]))
    return NULL;
  if (n < 0 || height < 0 || height > (1 << 30)) {
    PyErr_SetString(PyExc_ValueError, "n or height is out of range");
    ok = 0;
  }
  for (int k = 0; k < 7 && ok; k++) ok = check_length(&b[k], n, k == 4 || k == 5 ? 8 : 4, names[k]);
  const int32_t *start = b[0].buf, *end = b[1].buf, *size = b[2].buf, *align = b[3].buf;
  const int64_t *base = b[4].buf, *penalty = b[5].buf;
  for (int k = 0; k < n && ok; k++) {
    if (start[k] < 0 || start[k] >= end[k] || size[k] < 1 || size[k] > (1 << 30) || align[k] < 1 ||
        (k && start[k] < start[k - 1]) || align[k] > (1 << 29) || base[k] < 1 ||
        base[k] > 1000000 || penalty[k] < 1 || penalty[k] > 1000000) {
      PyErr_Format(PyExc_ValueError, "block %d is out of range or not sorted by start", k);
      ok = 0;
    }
  }
  int64_t steps = max_steps;
  if (ok) {
    Py_BEGIN_ALLOW_THREADS
    status = tvmx_eject(n, start, end, size, align, height, base, b[5].buf, seed, seconds, &steps,
                        b[6].buf);
    Py_END_ALLOW_THREADS
    if (status == TVMX_OUT_OF_MEMORY) {
      PyErr_NoMemory();
      ok = 0;
    }
  }
  for (int k = 0; k < 7; k++) PyBuffer_Release(&b[k]);
  if (!ok) return NULL;
  return Py_BuildValue("iL", status, (long long)steps);
}

static PyMethodDef methods[] = {
    {"place", core_place, METH_VARARGS,
     "place(n, start, end, size, align, pinned, order, smallest_gap, offsets): fill offsets"},
    {"stack", core_stack, METH_VARARGS,
     "stack(n, sections, start, end, size, align, rank, offsets): fill offsets"},
    {"skyline", core_skyline, METH_VARARGS,
     "skyline(n, sections, start, end, size, align, score, waste, flush, max_steps, offsets)"
     " -> (status, steps)"},
    {"dfs", core_dfs, METH_VARARGS,
     "dfs(n, sections, start, end, size, align, rank, height, seconds, max_steps, weights, offsets)"
     " -> (status, steps)"},
    {"eject", core_eject, METH_VARARGS,
     "eject(n, start, end, size, align, height, base, penalty, seed, seconds, max_steps, offsets)"
     " -> (status, steps)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_core", "Compiled core of the memory planner.", -1, methods,
    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) { return PyModule_Create(&module); }
