// Matrix products by oneDNN, which libtorch contains but uses for fp32 only in its packed layouts.
#include "guard.h"

#include <ATen/Config.h>
#include <ATen/core/Tensor.h>

namespace at::native {
// libtorch_cpu exports this function, but its header is not installed: result = beta·result +
// alpha·mat1·mat2. In a libtorch without oneDNN the function exists too, and throws.
TORCH_API void mkldnn_matmul(const Tensor& mat1, const Tensor& mat2, const Tensor& result, float beta,
                             float alpha);
}  // namespace at::native

extern "C" int32_t od_onednn_available(void) noexcept { return AT_MKLDNN_ENABLED(); }

extern "C" od_status* od_onednn_matmul(od_tensor left, od_tensor right, od_tensor out, float beta,
                                       float alpha) noexcept {
  return overdrive::guard([&] {
    at::native::mkldnn_matmul(*static_cast<const at::Tensor*>(left),
                              *static_cast<const at::Tensor*>(right),
                              *static_cast<const at::Tensor*>(out), beta, alpha);
  });
}
