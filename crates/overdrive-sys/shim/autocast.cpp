// The autocast state of any device type. It is thread-local in libtorch.
#include "guard.h"

#include <ATen/autocast_mode.h>

namespace {
at::DeviceType device(int32_t type) { return static_cast<at::DeviceType>(type); }
}  // namespace

extern "C" od_status* od_autocast_get(int32_t device_type, int32_t* enabled, int32_t* dtype) noexcept {
  return overdrive::guard([&] {
    const bool on = at::autocast::is_autocast_enabled(device(device_type));
    *dtype = static_cast<int32_t>(at::autocast::get_autocast_dtype(device(device_type)));
    *enabled = on;
  });
}

extern "C" od_status* od_autocast_set(int32_t device_type, int32_t enabled, int32_t dtype) noexcept {
  return overdrive::guard([&] {
    at::autocast::set_autocast_dtype(device(device_type), static_cast<at::ScalarType>(dtype));
    at::autocast::set_autocast_enabled(device(device_type), enabled != 0);
  });
}

extern "C" od_status* od_autocast_cache_get(int32_t* enabled) noexcept {
  return overdrive::guard([&] { *enabled = at::autocast::is_autocast_cache_enabled(); });
}

extern "C" od_status* od_autocast_cache_set(int32_t enabled) noexcept {
  return overdrive::guard([&] { at::autocast::set_autocast_cache_enabled(enabled != 0); });
}

extern "C" od_status* od_autocast_cache_clear(void) noexcept {
  return overdrive::guard([] { at::autocast::clear_cache(); });
}

extern "C" od_status* od_autocast_nesting(int32_t delta, int32_t* depth) noexcept {
  return overdrive::guard([&] {
    *depth = delta > 0 ? at::autocast::increment_nesting() : at::autocast::decrement_nesting();
  });
}
