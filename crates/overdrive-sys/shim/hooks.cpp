// Rust closures as hooks: on the gradient of a tensor, and after the gradient of a leaf was accumulated.
//
// The closures are in lists of the shim's own. libtorch's list frees a hook that is removed while it runs, and names
// it by an index, which means another hook after an in-place operation has given the tensor a new `grad_fn`.
#include "callback.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace overdrive {

struct HookList {
  struct Entry {
    uint64_t id = 0;
    uint32_t output = 0;  // of the node that computes the tensor
    std::shared_ptr<void> self;
    od_hook_call call = nullptr;
  };

  uint64_t add(uint32_t output, std::shared_ptr<void> self, od_hook_call call) {
    std::lock_guard<std::mutex> held(lock_);
    entries_.push_back({next_, output, std::move(self), call});
    return next_++;
  }

  void remove(uint64_t id) {
    Entry removed;  // destroyed after the lock is released: destroying it may run Rust code
    std::lock_guard<std::mutex> held(lock_);
    const auto at = std::find_if(entries_.begin(), entries_.end(),
                                 [&](const Entry& entry) { return entry.id == id; });
    if (at == entries_.end()) return;
    removed = std::move(*at);
    entries_.erase(at);
  }

  // Returns a copy, which keeps the closures alive: a hook may remove itself or another one, or add one.
  std::vector<Entry> entries() {
    std::lock_guard<std::mutex> held(lock_);
    return entries_;
  }

 private:
  std::mutex lock_;
  std::vector<Entry> entries_;
  uint64_t next_ = 0;
};

}  // namespace overdrive

namespace {

using overdrive::HookList;
using torch::autograd::variable_list;
namespace impl = torch::autograd::impl;

// The post-accumulate hooks of a leaf, and the thread that runs them.
struct Accumulation {
  HookList hooks;
  std::atomic<std::thread::id> thread{};
  torch::autograd::Node* node = nullptr;  // only valid on `thread`

  // Returns true if this pass would add to the leaf's gradient, rather than return it (`grad`).
  bool is_in_this_pass() const {
    const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
    if (!tasks || tasks->empty()) return true;
    const auto found = tasks->find(node);
    return found != tasks->end() && found->second.needed_;
  }
};

// The hooks on the gradients of one node's outputs, or of one leaf.
struct GradientHooks final : torch::autograd::FunctionPreHook {
  const std::shared_ptr<HookList> list = std::make_shared<HookList>();
  // Made here although most have no post-accumulate hooks: a pass of another thread may read it while such a hook is
  // registered, and a pointer that never changes needs no lock.
  const std::shared_ptr<Accumulation> accumulation = std::make_shared<Accumulation>();

  variable_list operator()(const variable_list& gradients) override {
    // libtorch holds the lock of the leaf's node while these hooks run, so without this check the thread would
    // wait for itself.
    TORCH_CHECK(accumulation->thread.load() != std::this_thread::get_id() ||
                    !accumulation->is_in_this_pass(),
                "a post-accumulate hook ran a backward pass that accumulates into its own leaf: use `grad`, "
                "which returns gradients, or run the pass after the hook");
    variable_list now = gradients;
    for (const auto& entry : list->entries()) {
      auto& value = now.at(entry.output);
      if (!value.defined()) continue;
      od_tensor replacement = nullptr;
      const auto failure = entry.call(entry.self.get(), &value, &replacement);
      std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(replacement));
      overdrive::throw_if_failed(failure);
      if (!owned || !owned->defined()) continue;
      torch::autograd::check_variable_result(value, *owned, "written in Rust");
      value = *owned;
    }
    return now;
  }
};

struct LeafHooks final : torch::autograd::PostAccumulateGradHook {
  explicit LeafHooks(std::shared_ptr<Accumulation> of) : accumulation(std::move(of)) {}
  const std::shared_ptr<Accumulation> accumulation;

  void operator()(const at::Tensor& tensor) override {
    struct Running {
      explicit Running(Accumulation& of) : accumulation(of) {
        accumulation.thread = std::this_thread::get_id();
      }
      ~Running() { accumulation.thread = std::thread::id(); }
      Accumulation& accumulation;
    };
    accumulation->node = impl::try_get_grad_accumulator(tensor).get();
    const Running running(*accumulation);
    for (const auto& entry : accumulation->hooks.entries()) {
      od_tensor unused = nullptr;
      overdrive::throw_if_failed(entry.call(entry.self.get(), &tensor, &unused));
    }
  }
};

// Returns the hooks on the gradient of `tensor`, and installs them if there are none. There is one such object
// for all outputs of a node: a hook that registers another one never changes the list that the engine walks.
GradientHooks& gradient_hooks(const at::Tensor& tensor) {
  const auto& node = tensor.grad_fn();
  auto& installed = node ? node->tensor_pre_hooks() : impl::hooks(tensor);
  for (const auto& hook : installed) {
    if (auto* ours = dynamic_cast<GradientHooks*>(hook.get())) return *ours;
  }
  auto owned = std::make_unique<GradientHooks>();
  auto& hooks = *owned;
  if (node) {
    node->add_tensor_pre_hook(std::move(owned));
  } else {
    impl::add_hook(tensor, std::move(owned));
  }
  return hooks;
}

// Two threads that register their first hooks on one tensor install one object.
std::mutex installing;

}  // namespace

struct od_hook {
  std::weak_ptr<overdrive::HookList> list;  // gone when the tensor, or its node, is
  uint64_t id;
};

extern "C" od_status* od_hook_register(od_tensor tensor, od_closure closure, od_hook_call call,
                                       od_hook** out) noexcept {
  auto self = overdrive::own(closure);
  return overdrive::guard([&] {
    const auto& target = *static_cast<const at::Tensor*>(tensor);
    TORCH_CHECK(target.requires_grad(), "a hook needs a tensor that requires grad");
    std::lock_guard<std::mutex> held(installing);
    const auto& list = gradient_hooks(target).list;
    const auto id = list->add(target.output_nr(), std::move(self), call);
    *out = new od_hook{list, id};
  });
}

extern "C" od_status* od_hook_register_post_accumulate(od_tensor tensor, od_closure closure,
                                                       od_hook_call call, od_hook** out) noexcept {
  auto self = overdrive::own(closure);
  return overdrive::guard([&] {
    const auto& target = *static_cast<const at::Tensor*>(tensor);
    TORCH_CHECK(target.requires_grad() && target.is_leaf(),
                "a post-accumulate hook needs a leaf that requires grad: gradients are accumulated "
                "in those only");
    std::lock_guard<std::mutex> held(installing);
    if (!impl::post_acc_grad_hooks(target)) {
      impl::set_post_acc_grad_hooks(
          target, std::make_unique<LeafHooks>(gradient_hooks(target).accumulation));
    }
    auto* leaf = dynamic_cast<LeafHooks*>(impl::post_acc_grad_hooks(target).get());
    TORCH_CHECK(leaf, "this tensor has a post-accumulate hook that Python set");
    const std::shared_ptr<HookList> list(leaf->accumulation, &leaf->accumulation->hooks);
    const auto id = list->add(0, std::move(self), call);
    *out = new od_hook{list, id};
  });
}

extern "C" od_status* od_hook_remove(od_hook* hook) noexcept {
  return overdrive::guard([&] {
    const std::unique_ptr<od_hook> owned(hook);
    if (const auto list = owned->list.lock()) list->remove(owned->id);
  });
}

extern "C" void od_hook_free(od_hook* hook) noexcept { delete hook; }
