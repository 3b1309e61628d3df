// Process-wide settings of libtorch (TF32, the precision of matrix products), its version and CPU capability.
#include "guard.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <torch/csrc/api/include/torch/version.h>

extern "C" od_status* od_matmul_precision_set(const char* precision) noexcept {
  return overdrive::guard([&] { at::globalContext().setFloat32MatmulPrecision(precision); });
}

extern "C" od_status* od_matmul_precision_get(int32_t* precision) noexcept {
  return overdrive::guard([&] {
    *precision = static_cast<int32_t>(at::globalContext().float32MatmulPrecision());
  });
}

extern "C" od_status* od_tf32_get(int32_t* matmul, int32_t* cudnn) noexcept {
  return overdrive::guard([&] {
    const bool blas = at::globalContext().allowTF32CuBLAS();
    *cudnn = at::globalContext().allowTF32CuDNN();
    *matmul = blas;
  });
}

extern "C" od_status* od_tf32_set(int32_t matmul, int32_t cudnn) noexcept {
  return overdrive::guard([&] {
    at::globalContext().setAllowTF32CuBLAS(matmul != 0);
    at::globalContext().setAllowTF32CuDNN(cudnn != 0);
  });
}

extern "C" od_status* od_cpu_capability(char** out) noexcept {
  return overdrive::guard([&] { *out = overdrive::copy_string(at::get_cpu_capability()); });
}

extern "C" od_status* od_cudnn_version(int64_t* out) noexcept {
  return overdrive::guard([&] { *out = at::detail::getCUDAHooks().versionRuntimeCuDNN(); });
}

extern "C" od_status* od_libtorch_version(char** out) noexcept {
  return overdrive::guard([&] { *out = overdrive::copy_string(TORCH_VERSION); });
}
