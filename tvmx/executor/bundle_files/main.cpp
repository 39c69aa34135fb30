// Runs every entry of the model once: inputs from files given on the command line (raw bytes, in the order of the
// inputs; zeros for those not given), outputs to output_<n>.bin. Usage: run_model [--threads N] [--entry NAME] [input.bin ...]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "tvmx_model.h"

// Kernels need 64-byte aligned data.
struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;

static Buffer aligned(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + 127) / 64 * 64;
  Buffer memory(std::aligned_alloc(64, size));
  if (!memory) throw std::bad_alloc();
  std::memset(memory.get(), 0, size);
  return memory;
}

int main(int argc, char** argv) {
  int threads = 1;
  std::string wanted;
  std::vector<std::string> files;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    if (word == "--threads" && i + 1 < argc)
      threads = std::atoi(argv[++i]);
    else if (word == "--entry" && i + 1 < argc)
      wanted = argv[++i];
    else
      files.push_back(word);
  }
  const tvmx_entry* entry = nullptr;
  for (const auto& e : TVMX_ENTRIES)
    if (wanted.empty() || wanted == e.name) {
      entry = &e;
      break;
    }
  if (!entry) {
    std::cerr << "no entry " << wanted << "\n";
    return 2;
  }

  std::vector<Buffer> memory;
  std::vector<void*> inputs, outputs;
  for (int i = 0; i < entry->num_inputs; i++) {
    const tvmx_tensor_info& info = entry->inputs[i];
    memory.push_back(aligned(info.bytes));
    inputs.push_back(memory.back().get());
    if (i < static_cast<int>(files.size())) {
      std::ifstream file(files[i], std::ios::binary);
      if (!file.read(static_cast<char*>(inputs.back()), info.bytes)) {
        std::cerr << files[i] << ": expected " << info.bytes << " bytes for input " << info.name << "\n";
        return 2;
      }
    }
  }
  for (int i = 0; i < entry->num_outputs; i++) {
    memory.push_back(aligned(entry->outputs[i].bytes));
    outputs.push_back(memory.back().get());
  }
  Buffer arena = aligned(entry->arena_bytes);

  tvmx_pool* pool = tvmx_pool_new(threads, nullptr);
  if (!pool) {
    std::cerr << "cannot start " << threads << " threads\n";
    return 1;
  }
  tvmx_call call = {};
  call.pool = pool;
  call.inputs = inputs.data();
  call.outputs = outputs.data();
  call.arena = arena.get();
  const auto begin = std::chrono::steady_clock::now();
  const int status = entry->run(&call);
  const auto end = std::chrono::steady_clock::now();
  if (status) {
    std::cerr << "node " << status - 1 << " failed: " << tvmx_last_error() << "\n";
    return 1;
  }
  for (int i = 0; i < entry->num_outputs; i++) {
    const tvmx_tensor_info& info = entry->outputs[i];
    std::ofstream("output_" + std::to_string(i) + ".bin", std::ios::binary)
        .write(static_cast<const char*>(outputs[i]), info.bytes);
    std::cout << info.name << ": " << info.dtype << ", " << info.bytes << " bytes\n";
  }
  std::cout << std::chrono::duration<double, std::milli>(end - begin).count() << " ms\n";
  tvmx_pool_free(pool);
  return 0;
}
