// Copies from memory that no tensor owns.
#include "guard.h"
#include "tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

extern "C" od_status* od_copy_elements(const void* data, size_t len, int64_t dtype, od_tensor to) noexcept {
  return overdrive::guard([&] {
    const auto& target = overdrive::as_tensor(to);
    const auto type = static_cast<at::ScalarType>(dtype);
    if (static_cast<size_t>(target.numel()) * c10::elementSize(type) != len) {
      throw overdrive::BadArgument("a tensor of " + std::to_string(target.numel()) + " elements is not the target of " +
                                   std::to_string(len) + " bytes of " + c10::toString(type));
    }
    const at::NoGradGuard no_grad;
    // A mode could keep a handle to the borrowed tensor, which would dangle when its memory is gone.
    const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKey::Fake);
    const auto borrowed = at::from_blob(const_cast<void*>(data), target.sizes(), at::dtype(type));
    target.copy_(borrowed);
  });
}
