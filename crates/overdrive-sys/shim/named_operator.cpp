// Operators of the dispatcher whose kernels are Rust closures, so that dispatch modes see them by name.
#include "callback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace {

// The body of the operator that this thread is running.
thread_local const od_named_body* body = nullptr;

std::vector<at::Tensor> run(const std::vector<at::Tensor>&) {
  TORCH_CHECK(body, "operators of Overdrive can be called by Overdrive only");
  const auto* current = std::exchange(body, nullptr);
  std::vector<at::Tensor> results;
  auto failure = current->run(current->self, &results, [](void* into, od_tensor owned) {
    std::unique_ptr<at::Tensor> tensor(static_cast<at::Tensor*>(owned));
    static_cast<std::vector<at::Tensor>*>(into)->push_back(*tensor);
  });
  overdrive::throw_if_failed(failure);
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(overdrive, m) {
  m.def("mm(Tensor[] inputs) -> Tensor[]");
  m.def("attention(Tensor[] inputs) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(overdrive, CompositeExplicitAutograd, m) {
  m.impl("mm", run);
  m.impl("attention", run);
}

extern "C" od_status* od_named_call(const char* name, const od_tensor* inputs, size_t n_inputs,
                                    const od_named_body* what, void* into,
                                    void (*push)(void*, od_tensor)) noexcept {
  return overdrive::guard([&] {
    c10::List<at::Tensor> list;
    for (size_t k = 0; k < n_inputs; ++k) list.push_back(*static_cast<const at::Tensor*>(inputs[k]));
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    torch::jit::Stack stack{std::move(list)};
    struct Reset {
      const od_named_body* before = std::exchange(body, nullptr);
      ~Reset() { body = before; }
    } reset;
    body = what;
    op.callBoxed(stack);
    for (const at::Tensor& tensor : stack.at(0).toTensorVector()) push(into, new at::Tensor(tensor));
  });
}
