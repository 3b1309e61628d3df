// A CPU allocator that counts, caches, and accepts a limit.
//
// Counts: "peak memory allocated" has the same meaning on a CPU as torch.cuda.max_memory_allocated has on a
// GPU. The resident set is no substitute: it contains libraries, caches, and memory that malloc retains.
//
// Caches: the activations of a training step are tens of megabytes each. malloc maps such blocks from the
// kernel and unmaps them every time, and the kernel zeroes every page again, which is a large part of a
// step's time on a CPU. Here a freed block stays in a free list of its size class for the next step.
//
// A block is a header of 64 bytes followed by the data, so that the data has the alignment that libtorch
// requires (64) and `data == context` holds, which `raw_allocate` checks.
#include "guard.h"
#include "startup.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr size_t HEADER = 64;
constexpr size_t HUGE_PAGE = size_t{2} << 20;
// Eight classes to each power of two: at most an eighth of a block is slack.
constexpr size_t CLASSES_PER_DOUBLING = 8;
constexpr size_t SMALLEST_SHIFT = 7;  // 128 bytes, header included
constexpr size_t CLASS_COUNT = CLASSES_PER_DOUBLING * (48 - SMALLEST_SHIFT);
// A cached block may be up to two classes too large, which is at most a quarter.
constexpr size_t CLASSES_TO_SEARCH = 3;
// Idle memory that is retained even in a program that never allocated much.
constexpr uint64_t IDLE_FLOOR = uint64_t{64} << 20;

struct alignas(HEADER) Block {
  Block* next;         // in the free list of its class
  uint64_t requested;  // bytes the tensor asked for
  uint64_t capacity;   // bytes of the block, header included
  size_t size_class;

  void* data() { return reinterpret_cast<char*>(this) + HEADER; }
  static Block* of(void* data) { return reinterpret_cast<Block*>(static_cast<char*>(data) - HEADER); }
};
static_assert(sizeof(Block) == HEADER, "the data must stay aligned to 64 bytes");

size_t class_of(uint64_t bytes) {
  if (bytes <= (uint64_t{1} << SMALLEST_SHIFT)) return 0;
  const size_t shift = 63 - __builtin_clzll(bytes - 1);  // 2^shift < bytes <= 2^(shift+1)
  const uint64_t base = uint64_t{1} << shift;
  const uint64_t step = base / CLASSES_PER_DOUBLING;
  const uint64_t within = (bytes - base + step - 1) / step;  // 1..=8
  return (shift - SMALLEST_SHIFT) * CLASSES_PER_DOUBLING + within;
}

uint64_t class_bytes(size_t index) {
  const uint64_t base = uint64_t{1} << (SMALLEST_SHIFT + index / CLASSES_PER_DOUBLING);
  return base + base / CLASSES_PER_DOUBLING * (index % CLASSES_PER_DOUBLING);
}

void* system_allocate(uint64_t bytes) {
  // Large blocks start on a huge page and ask for huge pages: fewer faults, fewer TLB misses.
  const bool huge = bytes >= 2 * HUGE_PAGE;
  void* memory = nullptr;
  if (posix_memalign(&memory, huge ? HUGE_PAGE : HEADER, bytes) != 0) return nullptr;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (huge) madvise(memory, bytes, MADV_HUGEPAGE);  // A hint: a failure has no effect.
#endif
  return memory;
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    Block* block = take(bytes);
    void* data = block->data();
    report(data, static_cast<int64_t>(bytes));
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }

  od_memory_stats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.peak_allocated = stats_.allocated;
    stats_.peak_reserved = stats_.reserved;
  }

  void set_limit(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
  }

  void set_caching(bool enabled) {
    std::lock_guard<std::mutex> lock(mutex_);
    caching_ = enabled;
    if (!enabled) shrink_idle_to(0);
  }

  void empty_cache() {
    std::lock_guard<std::mutex> lock(mutex_);
    shrink_idle_to(0);
  }

 private:
  static void release(void* data);

  Block* take(size_t bytes) {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < (uint64_t{1} << 47), "CPU out of memory: tried to allocate ",
                     bytes, " bytes");
    const size_t size_class = class_of(bytes + HEADER);
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(OutOfMemoryError, limit_ >= stats_.allocated && bytes <= limit_ - stats_.allocated,
                     "CPU out of memory: tried to allocate ", bytes, " bytes with ", stats_.allocated,
                     " bytes allocated and a limit of ", limit_,
                     " bytes set by overdrive_sys::memory::set_limit");
    Block* block = take_cached(size_class);
    if (!block) block = make(size_class);
    block->requested = bytes;
    stats_.allocated += bytes;
    stats_.allocations += 1;
    stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
    highest_allocated_ = std::max(highest_allocated_, stats_.allocated);
    return block;
  }

  Block* take_cached(size_t size_class) {
    const size_t end = std::min(size_class + CLASSES_TO_SEARCH, CLASS_COUNT);
    for (size_t index = size_class; index < end; ++index) {
      if (Block* block = idle_[index]) {
        idle_[index] = block->next;
        idle_bytes_ -= block->capacity;
        return block;
      }
    }
    return nullptr;
  }

  Block* make(size_t size_class) {
    const uint64_t capacity = class_bytes(size_class);
    void* memory = system_allocate(capacity);
    if (!memory) {
      shrink_idle_to(0);
      memory = system_allocate(capacity);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "CPU out of memory: the system refused ", capacity,
                     " bytes with ", stats_.allocated, " bytes allocated");
    stats_.reserved += capacity;
    stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
    return new (memory) Block{nullptr, 0, capacity, size_class};
  }

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.allocated -= block->requested;
    block->next = idle_[block->size_class];
    idle_[block->size_class] = block;
    idle_bytes_ += block->capacity;
    // Between two steps all blocks are idle, so the cache may grow to the maximum that was ever allocated.
    const uint64_t most = caching_ ? std::max(highest_allocated_ + highest_allocated_ / 8, IDLE_FLOOR) : 0;
    if (idle_bytes_ > most) shrink_idle_to(most);
  }

  // Returns idle blocks to the system, largest first, until no more than `bytes` are idle.
  void shrink_idle_to(uint64_t bytes) {
    for (size_t index = CLASS_COUNT; index-- > 0 && idle_bytes_ > bytes;) {
      while (idle_[index] && idle_bytes_ > bytes) {
        Block* block = idle_[index];
        idle_[index] = block->next;
        idle_bytes_ -= block->capacity;
        stats_.reserved -= block->capacity;
        std::free(block);
      }
    }
  }

  // Reports an allocation or a release to libtorch's profiler while it runs.
  void report(void* data, int64_t change) {
    if (!c10::memoryProfilingEnabled()) return;
    const od_memory_stats now = stats();
    c10::reportMemoryUsageToProfiler(data, change, now.allocated, now.reserved,
                                     c10::Device(c10::DeviceType::CPU));
  }

  std::mutex mutex_;
  std::array<Block*, CLASS_COUNT> idle_{};
  uint64_t idle_bytes_ = 0;
  uint64_t highest_allocated_ = 0;
  uint64_t limit_ = std::numeric_limits<uint64_t>::max();
  bool caching_ = true;
  od_memory_stats stats_{};
};

// Never destroyed: tensors in static storage are freed after every destructor has run.
CpuAllocator& allocator() {
  static auto* instance = new CpuAllocator;
  return *instance;
}

void CpuAllocator::release(void* data) {
  if (!data) return;
  Block* block = Block::of(data);
  allocator().report(data, -static_cast<int64_t>(block->requested));
  allocator().give_back(block);
}

}  // namespace

void overdrive::install_cpu_allocator() noexcept {
  const char* choice = std::getenv("OVERDRIVE_CPU_ALLOCATOR");
  if (choice && std::strcmp(choice, "libtorch") == 0) return;
  if (choice && std::strcmp(choice, "uncached") == 0) allocator().set_caching(false);
  c10::SetAllocator(c10::DeviceType::CPU, &allocator(), std::numeric_limits<uint8_t>::max());
}

extern "C" od_status* od_cpu_memory_stats(od_memory_stats* out) noexcept {
  return overdrive::guard([&] {
    TORCH_CHECK(c10::GetAllocator(c10::DeviceType::CPU) == &allocator(),
                "Overdrive's CPU allocator is not in place, so nothing is counted (is "
                "OVERDRIVE_CPU_ALLOCATOR=libtorch set?)");
    *out = allocator().stats();
  });
}

extern "C" od_status* od_cpu_memory_reset_peak(void) noexcept {
  return overdrive::guard([] { allocator().reset_peak(); });
}

extern "C" od_status* od_cpu_memory_empty_cache(void) noexcept {
  return overdrive::guard([] { allocator().empty_cache(); });
}

extern "C" od_status* od_cpu_memory_set_limit(uint64_t bytes) noexcept {
  return overdrive::guard([&] { allocator().set_limit(bytes); });
}

extern "C" od_status* od_cpu_memory_set_caching(int32_t enabled) noexcept {
  return overdrive::guard([&] { allocator().set_caching(enabled != 0); });
}
