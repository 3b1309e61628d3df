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

// Returns true if the storage of a strided tensor reaches to its last element: it may have been resized.
inline bool holds_elements(const at::Tensor& tensor) {
  int64_t end = tensor.numel() == 0 ? 0 : tensor.storage_offset() + 1;
  for (int64_t k = 0; tensor.numel() > 0 && k < tensor.dim(); ++k) end += (tensor.size(k) - 1) * tensor.stride(k);
  return static_cast<size_t>(end) * tensor.itemsize() <= tensor.storage().nbytes();
}

// Returns why code that computes addresses from the sizes of a tensor alone must not get it; empty if it may.
inline std::string unfit_for_addresses(const at::Tensor& tensor) {
  if (!tensor.defined()) return "is undefined";
  std::ostringstream text;
  if (tensor.layout() != at::kStrided) {
    text << "has the layout " << tensor.layout() << " and must be strided";
  } else if (!tensor.is_contiguous()) {
    text << "has shape " << tensor.sizes() << " and strides " << tensor.strides()
         << " and must be contiguous: pass `contiguous()` of it";
  } else if (tensor.is_conj() || tensor.is_neg()) {
    text << "is a conjugated or negated view: pass `resolve_conj()` or `resolve_neg()` of it";
  } else if (!holds_elements(tensor)) {
    text << "has shape " << tensor.sizes() << ", but its storage was resized to " << tensor.storage().nbytes()
         << " bytes";
  }
  return text.str();
}

}  // namespace overdrive
