// Allocator statistics of any accelerator. The device-generic interface needs no CUDA headers.
#include "guard.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>

namespace {

at::DeviceAllocator* allocator(int32_t device_type) {
  const auto type = static_cast<c10::DeviceType>(device_type);
  TORCH_CHECK(c10::GetAllocator(type) != nullptr, "no ", type, " back end is loaded");
  auto* found = c10::getDeviceAllocator(type);
  TORCH_CHECK(found->initialized(), "the ", type,
              " allocator is not initialized: no tensor was created on that device yet");
  return found;
}

}  // namespace

extern "C" od_status* od_device_memory_stats(int32_t device_type, int32_t index,
                                             od_memory_stats* out) noexcept {
  return overdrive::guard([&] {
    const auto stats = allocator(device_type)->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    *out = od_memory_stats{
        static_cast<uint64_t>(stats.allocated_bytes[all].current),
        static_cast<uint64_t>(stats.allocated_bytes[all].peak),
        static_cast<uint64_t>(stats.reserved_bytes[all].current),
        static_cast<uint64_t>(stats.reserved_bytes[all].peak),
        static_cast<uint64_t>(stats.allocation[all].allocated),
        static_cast<uint64_t>(stats.num_device_alloc),
        static_cast<uint64_t>(stats.num_device_free),
        0,
    };
  });
}

extern "C" od_status* od_device_memory_reset_peak(int32_t device_type, int32_t index) noexcept {
  return overdrive::guard([&] {
    allocator(device_type)->resetPeakStats(static_cast<c10::DeviceIndex>(index));
  });
}

extern "C" od_status* od_device_memory_empty_cache(int32_t device_type) noexcept {
  return overdrive::guard([&] { allocator(device_type)->emptyCache(); });
}

extern "C" od_status* od_device_memory_free(int32_t device_type, int32_t index, uint64_t* bytes) noexcept {
  return overdrive::guard([&] {
    const auto device = static_cast<c10::DeviceIndex>(index);
    auto* of_type = allocator(device_type);
    const auto stats = of_type->getDeviceStats(device);
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto unused = stats.reserved_bytes[all].current - stats.allocated_bytes[all].current;
    *bytes = of_type->getMemoryInfo(device).first + static_cast<uint64_t>(std::max<int64_t>(unused, 0));
  });
}
