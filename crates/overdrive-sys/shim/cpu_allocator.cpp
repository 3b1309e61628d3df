// A CPU allocator that counts, caches, and accepts a limit.
//
// Counts: "peak memory allocated" has the same meaning on a CPU as torch.cuda.max_memory_allocated has on a
// GPU. The resident set is no substitute: it contains libraries, caches, and memory that malloc retains.
//
// Caches: the activations of a training step are tens of megabytes each. malloc maps such blocks from the
// kernel and unmaps them every time, and the kernel zeroes every page again, which is a large part of a
// step's time on a CPU. Here a freed block stays in a free list of its size class for the next step.
//
// Gives back: reserved memory stays below a quarter more than the recent peak of the memory in use. The peak
// decays, so the memory of a phase that is over returns to the system.
//
// A block is a header of 64 bytes followed by the data, so that the data has the alignment that libtorch
// requires (64) and `data == context` holds, which `raw_allocate` checks.
#include "guard.h"
#include "startup.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
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
// After so many allocations the peak decays. A step of training, or one of its micro-batches, has fewer, so a
// loop that repeats its peak keeps all of its blocks.
constexpr uint64_t DECAY_ALLOCATIONS = uint64_t{1} << 16;
// Blocks of this size are mapped from the kernel. malloc would keep them: it raises the size from which it maps
// to that of the largest block that was freed, up to 32 MiB.
constexpr uint64_t MAPPED_FROM = uint64_t{128} << 10;
// Smaller ones of so many pages lie in such mappings too, since malloc's memory has no huge pages.
constexpr uint64_t CUT_FROM_PAGES = 4;
// The memory that is mapped for blocks of less than two huge pages.
constexpr uint64_t MAPPED_AT_ONCE = uint64_t{32} << 20;

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

#ifdef __linux__
uint64_t page_size() {
  static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return page;
}

// Returns the size from which blocks are cut out of mappings.
uint64_t cut_from() { return std::min(CUT_FROM_PAGES * page_size(), MAPPED_FROM); }

uint64_t whole_pages(uint64_t bytes) { return (bytes + page_size() - 1) / page_size() * page_size(); }

char* first_page_from(char* address) { return address + -reinterpret_cast<uintptr_t>(address) % page_size(); }

char* last_page_until(char* address) { return address - reinterpret_cast<uintptr_t>(address) % page_size(); }

// Maps memory that starts on a huge page and asks for huge pages: fewer faults, fewer TLB misses.
char* map_huge_pages(uint64_t bytes) {
  void* mapped = mmap(nullptr, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const uint64_t before = -reinterpret_cast<uintptr_t>(mapped) % HUGE_PAGE;
  char* start = static_cast<char*>(mapped) + before;
  if (before > 0) munmap(mapped, before);
  munmap(start + bytes, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
  madvise(start, bytes, MADV_HUGEPAGE);  // A hint: a failure has no effect.
#endif
  return start;
}

// Cuts blocks that are smaller than huge pages out of mappings that have them. The caller holds the allocator's
// lock.
class Cutter {
 public:
  char* cut(uint64_t bytes) {
    if (bytes >= MAPPED_FROM) {
      // Whole pages, which are unmapped when the block is released.
      next_ = first_page_from(next_);
      bytes = whole_pages(bytes);
    } else if (Block* block = vacated_[class_of(bytes)]) {
      vacated_[class_of(bytes)] = block->next;
      return reinterpret_cast<char*>(block);
    }
    if (static_cast<uint64_t>(end_ - next_) < bytes) {
      char* mapped = map_huge_pages(MAPPED_AT_ONCE);
      if (!mapped) return nullptr;
      next_ = first_page_from(next_);
      if (next_ < end_) munmap(next_, end_ - next_);
      next_ = mapped;
      end_ = mapped + MAPPED_AT_ONCE;
    }
    char* block = next_;
    next_ += bytes;
    return block;
  }

  // Returns the pages of a block of less than MAPPED_FROM bytes to the system, and keeps its addresses for the
  // next one: with a hole for each small block a process would soon have as many mappings as Linux allows
  // (65,530).
  void vacate(void* memory, uint64_t bytes) {
    auto* block = static_cast<Block*>(memory);
    char* address = static_cast<char*>(memory);
    char* first = first_page_from(address + HEADER);
    madvise(first, last_page_until(address + bytes) - first, MADV_DONTNEED);
    block->next = vacated_[class_of(bytes)];
    vacated_[class_of(bytes)] = block;
  }

 private:
  char* next_ = nullptr;
  char* end_ = nullptr;
  std::array<Block*, CLASS_COUNT> vacated_{};
};

Cutter& cutter() {
  static Cutter instance;
  return instance;
}
#endif

void* system_allocate(uint64_t bytes) {
#ifdef __linux__
  if (bytes >= 2 * HUGE_PAGE) return map_huge_pages(whole_pages(bytes));
  if (bytes >= cut_from()) return cutter().cut(bytes);
#endif
  void* memory = nullptr;
  return posix_memalign(&memory, HEADER, bytes) == 0 ? memory : nullptr;
}

void system_release(void* memory, uint64_t bytes) {
#ifdef __linux__
  if (bytes >= MAPPED_FROM) {
    munmap(memory, whole_pages(bytes));
    return;
  }
  if (bytes >= cut_from()) return cutter().vacate(memory, bytes);
#endif
  std::free(memory);
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
    shrink_idle_to(room_below_limit(0));
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

  // Counts memory that a kernel keeps outside of this allocator.
  void count_scratch(int64_t change) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.scratch += static_cast<uint64_t>(change);
    count_reserved(change);
    shrink_idle_to(room_below_limit(0));
  }

 private:
  static void release(void* data);

  Block* take(size_t bytes) {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes < (uint64_t{1} << 47), "CPU out of memory: tried to allocate ",
                     bytes, " bytes");
    const size_t size_class = class_of(bytes + HEADER);
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t held = stats_.allocated + stats_.scratch;
    TORCH_CHECK_WITH(OutOfMemoryError, limit_ >= held && bytes <= limit_ - held,
                     "CPU out of memory: tried to allocate ", bytes, " bytes with ", stats_.allocated,
                     " bytes allocated, ", stats_.scratch, " bytes in the scratch of kernels and a limit of ",
                     limit_, " bytes set by overdrive_sys::memory::set_limit");
    Block* block = take_cached(size_class);
    if (!block) block = make(size_class);
    block->requested = bytes;
    in_use_ += block->capacity;
    stats_.allocated += bytes;
    stats_.allocations += 1;
    stats_.peak_allocated = std::max(stats_.peak_allocated, stats_.allocated);
    recent_peak_ = std::max(recent_peak_, in_use_);
    latest_peak_ = std::max(latest_peak_, in_use_);
    if (stats_.allocations % DECAY_ALLOCATIONS == 0) decay();
    return block;
  }

  Block* take_cached(size_t size_class) {
    const size_t end = std::min(size_class + CLASSES_TO_SEARCH, CLASS_COUNT);
    for (size_t index = size_class; index < end; ++index) {
      if (idle_[index]) return pop_idle(index);
    }
    return nullptr;
  }

  Block* make(size_t size_class) {
    const uint64_t capacity = class_bytes(size_class);
    // Before the system is asked, so that the bound and the limit hold at every moment.
    shrink_idle_to(std::min(most_idle(in_use_ + capacity), room_below_limit(capacity)));
    void* memory = system_allocate(capacity);
    if (!memory) {
      shrink_idle_to(0);
      memory = system_allocate(capacity);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "CPU out of memory: the system refused ", capacity,
                     " bytes with ", stats_.allocated, " bytes allocated");
    stats_.system_allocations += 1;
    count_reserved(static_cast<int64_t>(capacity));
    return new (memory) Block{nullptr, 0, capacity, size_class};
  }

  void give_back(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.allocated -= block->requested;
    in_use_ -= block->capacity;
    block->next = idle_[block->size_class];
    idle_[block->size_class] = block;
    idle_bytes_ += block->capacity;
    shrink_idle_to(std::min(most_idle(in_use_), room_below_limit(0)));
  }

  // Returns how many bytes may be idle while `in_use` are in use: between two steps all blocks are idle, so as
  // many as the recent peak, and a quarter of it for blocks of sizes that are not in use at the same time.
  uint64_t most_idle(uint64_t in_use) const {
    if (!caching_) return 0;
    const uint64_t peak = std::max(recent_peak_, in_use);
    return std::max(peak + peak / 4 - in_use, IDLE_FLOOR);
  }

  // Returns how many bytes may be idle below the limit beside what is in use and `more`.
  uint64_t room_below_limit(uint64_t more) const {
    const uint64_t held = in_use_ + stats_.scratch + more;
    return limit_ > held ? limit_ - held : 0;
  }

  void decay() {
    recent_peak_ = std::max(latest_peak_, recent_peak_ - recent_peak_ / 4);
    latest_peak_ = in_use_;
    shrink_idle_to(most_idle(in_use_));
  }

  // Returns idle blocks to the system until no more than `bytes` are idle: the smallest that is enough, so that
  // as little as possible has to be taken again, else the largest.
  void shrink_idle_to(uint64_t bytes) {
    while (idle_bytes_ > bytes) {
      const size_t wanted = std::min(class_of(idle_bytes_ - bytes), CLASS_COUNT);
      size_t index = wanted;
      while (index < CLASS_COUNT && !idle_[index]) ++index;
      if (index == CLASS_COUNT) {
        index = wanted - 1;
        while (!idle_[index]) --index;
      }
      Block* block = pop_idle(index);
      const uint64_t capacity = block->capacity;
      stats_.system_releases += 1;
      count_reserved(-static_cast<int64_t>(capacity));
      system_release(block, capacity);
    }
  }

  Block* pop_idle(size_t index) {
    Block* block = idle_[index];
    idle_[index] = block->next;
    idle_bytes_ -= block->capacity;
    return block;
  }

  void count_reserved(int64_t change) {
    stats_.reserved += static_cast<uint64_t>(change);
    stats_.peak_reserved = std::max(stats_.peak_reserved, stats_.reserved);
  }

  // Reports an allocation, or a release that is not counted yet, to libtorch's profiler while it runs.
  void report(void* data, int64_t change) {
    if (!c10::memoryProfilingEnabled()) return;
    const od_memory_stats now = stats();
    const uint64_t allocated = now.allocated + static_cast<uint64_t>(std::min<int64_t>(change, 0));
    c10::reportMemoryUsageToProfiler(data, change, allocated, now.reserved,
                                     c10::Device(c10::DeviceType::CPU));
  }

  std::mutex mutex_;
  std::array<Block*, CLASS_COUNT> idle_{};
  uint64_t idle_bytes_ = 0;
  // The bytes of the blocks of live tensors, their highest value as it decays, and the highest since it last did.
  uint64_t in_use_ = 0;
  uint64_t recent_peak_ = 0;
  uint64_t latest_peak_ = 0;
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
  // First, since afterwards the block may serve another thread, whose report must follow.
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

extern "C" void od_cpu_memory_count_scratch(int64_t change) noexcept {
  allocator().count_scratch(change);
}

extern "C" od_status* od_cpu_memory_set_caching(int32_t enabled) noexcept {
  return overdrive::guard([&] { allocator().set_caching(enabled != 0); });
}
