// c10d::Reducer, which reduces gradients bucket by bucket while backward runs.
#include "group.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <atomic>
#include <limits>

using overdrive::guard;

namespace {

// Sends gradients in fewer bits. They are divided by the number of ranks before the sum, so that the sum
// cannot overflow if the average does not (torch's fp16_compress_hook and bf16_compress_hook).
class Compress : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  Compress(c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType type)
      : CppCommHookInterface(std::move(group)), type_(type) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    auto buffer = bucket.getBufferRef();
    std::vector<at::Tensor> small{buffer.to(type_).div_(state_->getSize())};
    auto reduced = state_->allreduce(small)->getFuture();
    // Copied back into the bucket's memory, because gradients are views of it.
    auto widen = [buffer](c10::ivalue::Future& done) {
      buffer.copy_(done.value().toTensorVector().at(0));
      return c10::IValue(buffer);
    };
    return reduced->then(std::move(widen), c10::TensorType::get());
  }

 private:
  const at::ScalarType type_;
};

}  // namespace

struct od_reducer {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<c10d::Reducer> reducer;
  // The reducer logs a change of the unused parameters there without checking for null.
  std::shared_ptr<c10d::Logger> logger;
  bool find_unused;
  // Whether the graph is static and the reducer does not know it yet.
  bool static_graph_due;
  // If the graph is static: whether the first backward pass that reduces is still to come.
  std::shared_ptr<std::atomic<bool>> first_pass_due;
};

extern "C" od_status* od_reducer_new(od_group* group, const od_tensor* parameters,
                                     const char* const* names, size_t n,
                                     const od_reducer_options* options,
                                     od_reducer** out) noexcept {
  return guard([&] {
    std::vector<at::Tensor> params;
    std::unordered_map<size_t, std::string> named;
    for (size_t i = 0; i < n; ++i) {
      params.push_back(*static_cast<at::Tensor*>(parameters[i]));
      named.emplace(i, names[i]);
    }
    const std::vector<bool> sparse(n, false);
    // As in PyTorch: if every parameter is used, the first backward pass, which has one bucket, records
    // the order of the gradients, and the final buckets are built after it.
    std::vector<size_t> limits{std::numeric_limits<size_t>::max() / 2};
    if (options->find_unused_parameters && !options->static_graph) {
      limits = {static_cast<size_t>(options->first_bucket_bytes),
                static_cast<size_t>(options->bucket_bytes)};
    }
    auto assignment = c10d::compute_bucket_assignment_by_size(params, limits, sparse);
    auto& buckets = std::get<0>(assignment);
    std::reverse(buckets.begin(), buckets.end());
    auto reducer = std::make_shared<c10d::Reducer>(
        std::move(params), std::move(buckets), group->group, sparse, options->bucket_bytes,
        options->find_unused_parameters != 0, options->gradient_as_bucket_view != 0,
        std::move(named), options->first_bucket_bytes,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
        /*bucket_bytes_cap_list=*/std::vector<int64_t>());
    if (options->compression) {
      reducer->register_comm_hook(std::make_unique<Compress>(
          group->group, static_cast<at::ScalarType>(options->compression)));
    }
    auto logger = std::make_shared<c10d::Logger>(reducer);
    reducer->set_logger(logger);
    std::shared_ptr<std::atomic<bool>> first_pass_due;
    if (options->static_graph) first_pass_due = std::make_shared<std::atomic<bool>>(true);
    *out = new od_reducer{group->group,
                          std::move(reducer),
                          std::move(logger),
                          options->find_unused_parameters != 0,
                          options->static_graph != 0,
                          std::move(first_pass_due)};
  });
}

extern "C" od_status* od_reducer_prepare_for_forward(od_reducer* reducer) noexcept {
  return guard([&] {
    // Not earlier: until its first reduction, a reducer of a static graph also counts the gradients of passes that
    // only accumulate, and would then wait for them in every later pass.
    if (reducer->static_graph_due) {
      reducer->reducer->set_static_graph();
      reducer->static_graph_due = false;
    }
    reducer->reducer->prepare_for_forward();
  });
}

extern "C" od_status* od_reducer_rebuild_buckets(od_reducer* reducer,
                                                 int32_t* out_rebuilt) noexcept {
  return guard([&] { *out_rebuilt = reducer->reducer->rebuild_buckets() ? 1 : 0; });
}

extern "C" od_status* od_reducer_prepare_for_backward(od_reducer* reducer, const od_tensor* outputs,
                                                      size_t n) noexcept {
  return guard([&] {
    std::vector<at::Tensor> list;
    for (size_t i = 0; i < n; ++i) list.push_back(*static_cast<at::Tensor*>(outputs[i]));
    if (reducer->first_pass_due && *reducer->first_pass_due) {
      // The first pass counts how often each parameter is used and reduces at its end, as in PyTorch's _DDPSink.
      for (const auto& output : list) {
        if (!output.requires_grad()) continue;
        std::weak_ptr<c10d::Reducer> weak = reducer->reducer;
        output.register_hook([weak, due = reducer->first_pass_due](const at::Tensor&) {
          if (!due->exchange(false)) return;
          torch::autograd::Engine::get_default_engine().queue_callback([weak] {
            if (const auto alive = weak.lock()) alive->delay_all_reduce();
          });
        });
      }
    }
    // As in PyTorch: without the search for unused parameters the reducer gets no outputs.
    if (!reducer->find_unused) list.clear();
    reducer->reducer->prepare_for_backward(list);
  });
}

extern "C" od_status* od_reducer_buckets(od_reducer* reducer, int64_t* out, size_t n,
                                         size_t* out_n) noexcept {
  return guard([&] {
    const auto buckets = reducer->reducer->get_grad_buckets(/*return_zero_tensors=*/false);
    for (size_t i = 0; i < std::min(n, buckets.size()); ++i) {
      const auto& buffer = buckets[i].getBuffer();
      out[i] = buffer.numel() * static_cast<int64_t>(buffer.element_size());
    }
    *out_n = buckets.size();
  });
}

extern "C" void od_reducer_free(od_reducer* reducer) noexcept {
  // Its destructor removes the hooks from the parameters.
  overdrive::discard([&] {
    std::unique_ptr<od_reducer> owned(reducer);
    owned->reducer->remove_autograd_hooks();
  });
}
