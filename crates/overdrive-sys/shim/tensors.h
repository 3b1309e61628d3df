// Conversions of the handles that come from Rust into tensors.
#pragma once

#include "shim.h"

#include <ATen/core/Tensor.h>

#include <sstream>
#include <string>
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

// Returns true if every element of a strided tensor lies in its storage. A tensor can be larger than its storage:
// another tensor that shares the storage may have shrunk it.
inline bool holds_elements(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  uint64_t last = tensor.storage_offset();
  for (int64_t k = 0; k < tensor.dim(); ++k) {
    if (tensor.stride(k) < 0) return false;
    uint64_t reach = 0;
    if (__builtin_mul_overflow(static_cast<uint64_t>(tensor.size(k) - 1),
                               static_cast<uint64_t>(tensor.stride(k)), &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return last < tensor.storage().nbytes() / tensor.itemsize();
}

// Returns the reason why code that computes addresses from the sizes of a tensor alone must not use it; empty
// if it may.
inline std::string unfit_for_addresses(const at::Tensor& tensor) {
  if (!tensor.defined()) return "is undefined";
  std::ostringstream text;
  if (tensor.layout() != at::kStrided) {
    text << "has the layout " << tensor.layout() << " and must be strided";
  } else if (!tensor.is_contiguous()) {
    text << "has shape " << tensor.sizes() << " and strides " << tensor.strides()
         << " and must be contiguous: call `contiguous()` first";
  } else if (tensor.is_conj() || tensor.is_neg()) {
    text << "is a conjugated or negated view: call `resolve_conj()` or `resolve_neg()` first";
  } else if (!holds_elements(tensor)) {
    text << "has shape " << tensor.sizes() << ", but its storage was resized to " << tensor.storage().nbytes()
         << " bytes";
  }
  return text.str();
}

}  // namespace overdrive
