// CUDA graphs without a CUDA header and without linking libtorch_cuda.
//
// One binary serves CPU and GPU (startup.cpp), so the functions of `at::cuda::CUDAGraph` are looked up in
// the loaded library by their names in the Itanium ABI; streams use the device-generic guard.
// `cuda/graph_abi.cpp`, which the feature `cuda` compiles, checks this against libtorch's headers.
#include "../guard.h"
#include "compiled.h"
#include "graph_abi.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <optional>

namespace {

using overdrive::GraphStorage;
using Pool = std::pair<unsigned long long, unsigned long long>;

struct Functions {
  void (*construct)(void*, bool);
  void (*destroy)(void*);
  void (*capture_begin)(void*, Pool, int);
  void (*capture_end)(void*);
  void (*replay)(void*);
  void (*reset)(void*);
  Pool (*pool)(void*);
};

template <class F>
void look_up(F& into, const char* name) {
  into = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
  TORCH_CHECK(into, "the loaded libtorch_cuda has no ", name,
              ": it is not the 2.11 that this program was built for");
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

  GraphStorage storage;
  c10::Device device;
  c10::Stream side;
  std::optional<c10::Stream> before;
  std::optional<c10::Device> device_before;
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
    Pool pool{0, 0};
    if (pool_of) pool = functions().pool(const_cast<GraphStorage*>(&pool_of->storage));
    functions().capture_begin(&graph->storage, pool, overdrive::CAPTURE_MODE_GLOBAL);
    graph->capturing = true;
  });
}

extern "C" od_status* od_graph_end(od_graph* graph, uint64_t* pool_bytes) noexcept {
  return overdrive::guard([&] {
    graph->capturing = false;
    functions().capture_end(&graph->storage);
    const auto now = reserved_bytes(graph->device.index());
    *pool_bytes = now > graph->reserved_at_begin ? now - graph->reserved_at_begin : 0;
    graph->ready = true;
  });
}

extern "C" void od_graph_abort(od_graph* graph) noexcept {
  if (!graph->capturing) return;
  graph->capturing = false;
  try {
    functions().capture_end(&graph->storage);
  } catch (...) {
    // An operation that cannot be captured has already ended the capture; this only clears libtorch's state.
  }
  try {
    functions().reset(&graph->storage);
  } catch (...) {
  }
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
