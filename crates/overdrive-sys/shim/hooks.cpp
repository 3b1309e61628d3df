// Rust closures as hooks: on the gradient of a tensor, and after the gradient of a leaf was accumulated.
#include "callback.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>

namespace {

struct LeafHooks : torch::autograd::PostAccumulateGradHook {
  struct Entry {
    uint64_t id;
    std::shared_ptr<void> self;
    od_hook_call call;
  };
  std::mutex lock;
  std::vector<Entry> entries;
  uint64_t next = 0;

  void operator()(const at::Tensor& tensor) override {
    std::vector<Entry> now;
    {
      std::lock_guard<std::mutex> held(lock);
      now = entries;  // a copy: a hook may remove itself or add another
    }
    for (const auto& entry : now) {
      od_tensor unused = nullptr;
      overdrive::throw_if_failed(entry.call(entry.self.get(), &tensor, &unused));
    }
  }
};

}  // namespace

using weak_tensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct od_hook {
  weak_tensor tensor;
  bool on_leaf;
  uint64_t id;
};

extern "C" od_status* od_hook_register(od_tensor tensor, od_closure closure, od_hook_call call,
                                       od_hook** out) noexcept {
  auto self = overdrive::own(closure);
  return overdrive::guard([&] {
    auto& target = *static_cast<at::Tensor*>(tensor);
    TORCH_CHECK(target.requires_grad(), "a hook needs a tensor that requires grad");
    const auto id = target.register_hook([self, call](const at::Tensor& gradient) -> at::Tensor {
      od_tensor replacement = nullptr;
      const auto failure = call(self.get(), &gradient, &replacement);
      std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(replacement));
      overdrive::throw_if_failed(failure);
      return owned ? *owned : at::Tensor();
    });
    *out = new od_hook{weak_tensor(target.getIntrusivePtr()), false, id};
  });
}

extern "C" od_status* od_hook_register_post_accumulate(od_tensor tensor, od_closure closure,
                                                       od_hook_call call, od_hook** out) noexcept {
  auto self = overdrive::own(closure);
  return overdrive::guard([&] {
    auto& target = *static_cast<at::Tensor*>(tensor);
    TORCH_CHECK(target.requires_grad() && target.is_leaf(),
                "a post-accumulate hook needs a leaf that requires grad: gradients are accumulated "
                "in those only");
    auto& slot = torch::autograd::impl::post_acc_grad_hooks(target);
    if (!slot) torch::autograd::impl::set_post_acc_grad_hooks(target, std::make_unique<LeafHooks>());
    auto* hooks = dynamic_cast<LeafHooks*>(torch::autograd::impl::post_acc_grad_hooks(target).get());
    TORCH_CHECK(hooks, "this tensor has a post-accumulate hook that Python set");
    std::lock_guard<std::mutex> held(hooks->lock);
    const auto id = hooks->next++;
    hooks->entries.push_back({id, std::move(self), call});
    *out = new od_hook{weak_tensor(target.getIntrusivePtr()), true, id};
  });
}

extern "C" od_status* od_hook_remove(od_hook* hook) noexcept {
  return overdrive::guard([&] {
    std::unique_ptr<od_hook> owned(hook);
    auto alive = owned->tensor.lock();
    if (!alive) return;
    const at::Tensor target(std::move(alive));
    if (!owned->on_leaf) {
      target.remove_hook(static_cast<unsigned>(owned->id));
      return;
    }
    auto* hooks = dynamic_cast<LeafHooks*>(torch::autograd::impl::post_acc_grad_hooks(target).get());
    if (!hooks) return;
    LeafHooks::Entry removed;  // destroyed after the lock is released: destroying it runs Rust code
    std::lock_guard<std::mutex> held(hooks->lock);
    auto& entries = hooks->entries;
    auto at = std::find_if(entries.begin(), entries.end(),
                           [&](const LeafHooks::Entry& entry) { return entry.id == owned->id; });
    if (at != entries.end()) {
      removed = std::move(*at);
      entries.erase(at);
    }
  });
}

extern "C" void od_hook_free(od_hook* hook) noexcept { delete hook; }
