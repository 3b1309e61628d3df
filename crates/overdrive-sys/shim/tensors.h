// Conversions of the handles that come from Rust into tensors.
#pragma once

#include "shim.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace overdrive {

inline const at::Tensor& as_tensor(const void* handle) { return *static_cast<const at::Tensor*>(handle); }

// A null handle becomes an undefined tensor.
inline std::vector<at::Tensor> as_tensors(const od_tensor* handles, size_t len) {
  std::vector<at::Tensor> out;
  out.reserve(len);
  for (size_t k = 0; k < len; ++k) out.push_back(handles[k] ? as_tensor(handles[k]) : at::Tensor());
  return out;
}

}  // namespace overdrive
