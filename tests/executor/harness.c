/* Runs the first entry of a bundled model on input files and writes output_<n>.bin: the C side of the bundle, used
 * where a C++ compiler for the target may be missing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tvmx_model.h"

static void* aligned(int64_t bytes) {
  size_t size = ((size_t)bytes + 127) / 64 * 64;
  return memset(aligned_alloc(64, size), 0, size);
}

int main(int argc, char** argv) {
  const tvmx_entry* entry = &TVMX_ENTRIES[0];
  void *inputs[64], *outputs[64];
  if (entry->num_inputs > 64 || entry->num_outputs > 64) return 3;
  for (int i = 0; i < entry->num_inputs; i++) {
    inputs[i] = aligned(entry->inputs[i].bytes);
    FILE* file = i + 1 < argc ? fopen(argv[i + 1], "rb") : NULL;
    if (!file || fread(inputs[i], 1, (size_t)entry->inputs[i].bytes, file) != (size_t)entry->inputs[i].bytes) return 2;
    fclose(file);
  }
  for (int i = 0; i < entry->num_outputs; i++) outputs[i] = aligned(entry->outputs[i].bytes);
  tvmx_pool* pool = tvmx_pool_new(2, NULL);
  tvmx_call call = {.pool = pool, .inputs = inputs, .outputs = outputs, .arena = aligned(entry->arena_bytes)};
  for (int round = 0; round < 3; round++)
    if (entry->run(&call)) return 1;
  for (int i = 0; i < entry->num_outputs; i++) {
    char name[32];
    snprintf(name, sizeof name, "output_%d.bin", i);
    FILE* file = fopen(name, "wb");
    fwrite(outputs[i], 1, (size_t)entry->outputs[i].bytes, file);
    fclose(file);
  }
  tvmx_pool_free(pool);
  return 0;
}
