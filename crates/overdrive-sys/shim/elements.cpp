// The address of the elements of a CPU tensor. Kernels need it for every operand of every matrix product:
// this is one call, where tch needs five.
#include "guard.h"
#include "tensors.h"

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
    } else if (!self.has_storage() || !overdrive::holds_elements(self) ||
               (self.numel() > 0 && !self.storage().data())) {
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

// The handles are storages themselves: a kernel that asks for an address reads no more than one.
extern "C" od_memory* od_memory_of(od_tensor tensor) noexcept {
  auto* storage = static_cast<const at::Tensor*>(tensor)->storage().unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(storage);
  return reinterpret_cast<od_memory*>(storage);
}

extern "C" void od_memory_free(od_memory* memory) noexcept {
  c10::raw::intrusive_ptr::decref(reinterpret_cast<c10::StorageImpl*>(memory));
}

extern "C" const void* od_memory_address(const od_memory* memory, size_t* bytes) noexcept {
  const auto* storage = reinterpret_cast<const c10::StorageImpl*>(memory);
  try {
    *bytes = storage->nbytes();
    return storage->data();
  } catch (...) {  // a storage of symbols
    *bytes = 0;
    return nullptr;
  }
}

extern "C" int32_t od_scalar_type(od_tensor tensor, size_t* bytes) noexcept {
  const auto& self = *static_cast<const at::Tensor*>(tensor);
  *bytes = self.defined() ? self.itemsize() : 0;
  return static_cast<int32_t>(self.scalar_type());
}

extern "C" const char* od_scalar_type_name(int32_t type) noexcept {
  return c10::toString(static_cast<at::ScalarType>(type));
}
