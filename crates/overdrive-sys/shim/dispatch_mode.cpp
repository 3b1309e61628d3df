// Dispatch modes: callbacks below autograd that see every operator of a thread and can replace its
// results, as TorchDispatchMode in Python. And, above autograd, the names of the running operators.
//
// Both use dispatch keys that libtorch reserves for external code and does not use itself (they were made for
// torchdistX, which is retired): `Fake` comes directly after autograd, views and in-place bookkeeping,
// `DeferredInit` before all of them. A key that is in no tensor is active only on threads that include it, so
// other threads pay nothing.
#include "callback.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <utility>

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

struct od_dispatched {
  const c10::OperatorHandle& op;
  torch::jit::Stack& stack;
  bool done;  // the stack holds results, not arguments
};

struct od_results {
  std::vector<IValue> values;
  std::vector<std::pair<at::Tensor, uint32_t>> tensors;  // with the version they had
};

namespace {

std::atomic<const od_dispatch_callbacks*> dispatch_callbacks{nullptr};
thread_local bool listening = false;
thread_local std::vector<const c10::OperatorName*> running;

void below_autograd(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Fake);
  // Modes do not see the operators that a kernel calls itself.
  c10::impl::ExcludeDispatchKeyGuard once(DispatchKey::Fake);
  const auto* calls = dispatch_callbacks.load(std::memory_order_acquire);
  // An engine thread inherits the key from the thread that called backward, but not the thread's modes.
  if (!listening || !calls) {
    op.redispatchBoxed(below, stack);
    return;
  }
  od_dispatched dispatched{op, *stack, false};
  overdrive::throw_if_failed(calls->before(&dispatched));
  if (!dispatched.done) {
    op.redispatchBoxed(below, stack);
    dispatched.done = true;
  }
  overdrive::throw_if_failed(calls->after(&dispatched));
}

void above_autograd(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  struct Running {
    explicit Running(const c10::OperatorName& name) { running.push_back(&name); }
    ~Running() { running.pop_back(); }
  } guard(op.operator_name());
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::DeferredInit), stack);
}

template <class Visit>
void each_tensor(const IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) each_tensor(element, visit);
  }
}

// Returns the value detached from the graph; it shares memory and version counter with the original.
IValue detached(const IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!tensor.defined()) return value;
    auto* impl = tensor.unsafeGetTensorImpl();
    return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(detached(tensor).toTensor());
    return list;
  }
  return value;
}

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&below_autograd>());
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&above_autograd>());
}

extern "C" void od_dispatch_mode_install(const od_dispatch_callbacks* to) noexcept {
  dispatch_callbacks.store(to, std::memory_order_release);
}

extern "C" int32_t od_dispatch_mode_listen(int32_t enabled) noexcept {
  const bool before = std::exchange(listening, enabled != 0);
  c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, listening);
  return before;
}

extern "C" const char* od_dispatched_name(const od_dispatched* call, size_t* len) noexcept {
  const auto& name = call->op.operator_name().name;
  *len = name.size();
  return name.data();
}

extern "C" const char* od_dispatched_overload(const od_dispatched* call, size_t* len) noexcept {
  const auto& name = call->op.operator_name().overload_name;
  *len = name.size();
  return name.data();
}

extern "C" od_status* od_dispatched_flags(const od_dispatched* call, int32_t* out) noexcept {
  return overdrive::guard([&] {
    int32_t flags = 0;
    for (const auto& argument : call->op.schema().arguments()) {
      if (argument.alias_info()) flags |= argument.alias_info()->isWrite() ? OD_MUTATES : OD_ALIASES;
    }
    for (const auto& result : call->op.schema().returns()) {
      if (result.alias_info()) flags |= OD_ALIASES;
    }
    if (call->op.hasTag(at::Tag::nondeterministic_seeded)) flags |= OD_RANDOM;
    *out = flags;
  });
}

extern "C" od_status* od_dispatched_bool(const od_dispatched* call, const char* name, int32_t* out) noexcept {
  return overdrive::guard([&] {
    TORCH_CHECK(!call->done, "the arguments of an operator are gone when it has run");
    const auto& schema = call->op.schema();
    const auto index = schema.argumentIndexWithName(name);
    bool value = false;
    if (index) {
      const IValue& argument = call->stack[call->stack.size() - schema.arguments().size() + *index];
      value = argument.isBool() && argument.toBool();
    }
    *out = value;
  });
}

extern "C" od_status* od_dispatched_tensors(const od_dispatched* call, void* into,
                                            void (*take)(void* into, od_tensor owned)) noexcept {
  return overdrive::guard([&] {
    // Below this call's values the stack may hold those of its callers.
    const auto& schema = call->op.schema();
    const size_t count = call->done ? schema.returns().size() : schema.arguments().size();
    for (size_t k = call->stack.size() - count; k < call->stack.size(); ++k) {
      each_tensor(call->stack[k], [&](const at::Tensor& t) { take(into, new at::Tensor(t)); });
    }
  });
}

extern "C" od_status* od_dispatched_keep(const od_dispatched* call, od_results** out) noexcept {
  return overdrive::guard([&] {
    TORCH_CHECK(call->done, "an operator has no results before it has run");
    auto kept = std::make_unique<od_results>();
    const size_t count = call->op.schema().returns().size();
    for (size_t k = call->stack.size() - count; k < call->stack.size(); ++k) {
      kept->values.push_back(detached(call->stack[k]));
      each_tensor(kept->values.back(), [&](const at::Tensor& t) {
        kept->tensors.emplace_back(t, t.unsafeGetTensorImpl()->version_counter().enabled()
                                          ? t.unsafeGetTensorImpl()->version_counter().current_version()
                                          : 0);
      });
    }
    *out = kept.release();
  });
}

extern "C" od_status* od_dispatched_replace(od_dispatched* call, const od_results* by) noexcept {
  return overdrive::guard([&] {
    for (const auto& [tensor, version] : by->tensors) {
      const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
      TORCH_CHECK(!counter.enabled() || counter.current_version() == version,
                  "its stored result, a tensor of shape ", tensor.sizes(),
                  ", was changed in place since it was stored (its version is ",
                  counter.current_version(), ", and was ", version,
                  "): run this operator again, or change a copy");
    }
    const auto& schema = call->op.schema();
    TORCH_CHECK(by->values.size() == schema.returns().size(), "these are not results of ",
                full_name(call->op.operator_name()));
    call->stack.erase(call->stack.end() - static_cast<std::ptrdiff_t>(schema.arguments().size()),
                      call->stack.end());
    for (const auto& value : by->values) call->stack.push_back(detached(value));
    call->done = true;
  });
}

extern "C" od_status* od_results_tensors(const od_results* results, void* into,
                                         void (*take)(void* into, od_tensor owned)) noexcept {
  return overdrive::guard([&] {
    for (const auto& kept : results->tensors) take(into, new at::Tensor(kept.first));
  });
}

extern "C" void od_results_free(od_results* results) noexcept { delete results; }

extern "C" int32_t od_operator_names_set(int32_t enabled) noexcept {
  const bool before = c10::impl::tls_is_dispatch_key_included(DispatchKey::DeferredInit);
  c10::impl::tls_set_dispatch_key_included(DispatchKey::DeferredInit, enabled != 0);
  return before;
}

extern "C" od_status* od_current_operator(char** out) noexcept {
  return overdrive::guard([&] {
    *out = overdrive::copy_string(running.empty() ? std::string() : full_name(*running.back()));
  });
}
