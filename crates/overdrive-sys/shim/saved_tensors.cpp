// Hooks on the tensors that the graph saves for backward.
//
// libtorch gets them from its engine: `Engine::get_default_saved_variable_hooks` is virtual, and Python's
// engine overrides it. So does `HookedEngine`, which is the base engine otherwise. It replaces the base
// engine before `main`, so that no program ever runs backward passes on two engines.
#include "callback.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/record_stream.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <map>
#include <mutex>

namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

std::atomic<const od_saved_tensor_callbacks*> saved_tensor_callbacks{nullptr};
// The number of hooks that Rust has pushed on this thread.
thread_local int32_t depth = 0;

bool is_parameter(const at::Tensor& tensor) {
  const auto& root = tensor.is_view() ? tensor._base() : tensor;
  return root.is_leaf() && root.requires_grad();
}

struct RustHooks final : SavedVariableHooks {
  explicit RustHooks(const od_saved_tensor_callbacks* to) : calls(to) {}
  ~RustHooks() override {
    if (packed) calls->drop(packed);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    auto owned = std::make_unique<at::Tensor>(tensor);
    const bool parameter = is_parameter(tensor);
    overdrive::throw_if_failed(calls->pack(owned.release(), parameter, &packed));
  }

  at::Tensor call_unpack_hook() override {
    // Two backward passes over one graph may run at once. Recursive, because unpacking may run a backward
    // pass that reaches this value again.
    std::lock_guard<std::recursive_mutex> held(lock);
    od_tensor out = nullptr;
    const od_failure failure = calls->unpack(packed, &out);
    std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(out));
    overdrive::throw_if_failed(failure);
    return *owned;
  }

  const od_saved_tensor_callbacks* calls;
  void* packed = nullptr;
  std::recursive_mutex lock;
};

struct HookedEngine final : Engine {
  // The base requires this of subclasses: its threads use the virtual functions.
  ~HookedEngine() override { stop(); }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto* calls = saved_tensor_callbacks.load(std::memory_order_acquire);
    if (depth == 0 || !calls) return nullptr;
    return std::make_unique<RustHooks>(calls);
  }
};

Engine& hooked_engine() {
  static HookedEngine engine;
  return engine;
}

struct Install {
  Install() noexcept { torch::autograd::set_default_engine_stub(&hooked_engine); }
} install;

}  // namespace

struct od_saved_variable {
  SavedVariable variable;
};

extern "C" void od_saved_tensors_install(const od_saved_tensor_callbacks* to) noexcept {
  saved_tensor_callbacks.store(to, std::memory_order_release);
}

extern "C" od_status* od_saved_tensors_set_depth(int32_t to) noexcept {
  return overdrive::guard([&] {
    TORCH_CHECK(to == 0 || &Engine::get_default_engine() == &hooked_engine(),
                "another autograd engine was installed in this process (Python's?): hooks on saved "
                "tensors would never be called");
    depth = to;
  });
}

extern "C" od_status* od_saved_variable_new(od_tensor tensor, od_saved_variable** out) noexcept {
  return overdrive::guard([&] {
    *out = new od_saved_variable{SavedVariable(*static_cast<const at::Tensor*>(tensor), false)};
  });
}

extern "C" od_status* od_saved_variable_unpack(const od_saved_variable* saved, od_tensor* out) noexcept {
  return overdrive::guard([&] { *out = new at::Tensor(saved->variable.unpack()); });
}

extern "C" void od_saved_variable_free(od_saved_variable* saved) noexcept { delete saved; }

extern "C" int32_t od_graph_task_id(void) noexcept {
  return torch::autograd::get_current_graph_task_id();
}

extern "C" int32_t od_backward_threads_set(int32_t enabled) noexcept {
  auto& state = c10::AutogradState::get_tls_state();
  const bool before = state.get_multithreading_enabled();
  state.set_multithreading_enabled(enabled != 0);
  return before;
}

// --- the identity of a tensor's storage, and asynchronous copies -----------------------------------

struct od_storage {
  // A weak pointer keeps the `StorageImpl` allocated, so no other can have its address, though its memory may
  // have been freed.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* address;
};

extern "C" od_status* od_storage_of(od_tensor tensor, od_storage** out, const void** address) noexcept {
  return overdrive::guard([&] {
    const auto& storage = static_cast<const at::Tensor*>(tensor)->storage();
    auto* impl = storage.unsafeGetStorageImpl();
    *out = new od_storage{c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()), impl};
    *address = impl;
  });
}

extern "C" void od_storage_free(od_storage* storage) noexcept { delete storage; }

extern "C" od_status* od_bump_versions(const od_tensor* tensors, size_t count) noexcept {
  return overdrive::guard([&] {
    for (size_t k = 0; k < count; ++k) {
      static_cast<const at::Tensor*>(tensors[k])->unsafeGetTensorImpl()->bump_version();
    }
  });
}

struct od_copy_event {
  c10::Event event;
};

namespace {

// Returns the device's stream for copies.
c10::Stream side_stream(c10::Device device) {
  static std::mutex lock;
  static std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, c10::Stream> streams;
  std::lock_guard<std::mutex> held(lock);
  const std::pair key(device.type(), device.index());
  const auto found = streams.find(key);
  if (found != streams.end()) return found->second;
  const c10::impl::VirtualGuardImpl impl(device.type());
  return streams.emplace(key, impl.getStreamFromGlobalPool(device)).first->second;
}

}  // namespace

extern "C" od_status* od_copy_async(od_tensor from, od_tensor to, od_copy_event** done) noexcept {
  return overdrive::guard([&] {
    const auto& source = *static_cast<const at::Tensor*>(from);
    auto& target = *static_cast<at::Tensor*>(to);
    const auto device = source.is_cpu() ? target.device() : source.device();
    if (device.is_cpu()) {
      target.copy_(source);
      *done = nullptr;
      return;
    }
    const c10::impl::VirtualGuardImpl impl(device.type());
    const auto side = side_stream(device);
    c10::Event ready(device.type());
    ready.record(impl.getStream(device));
    ready.block(side);
    {
      c10::StreamGuard guard(side);
      target.copy_(source, /*non_blocking=*/true);
    }
    // Without this the allocator could reuse the device's memory before the copy is done.
    (source.is_cpu() ? target : source).record_stream(side);
    auto copied = std::make_unique<od_copy_event>(od_copy_event{c10::Event(device.type())});
    copied->event.record(side);
    *done = copied.release();
  });
}

extern "C" od_status* od_copy_event_wait(od_copy_event* event, int32_t device_type, int32_t index) noexcept {
  return overdrive::guard([&] {
    const c10::Device device(static_cast<c10::DeviceType>(device_type),
                             static_cast<c10::DeviceIndex>(index));
    const c10::impl::VirtualGuardImpl impl(device.type());
    event->event.block(impl.getStream(device));
  });
}

extern "C" od_status* od_copy_event_synchronize(od_copy_event* event) noexcept {
  return overdrive::guard([&] { event->event.synchronize(); });
}

extern "C" od_status* od_side_stream_enter(int32_t device_type, int32_t index, int64_t* previous) noexcept {
  return overdrive::guard([&] {
    const c10::Device device(static_cast<c10::DeviceType>(device_type),
                             static_cast<c10::DeviceIndex>(index));
    const c10::impl::VirtualGuardImpl impl(device.type());
    const auto side = side_stream(device);
    c10::Event ready(device.type());
    ready.record(impl.getStream(device));
    ready.block(side);
    *previous = impl.exchangeStream(side).id();
  });
}

extern "C" od_status* od_side_stream_leave(int32_t device_type, int32_t index, int64_t previous,
                                           od_copy_event** done) noexcept {
  return overdrive::guard([&] {
    const c10::Device device(static_cast<c10::DeviceType>(device_type),
                             static_cast<c10::DeviceIndex>(index));
    const c10::impl::VirtualGuardImpl impl(device.type());
    // First of all: whatever fails below, the thread must not stay on the side stream.
    impl.exchangeStream(c10::Stream(c10::Stream::UNSAFE, device, previous));
    auto work = std::make_unique<od_copy_event>(od_copy_event{c10::Event(device.type())});
    work->event.record(side_stream(device));
    *done = work.release();
  });
}

extern "C" od_status* od_record_stream(od_tensor tensor) noexcept {
  return overdrive::guard([&] {
    const auto& used = *static_cast<const at::Tensor*>(tensor);
    if (used.is_cpu()) return;
    const c10::impl::VirtualGuardImpl impl(used.device().type());
    used.record_stream(impl.getStream(used.device()));
  });
}

extern "C" void od_copy_event_free(od_copy_event* event) noexcept { delete event; }
