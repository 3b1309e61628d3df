// The address of the elements of a CPU tensor. Kernels need it for every operand of every matrix product:
// this is one call, where tch needs five.
#include "guard.h"

#include <ATen/core/Tensor.h>

namespace {

// Returns true if every element of `self`, a strided tensor, lies in its storage. A tensor can be larger than
// its storage: another tensor that shares the storage may have shrunk it.
bool lies_in_storage(const at::Tensor& self) {
  if (self.numel() == 0) return true;
  uint64_t last = self.storage_offset();
  for (int64_t k = 0; k < self.dim(); ++k) {
    if (self.stride(k) < 0) return false;
    uint64_t reach = 0;
    if (__builtin_mul_overflow(static_cast<uint64_t>(self.size(k) - 1),
                               static_cast<uint64_t>(self.stride(k)), &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return last < self.storage().nbytes() / self.itemsize() && self.storage().data() != nullptr;
}

}  // namespace

extern "C" od_status* od_cpu_elements(od_tensor tensor, int64_t dtype, int32_t contiguous, void** data,
                                      int64_t* count) noexcept {
  return overdrive::guard([&] {
    const auto& self = *static_cast<const at::Tensor*>(tensor);
    *data = nullptr;
    if (self.layout() != at::kStrided) {
      *count = OD_SPARSE;
    } else if (!self.device().is_cpu() || self.scalar_type() != static_cast<at::ScalarType>(dtype) ||
               (contiguous && !self.is_contiguous())) {
      *count = OD_OTHER_KIND;
    } else if (self.is_neg() || self.is_conj()) {
      *count = OD_LAZY;  // the memory holds other values than the tensor
    } else if (!self.has_storage() || !lies_in_storage(self)) {
      *count = OD_NO_MEMORY;
    } else {
      *count = self.numel();
      *data = self.data_ptr();
    }
  });
}

extern "C" const void* od_data_address(od_tensor tensor) noexcept {
  const auto& self = *static_cast<const at::Tensor*>(tensor);
  if (!self.defined() || !self.has_storage() || !self.storage().data()) return nullptr;
  return static_cast<const char*>(self.storage().data()) + self.storage_offset() * self.itemsize();
}

extern "C" int32_t od_scalar_type(od_tensor tensor, size_t* bytes) noexcept {
  const auto& self = *static_cast<const at::Tensor*>(tensor);
  *bytes = self.defined() ? self.itemsize() : 0;
  return static_cast<int32_t>(self.scalar_type());
}

extern "C" const char* od_scalar_type_name(int32_t type) noexcept {
  return c10::toString(static_cast<at::ScalarType>(type));
}
