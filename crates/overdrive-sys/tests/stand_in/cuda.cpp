// A stand-in for libtorch_cuda, so that captures can fail on a machine without a GPU: the names that graph.cpp looks
// up, with the bookkeeping of libtorch's graphs, allocators and generators, and no device.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <set>
#include <stdexcept>

using Pool = c10::MempoolId_t;

enum cudaStreamCaptureMode { global_mode = 0 };

namespace {

bool invalidated = false;
bool refuses_to_begin = false;
// Whether the end of an invalidated capture throws after it has told the allocators, as in libtorch 2.13, or before, as
// in 2.11.
bool tells_allocators_first = false;
bool generator_is_captured = false;
unsigned long long last_pool = 0;
int replays = 0;

// What an allocator knows of captures.
struct Book {
  void begin(Pool pool) {
    ++uses[pool];
    if (!recording.insert(pool).second) throw std::runtime_error("already recording to the pool");
  }
  void end(Pool pool) {
    if (recording.erase(pool) == 0) throw std::runtime_error("not currently recording to the pool");
  }
  void release(Pool pool) {
    if (uses.count(pool) == 0 || uses[pool] == 0) throw std::runtime_error("released once too often");
    if (--uses[pool] == 0) uses.erase(pool);
  }
  std::set<Pool> recording;
  std::map<Pool, int> uses;
};

Book on_device, on_host;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(1); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(0); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  c10::Stream stream(c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, getDevice(), id); }
};

// The interface of the CUDA allocators, with another function before those that graph.cpp finds.
struct Interface : c10::DeviceAllocator {
  virtual void another() = 0;
  virtual void endAllocateToPool(c10::DeviceIndex, Pool) = 0;
  virtual void releasePool(c10::DeviceIndex, Pool) = 0;

  c10::DataPtr allocate(size_t) override { throw std::runtime_error("a stand-in has no memory"); }
  void copy_data(void*, const void*, size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(Pool) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

struct Caching final : Interface {
  void another() override {}
  void endAllocateToPool(c10::DeviceIndex, Pool pool) override { on_device.end(pool); }
  void releasePool(c10::DeviceIndex, Pool pool) override { on_device.release(pool); }
};

struct Host final : at::HostAllocator {
  c10::DataPtr allocate(size_t) override { throw std::runtime_error("a stand-in has no memory"); }
  void copy_data(void*, const void*, size_t) const override {}
  bool record_event(void*, void*, c10::Stream) override { return false; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void begin_allocate_to_pool(Pool pool, std::function<bool(c10::Stream)>) override { on_host.begin(pool); }
  void end_allocate_to_pool(Pool pool) override { on_host.end(pool); }
  void release_pool(Pool pool) override { on_host.release(pool); }
};

Caching caching;
Host host;
const Guard guard;

}  // namespace

namespace at::cuda {

struct CUDAGraph {
  CUDAGraph(bool);
  ~CUDAGraph();
  void capture_begin(Pool, cudaStreamCaptureMode);
  void capture_end();
  void replay();
  void reset();
  Pool pool();

  Pool used{0, 0};
  bool ended = false;
};

Pool graph_pool_handle();

CUDAGraph::CUDAGraph(bool) {}
CUDAGraph::~CUDAGraph() { reset(); }

void CUDAGraph::capture_begin(Pool pool, cudaStreamCaptureMode) {
  if (ended) throw std::runtime_error("this graph already owns a capture");
  used = pool;
  generator_is_captured = true;
  on_device.begin(pool);
  on_host.begin(pool);
  if (refuses_to_begin) {
    refuses_to_begin = false;
    throw std::runtime_error("the stream does not begin");
  }
}

void CUDAGraph::capture_end() {
  const bool failed = invalidated;
  invalidated = false;
  if (!failed || tells_allocators_first) {
    on_device.end(used);
    on_host.end(used);
  }
  if (failed) throw std::runtime_error("operation failed due to a previous error during capture");
  generator_is_captured = false;
  ended = true;
}

void CUDAGraph::replay() {
  if (!ended) throw std::runtime_error("without a preceding successful capture");
  ++replays;
}

void CUDAGraph::reset() {
  if (ended) {
    on_device.release(used);
    on_host.release(used);
    ended = false;
  }
}

Pool CUDAGraph::pool() {
  if (!ended) throw std::runtime_error("without a preceding successful capture");
  return used;
}

Pool graph_pool_handle() { return {0, ++last_pool}; }

}  // namespace at::cuda

namespace torch::cuda::CUDAPluggableAllocator {

// Exported with its table, as libtorch does.
struct CUDAPluggableAllocator : Interface {
  void another() override;
  void endAllocateToPool(c10::DeviceIndex, Pool) override;
  void releasePool(c10::DeviceIndex, Pool) override;
};

void CUDAPluggableAllocator::another() {}
void CUDAPluggableAllocator::endAllocateToPool(c10::DeviceIndex, Pool) {}
void CUDAPluggableAllocator::releasePool(c10::DeviceIndex, Pool) {}

}  // namespace torch::cuda::CUDAPluggableAllocator

// The functions that the test calls.
extern "C" void stand_in_install() {
  c10::impl::registerDeviceGuard(c10::kCUDA, &guard);
  c10::SetAllocator(c10::kCUDA, &caching);
  at::setHostAllocator(c10::kCUDA, &host);
}
extern "C" void stand_in_invalidate() { invalidated = true; }
extern "C" void stand_in_tell_allocators_first() { tells_allocators_first = true; }
extern "C" void stand_in_refuse_to_begin() { refuses_to_begin = true; }
extern "C" int stand_in_generator_is_captured() { return generator_is_captured; }
extern "C" int stand_in_recording() {
  return static_cast<int>(on_device.recording.size() + on_host.recording.size());
}
extern "C" int stand_in_pools() { return static_cast<int>(on_device.uses.size() + on_host.uses.size()); }
extern "C" int stand_in_replays() { return replays; }
