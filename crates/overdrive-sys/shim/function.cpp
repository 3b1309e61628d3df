// A node of the autograd graph whose backward is a Rust closure, as `torch.autograd.Function` in Python.
#include "callback.h"
#include "node.h"
#include "tensors.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <mutex>
#include <unordered_map>

namespace {

using overdrive::as_tensor;
using overdrive::as_tensors;
using torch::autograd::SavedVariable;
using torch::autograd::Variable;
using torch::autograd::variable_list;
using torch::autograd::VariableInfo;

struct RustNode : torch::autograd::Node {
  std::string name_;
  std::shared_ptr<void> self_;
  od_function_backward backward_ = nullptr;
  bool materialize_ = true;
  bool twice_differentiable_ = false;
  std::vector<VariableInfo> output_info_;
  // Null once they were released. Shared, because two backward passes over one graph may run at once, and no
  // lock is held while Rust code runs: unpacking, the backward function and dropping a packed value may run any.
  std::shared_ptr<std::vector<SavedVariable>> saved_ = std::make_shared<std::vector<SavedVariable>>();
  std::mutex lock_;  // of `saved_`

  std::string name() const override { return name_; }

  void release_variables() override {
    decltype(saved_) released;  // destroyed after the lock is released
    std::lock_guard<std::mutex> held(lock_);
    released.swap(saved_);
  }

#if OVERDRIVE_INTRUSIVE_NODES
  // Called when the last strong reference is gone. What is saved may hold weak ones to this node, which would keep
  // the object, so it is freed here and not by the destructor.
  void release_resources() override {
    Node::release_resources();
    RustNode::release_variables();
    self_.reset();
  }
#endif

  variable_list saved() {
    decltype(saved_) variables;
    {
      std::lock_guard<std::mutex> held(lock_);
      variables = saved_;
    }
    TORCH_CHECK(variables, torch::autograd::ERR_BACKWARD_TWICE);
    const auto self = getptr();
    variable_list out;
    out.reserve(variables->size());
    for (const auto& variable : *variables) out.push_back(variable.unpack(self));
    return out;
  }

  variable_list apply(variable_list&& gradients) override {
    variable_list saved = this->saved();
    at::OptionalDeviceGuard device;
    if (materialize_) {
      for (size_t k = 0; k < gradients.size(); ++k) {
        if (!gradients[k].defined()) gradients[k] = output_info_[k].zeros(device);
      }
    }
    // The engine enables grad mode for `create_graph`.
    const bool create_graph = at::GradMode::is_enabled();
    const bool once = create_graph && !twice_differentiable_;
    variable_list result;
    {
      at::AutoGradMode mode(create_graph && twice_differentiable_);
      result = call(gradients, saved);
    }
    if (once && (torch::autograd::any_variable_requires_grad(gradients) ||
                 torch::autograd::any_variable_requires_grad(saved))) {
      auto refuse = overdrive::make_node<torch::autograd::DelayedError>(
          "trying to differentiate the backward of " + name_ +
              ", which is not differentiable: the function does not offer double backward",
          static_cast<int64_t>(result.size()));
      // `DelayedError` attaches itself only to tensors that require a gradient.
      for (auto& tensor : result) {
        if (tensor.defined()) tensor = tensor.detach().set_requires_grad(true);
      }
      result = (*refuse)(std::move(result));
    }
    return result;
  }

 private:
  variable_list call(const variable_list& gradients, const variable_list& saved) {
    std::vector<const void*> gradient_handles, saved_handles;
    for (const auto& g : gradients) gradient_handles.push_back(g.defined() ? &g : nullptr);
    for (const auto& s : saved) saved_handles.push_back(&s);
    std::vector<uint8_t> needs_input_grad;
    for (size_t k = 0; k < num_outputs(); ++k) {
      needs_input_grad.push_back(task_should_compute_output(k));
    }
    std::vector<od_tensor> out(num_outputs(), nullptr);
    od_backward_call arguments{gradient_handles.data(), gradient_handles.size(),
                               saved_handles.data(),    saved_handles.size(),
                               needs_input_grad.data(), out.data(),
                               out.size()};
    const od_failure failure = backward_(self_.get(), &arguments);
    variable_list result;
    result.reserve(out.size());
    for (od_tensor handle : out) {
      std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(handle));
      result.push_back(owned ? *owned : at::Tensor());
    }
    overdrive::throw_if_failed(failure);
    return result;
  }
};

bool shares_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage());
}

// Returns true if output `index` is a view of a tensor that forward made itself, and no other output lies in the same
// elements.
bool is_view_of_own(const variable_list& outputs, size_t index, const variable_list& inputs) {
  const at::Tensor& output = outputs[index];
  if (!output.defined() || !output.is_view()) return false;
  for (const auto& input : inputs) {
    if (shares_storage(output, input)) return false;
  }
  for (size_t k = 0; k < outputs.size(); ++k) {
    if (k != index && shares_storage(output, outputs[k]) &&
        at::get_overlap_status(output, outputs[k]) != at::MemOverlapStatus::No) {
      return false;
    }
  }
  return true;
}

// Returns the elements of a view as a tensor that is no view. autograd refuses to change a view in place whose history
// it does not know, and it does not know the history of what forward computed; there is none to respect where nobody
// else can see the base. The version counter stays that of the base, so that a change of what forward saved is noticed.
at::Tensor without_base(const at::Tensor& view) {
  return at::Tensor(view.unsafeGetTensorImpl()->shallow_copy_and_detach(torch::autograd::impl::version_counter(view),
                                                                        /*allow_tensor_metadata_change=*/true));
}

}  // namespace

extern "C" od_status* od_function_record(const od_function* f, od_closure closure,
                                         od_function_backward backward, od_tensor* out) noexcept {
  // Taken before anything can throw, so that a failure below drops the closure.
  auto self = overdrive::own(closure);
  return overdrive::guard([&] {
    const variable_list inputs = as_tensors(f->inputs, f->n_inputs);
    variable_list outputs = as_tensors(f->outputs, f->n_outputs);
    // By what forward returned: what it saved may be one of these.
    std::unordered_map<const at::TensorImpl*, size_t> replaced;
    {
      const variable_list returned = outputs;
      for (size_t k = 0; k < returned.size(); ++k) {
        if (!is_view_of_own(returned, k, inputs)) continue;
        replaced.emplace(returned[k].unsafeGetTensorImpl(), k);
        outputs[k] = without_base(returned[k]);
      }
    }
    const bool recorded =
        at::GradMode::is_enabled() && torch::autograd::any_variable_requires_grad(inputs);

    const auto node = overdrive::make_node<RustNode>();
    node->name_.assign(f->name, f->name_len);
    node->self_ = std::move(self);
    node->backward_ = backward;
    node->materialize_ = f->materialize_grads;
    node->twice_differentiable_ = f->twice_differentiable;
    if (recorded) node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    node->clear_input_metadata();

    std::unordered_set<at::TensorImpl*> dirty, non_differentiable;
    for (size_t k = 0; k < f->n_dirty; ++k) {
      auto* impl = inputs.at(f->dirty[k]).unsafeGetTensorImpl();
      impl->bump_version();
      dirty.insert(impl);
    }
    for (size_t k = 0; k < f->n_non_differentiable; ++k) {
      non_differentiable.insert(outputs.at(f->non_differentiable[k]).unsafeGetTensorImpl());
    }
    std::vector<std::optional<Variable>> raw(outputs.begin(), outputs.end());
    const auto wrapped = torch::autograd::_wrap_outputs(
        inputs, non_differentiable, dirty, raw, recorded ? node : nullptr,
        [](const variable_list&, const variable_list&) -> variable_list {
          TORCH_CHECK(false, "a function written in Rust has no forward-mode derivative");
        },
        {}, [](const at::Tensor& x) { return x.view_as(x); }, false);

    if (recorded) {
      for (const auto& output : wrapped) node->output_info_.emplace_back(output.value());
      for (size_t k = 0; k < f->n_saved; ++k) {
        const auto found = replaced.find(as_tensor(f->saved[k]).unsafeGetTensorImpl());
        const at::Tensor& tensor = found == replaced.end() ? as_tensor(f->saved[k]) : *wrapped[found->second];
        node->saved_->emplace_back(tensor, tensor.grad_fn() == node);
      }
    }
    std::vector<std::unique_ptr<at::Tensor>> handles;
    for (const auto& output : wrapped) handles.push_back(std::make_unique<at::Tensor>(*output));
    for (size_t k = 0; k < handles.size(); ++k) out[k] = handles[k].release();
  });
}
