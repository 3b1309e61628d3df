// The address of the elements of a CPU tensor. Kernels need it for every operand of every matrix product:
// this is one call, where tch needs five.
#include "guard.h"

#include <ATen/core/Tensor.h>

extern "C" od_status* od_cpu_elements(od_tensor tensor, int64_t dtype, void** data,
                                      int64_t* count) noexcept {
  return overdrive::guard([&] {
    const auto& self = *static_cast<const at::Tensor*>(tensor);
    const bool strided = self.layout() == at::kStrided;
    const bool fits = strided && self.device().is_cpu() &&
                      self.scalar_type() == static_cast<at::ScalarType>(dtype) &&
                      self.is_contiguous();
    *count = fits ? self.numel() : strided ? -1 : -2;
    *data = fits ? self.data_ptr() : nullptr;
  });
}
