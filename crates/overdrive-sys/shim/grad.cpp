// The setter of `tensor.grad`, which tch does not have.
#include "guard.h"

#include <ATen/core/Tensor.h>

extern "C" od_status* od_grad_set(od_tensor tensor, od_tensor grad_or_null) noexcept {
  return overdrive::guard([&] {
    auto& target = *static_cast<at::Tensor*>(tensor);
    if (!grad_or_null) {
      // Reading `grad()` first avoids allocating autograd metadata for a tensor that never had a gradient.
      if (target.grad().defined()) target.mutable_grad() = at::Tensor();
      return;
    }
    const auto& grad = *static_cast<at::Tensor*>(grad_or_null);
    TORCH_CHECK(grad.sizes() == target.sizes(), "a gradient of shape ", grad.sizes(),
                " for a tensor of shape ", target.sizes());
    TORCH_CHECK(grad.scalar_type() == target.scalar_type(), "a gradient of type ",
                grad.scalar_type(), " for a tensor of type ", target.scalar_type());
    TORCH_CHECK(grad.device() == target.device(), "a gradient on ", grad.device(),
                " for a tensor on ", target.device());
    target.mutable_grad() = grad;
  });
}
