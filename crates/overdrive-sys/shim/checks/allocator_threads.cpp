// Uses the CPU allocator from many threads, for ThreadSanitizer and AddressSanitizer; see
// check_memory.sh. Prints nothing and returns 0 on success.
#include "../shim.h"
#include "../startup.h"

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

int main() {
  overdrive::install_cpu_allocator();
  auto* allocator = c10::GetAllocator(c10::DeviceType::CPU);
  std::atomic<int> wrong{0};
  std::vector<c10::DataPtr> handed_over(8);
  std::vector<std::thread> threads;
  for (int seed = 0; seed < 8; ++seed) {
    threads.emplace_back([&, seed] {
      std::vector<std::pair<c10::DataPtr, size_t>> kept;
      for (int step = 0; step < 5000; ++step) {
        // Every fiftieth is mapped from the kernel.
        const size_t most = step % 50 == 0 ? 6000000 : 300000;
        const size_t bytes = 1 + (static_cast<size_t>(seed) * 7919 + step * 104729u) % most;
        auto data = allocator->allocate(bytes);
        std::memset(data.get(), seed, bytes);
        kept.emplace_back(std::move(data), bytes);
        if (kept.size() > 12) {
          auto& [old, size] = kept[step % 12];
          auto* first = static_cast<unsigned char*>(old.get());
          if (first[0] != seed || first[size - 1] != seed) wrong = 1;
          std::swap(kept[step % 12], kept.back());
          kept.pop_back();
        }
        if (step % 1000 == 500) od_cpu_memory_empty_cache();
        if (step % 100 == 50) od_cpu_memory_count_scratch(1000);
        if (step % 100 == 60) od_cpu_memory_count_scratch(-1000);
        if (step % 700 == 0) od_cpu_memory_set_limit(uint64_t{1} << (step % 1400 == 0 ? 30 : 40));
        if (step % 100 == 0) {
          od_memory_stats stats;
          if (od_cpu_memory_stats(&stats) || stats.allocated > stats.reserved) wrong = 1;
        }
      }
      handed_over[seed] = std::move(kept.back().first);  // freed by another thread
    });
  }
  for (auto& thread : threads) thread.join();
  handed_over.clear();
  od_memory_stats stats;
  od_cpu_memory_stats(&stats);
  return wrong || stats.allocated != 0 || stats.scratch != 0;
}
