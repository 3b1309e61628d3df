// The backward pass with all its options, grad and inference mode, and random states.
#include "callback.h"
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

namespace {

using overdrive::as_tensors;

const at::Generator& generator(int32_t device_type, int32_t index) {
  const at::Device device(static_cast<c10::DeviceType>(device_type),
                          static_cast<c10::DeviceIndex>(index));
  if (!device.is_cpu()) at::globalContext().lazyInitDevice(device.type());
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

// The engine takes an undefined gradient of a scalar output as ones.
extern "C" od_status* od_backward(const od_tensor* outputs, const od_tensor* gradients, size_t n,
                                  const od_tensor* inputs, size_t n_inputs, int32_t retain_graph,
                                  int32_t create_graph) noexcept {
  return overdrive::guard([&] {
    torch::autograd::backward(as_tensors(outputs, n), as_tensors(gradients, n), retain_graph != 0,
                              create_graph != 0, as_tensors(inputs, n_inputs));
  });
}

extern "C" od_status* od_grad(const od_tensor* outputs, const od_tensor* gradients, size_t n,
                              const od_tensor* inputs, size_t n_inputs, int32_t retain_graph,
                              int32_t create_graph, int32_t allow_unused, od_tensor* out) noexcept {
  return overdrive::guard([&] {
    auto found = torch::autograd::grad(as_tensors(outputs, n), as_tensors(inputs, n_inputs),
                                       as_tensors(gradients, n), retain_graph != 0, create_graph != 0,
                                       allow_unused != 0);
    for (size_t k = 0; k < found.size(); ++k) {
      out[k] = found[k].defined() ? new at::Tensor(std::move(found[k])) : nullptr;
    }
  });
}

extern "C" int32_t od_grad_mode_get(void) noexcept { return at::GradMode::is_enabled(); }

extern "C" void od_grad_mode_set(int32_t enabled) noexcept { at::GradMode::set_enabled(enabled != 0); }

extern "C" od_status* od_inference_mode_enter(int32_t enabled, void** out) noexcept {
  return overdrive::guard([&] { *out = new c10::InferenceMode(enabled != 0); });
}

extern "C" void od_inference_mode_exit(void* guard) noexcept {
  delete static_cast<c10::InferenceMode*>(guard);
}

extern "C" int32_t od_inference_mode_get(void) noexcept { return c10::InferenceMode::is_enabled(); }

extern "C" int32_t od_is_inference(od_tensor tensor) noexcept {
  return static_cast<const at::Tensor*>(tensor)->is_inference();
}

extern "C" od_status* od_random_state_get(int32_t device_type, int32_t index, od_tensor* out) noexcept {
  return overdrive::guard([&] {
    auto found = generator(device_type, index);
    std::lock_guard<std::mutex> held(found.mutex());
    *out = new at::Tensor(found.get_state());
  });
}

extern "C" od_status* od_random_state_set(int32_t device_type, int32_t index, od_tensor state) noexcept {
  return overdrive::guard([&] {
    auto found = generator(device_type, index);
    std::lock_guard<std::mutex> held(found.mutex());
    found.set_state(*static_cast<const at::Tensor*>(state));
  });
}

extern "C" od_status* od_random_seed(int32_t device_type, int32_t index, uint64_t seed) noexcept {
  return overdrive::guard([&] {
    auto found = generator(device_type, index);
    std::lock_guard<std::mutex> held(found.mutex());
    found.set_current_seed(seed);
  });
}
