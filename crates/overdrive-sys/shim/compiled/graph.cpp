// CUDA graphs without a CUDA header and without linking libtorch_cuda.
//
// One binary serves CPU and GPU (startup.cpp), so the functions of `at::cuda::CUDAGraph` are looked up in
// the loaded library by their names in the Itanium ABI; streams use the device-generic guard.
// `cuda/graph_abi.cpp`, which the feature `cuda` compiles, checks this against libtorch's headers.
#include "../guard.h"
#include "../version.h"
#include "compiled.h"
#include "graph_abi.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <optional>

namespace {

using overdrive::GraphStorage;
using Pool = c10::MempoolId_t;
// A virtual function of `c10::cuda::CUDACachingAllocator::CUDAAllocator`.
using PoolFunction = void (*)(c10::DeviceAllocator*, c10::DeviceIndex, Pool);

struct Functions {
  void (*construct)(void*, bool);
  void (*destroy)(void*);
  void (*capture_begin)(void*, Pool, int);
  void (*capture_end)(void*);
  void (*replay)(void*);
  void (*reset)(void*);
  Pool (*pool)(void*);
  Pool (*new_pool)();
  // The indices of two virtual functions of libtorch's CUDA allocators.
  size_t end_allocate_to_pool;
  size_t release_pool;
};

template <class F>
void look_up(F& into, const char* name) {
  into = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
  TORCH_CHECK(into, "the loaded libtorch_cuda has no ", name,
              ": it is not the " TORCH_VERSION " that this program was built for");
}

// Returns the index of a virtual function. libtorch does not export its caching allocator's functions, but those of
// another subclass of the same interface, with the table in which they are found.
size_t virtual_index(const char* name) {
  void* const* table = nullptr;
  void* function = nullptr;
  look_up(table, overdrive::graph_names::allocator_table);
  look_up(function, name);
  table += overdrive::TABLE_HEAD;
  for (size_t index = 0; index < overdrive::MOST_VIRTUAL_FUNCTIONS; ++index) {
    if (table[index] == function) return index;
  }
  TORCH_CHECK(false, "the loaded libtorch_cuda has ", name, " in no table");
}

Functions find_functions() {
  Functions found{};
  look_up(found.construct, overdrive::graph_names::construct);
  look_up(found.destroy, overdrive::graph_names::destroy);
  look_up(found.capture_begin, overdrive::graph_names::capture_begin);
  look_up(found.capture_end, overdrive::graph_names::capture_end);
  look_up(found.replay, overdrive::graph_names::replay);
  look_up(found.reset, overdrive::graph_names::reset);
  look_up(found.pool, overdrive::graph_names::pool);
  look_up(found.new_pool, overdrive::graph_names::new_pool);
  found.end_allocate_to_pool = virtual_index(overdrive::graph_names::end_allocate_to_pool);
  found.release_pool = virtual_index(overdrive::graph_names::release_pool);
  return found;
}

const Functions& functions() {
  static const Functions found = find_functions();
  return found;
}

uint64_t reserved_bytes(c10::DeviceIndex index) {
  const auto stats = c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(index);
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<uint64_t>(stats.reserved_bytes[all].current);
}

// Returns true if `body` threw nothing.
template <class Body>
bool succeeds(Body&& body) noexcept {
  try {
    body();
    return true;
  } catch (...) {
    return false;
  }
}

void call_allocator(size_t index, c10::DeviceIndex device, Pool pool) {
  auto* allocator = c10::getDeviceAllocator(c10::kCUDA);
  auto* const* table = *reinterpret_cast<void* const* const*>(allocator);
  reinterpret_cast<PoolFunction>(table[index])(allocator, device, pool);
}

// Ends what `capture_begin` has begun and `capture_end` has not ended. Where CUDA has given up the capture,
// `capture_end` throws, in libtorch 2.11 before it tells the allocators, which would go on calling the filter of the
// graph and hold back every block that a second stream has used, and in 2.13 after it. libtorch's destructor frees
// neither pool in both. `begun` tells whether `capture_begin` has returned.
void end_pools(GraphStorage& storage, c10::DeviceIndex device, Pool pool, bool begun) noexcept {
  // The pool of a graph whose capture has ended belongs to libtorch's destructor.
  if (succeeds([&] { functions().pool(&storage); })) return;
  // Released only if this capture uses it: the pool may be that of another graph, which a second release would free.
  const auto close = [&](auto&& end, auto&& release) {
    if (succeeds(end) || begun) succeeds(release);
  };
  close([&] { call_allocator(functions().end_allocate_to_pool, device, pool); },
        [&] { call_allocator(functions().release_pool, device, pool); });
  // Pinned memory has pools of its own.
  close([&] { at::getHostAllocator(c10::kCUDA)->end_allocate_to_pool(pool); },
        [&] { at::getHostAllocator(c10::kCUDA)->release_pool(pool); });
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Captures an empty graph. The random generator of the device counts as captured until a capture ends without an
// error, and every random operator fails until then.
void end_generator(c10::DeviceIndex device) noexcept {
  succeeds([&] {
    Silent silent;  // libtorch warns that the graph is empty
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    GraphStorage storage;
    functions().construct(&storage, false);
    const auto pool = functions().new_pool();
    const bool begun = succeeds(
        [&] { functions().capture_begin(&storage, pool, overdrive::CAPTURE_MODE_GLOBAL); });
    const bool ended = begun && succeeds([&] { functions().capture_end(&storage); });
    if (!ended) end_pools(storage, device, pool, begun);
    functions().destroy(&storage);
  });
}

}  // namespace

struct od_graph {
  explicit od_graph(c10::Device on)
      : device(on), side(c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(on)) {
    functions().construct(&storage, false);
  }
  // libtorch's destructor waits for a running replay.
  ~od_graph() { functions().destroy(&storage); }
  od_graph(const od_graph&) = delete;
  od_graph& operator=(const od_graph&) = delete;

  // Makes the process usable again after a capture that failed, on the stream of the capture. `begun` is that of
  // `end_pools`.
  void recover(bool begun) noexcept {
    const bool ended = succeeds([&] { functions().pool(&storage); });
    end_pools(storage, device.index(), pool, begun);
    if (!ended) end_generator(device.index());
    succeeds([&] { functions().reset(&storage); });
    ready = false;
  }

  GraphStorage storage;
  c10::Device device;
  c10::Stream side;
  std::optional<c10::Stream> before;
  std::optional<c10::Device> device_before;
  Pool pool{0, 0};
  bool capturing = false;
  bool ready = false;
  uint64_t reserved_at_begin = 0;
};

extern "C" od_status* od_graph_symbols(void) noexcept {
  return overdrive::guard([] { functions(); });
}

extern "C" od_status* od_graph_new(int32_t device_index, od_graph** out) noexcept {
  return overdrive::guard([&] {
    if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) {
      throw overdrive::NotFound(
          "CUDA graphs need a CUDA device, and this libtorch has no CUDA back end");
    }
    const auto count = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
    if (device_index < 0 || device_index >= count) {
      throw overdrive::NotFound("CUDA graphs need a CUDA device: there is no device " +
                                std::to_string(device_index) + " among " + std::to_string(count));
    }
    *out = new od_graph(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_index)));
  });
}

extern "C" void od_graph_free(od_graph* graph) noexcept {
  try {
    delete graph;
  } catch (...) {
    // A free function cannot report an error.
  }
}

extern "C" od_status* od_graph_enter(od_graph* graph) noexcept {
  return overdrive::guard([&] {
    TORCH_CHECK(!graph->before, "the graph's stream is already current on this thread");
    const c10::impl::VirtualGuardImpl impl(c10::kCUDA);
    const auto device = impl.exchangeDevice(graph->device);
    try {
      // Waits for the whole device, because inputs may have been written on any stream; captures are rare.
      impl.synchronizeDevice(graph->device.index());
      graph->before = impl.exchangeStream(graph->side);
      graph->device_before = device;
    } catch (...) {
      impl.uncheckedSetDevice(device);
      throw;
    }
  });
}

extern "C" od_status* od_graph_leave(od_graph* graph) noexcept {
  return overdrive::guard([&] {
    if (!graph->before) return;
    const c10::impl::VirtualGuardImpl impl(c10::kCUDA);
    impl.exchangeStream(*graph->before);
    graph->before.reset();
    impl.uncheckedSetDevice(*graph->device_before);
    impl.synchronizeStream(graph->side);
  });
}

extern "C" od_status* od_graph_begin(od_graph* graph, const od_graph* pool_of) noexcept {
  return overdrive::guard([&] {
    const c10::impl::VirtualGuardImpl impl(c10::kCUDA);
    impl.synchronizeStream(graph->side);
    // Returns unused cached blocks to the device: the graph's pool cannot use them, and needs the memory.
    c10::getDeviceAllocator(c10::kCUDA)->emptyCache();
    graph->reserved_at_begin = reserved_bytes(graph->device.index());
    // Chosen here, because libtorch does not return the pool of a capture that failed.
    graph->pool = pool_of ? functions().pool(const_cast<GraphStorage*>(&pool_of->storage))
                          : functions().new_pool();
    try {
      functions().capture_begin(&graph->storage, graph->pool, overdrive::CAPTURE_MODE_GLOBAL);
    } catch (...) {
      graph->recover(/*begun=*/false);
      throw;
    }
    graph->capturing = true;
  });
}

extern "C" od_status* od_graph_end(od_graph* graph, uint64_t* pool_bytes) noexcept {
  return overdrive::guard([&] {
    graph->capturing = false;
    try {
      functions().capture_end(&graph->storage);
    } catch (...) {
      graph->recover(/*begun=*/true);
      throw;
    }
    const auto now = reserved_bytes(graph->device.index());
    *pool_bytes = now > graph->reserved_at_begin ? now - graph->reserved_at_begin : 0;
    graph->ready = true;
  });
}

extern "C" void od_graph_abort(od_graph* graph) noexcept {
  if (!graph->capturing) return;
  graph->capturing = false;
  // It throws if an operation that cannot be captured has ended the capture already.
  succeeds([&] { functions().capture_end(&graph->storage); });
  graph->recover(/*begun=*/true);
}

extern "C" od_status* od_graph_replay(od_graph* graph) noexcept {
  return overdrive::guard([&] {
    if (!graph->ready) throw overdrive::BadArgument("the graph holds no captured work");
    const c10::DeviceGuard on(graph->device);
    functions().replay(&graph->storage);
  });
}

extern "C" od_status* od_graph_synchronize(od_graph* graph) noexcept {
  return overdrive::guard([&] {
    c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(graph->device.index());
  });
}
