// Process groups: watched collectives over Gloo, and collectives over NCCL if it is built in.
#include "../tensors.h"
#include "../version.h"
#include "group.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef OVERDRIVE_NCCL
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <mutex>

using overdrive::guard;
using overdrive::Watch;
using overdrive::WatchedBackend;
using overdrive::WatchedWork;

// --- Watch ------------------------------------------------------------------------------------------

namespace overdrive {

std::string Watch::describe(uint64_t number, const std::string& what) const {
  auto text = what;
  if (number != 0) text += " #" + std::to_string(number);
  return text + " on rank " + std::to_string(rank_) + " of " + std::to_string(size_) + label_;
}

void Watch::label(const std::string& label) {
  std::lock_guard<std::mutex> held(lock_);
  label_ = label;
}

std::exception_ptr Watch::error(uint64_t number, const std::string& what) const {
  std::lock_guard<std::mutex> held(lock_);
  return std::make_exception_ptr(std::runtime_error(describe(number, what) + ": " + message_));
}

uint64_t Watch::start(const std::string& what, std::string tensors) {
  std::lock_guard<std::mutex> held(lock_);
  if (aborted_) {
    throw std::runtime_error(describe(0, what) + " cannot start: the group has failed: " + message_);
  }
  recent_.push_back({++started_, what, std::move(tensors)});
  if (recent_.size() > kRecent) recent_.pop_front();
  return started_;
}

void Watch::check() const {
  std::lock_guard<std::mutex> held(lock_);
  if (aborted_) throw std::runtime_error("the group has failed: " + message_);
}

bool Watch::is_aborted() const {
  std::lock_guard<std::mutex> held(lock_);
  return aborted_;
}

void Watch::enlist(uint64_t number, const c10::intrusive_ptr<WatchedWork>& work) {
  std::lock_guard<std::mutex> held(lock_);
  pending_.emplace(number, work);
}

void Watch::finish(uint64_t number) {
  c10::intrusive_ptr<WatchedWork> last;  // freed after the lock is released
  std::lock_guard<std::mutex> held(lock_);
  ++finished_;
  auto at = pending_.find(number);
  if (at == pending_.end()) return;
  last = std::move(at->second);
  pending_.erase(at);
}

void Watch::fail(uint64_t number, const std::string& what, const std::string& text) {
  bool alone = false;
  {
    std::lock_guard<std::mutex> held(lock_);
    if (aborted_) return;
    if (!failed_) {
      failed_ = true;
      failed_number_ = number;
      failed_what_ = what;
      failed_text_ = text;
    }
    alone = !watched_;
  }
  changed_.notify_all();
  if (alone) abort(text);
}

void Watch::wait_for_abort() {
  std::unique_lock<std::mutex> held(lock_);
  changed_.wait(held, [&] { return aborted_; });
}

void Watch::abort(const std::string& message) {
  std::map<uint64_t, c10::intrusive_ptr<WatchedWork>> pending;
  {
    std::lock_guard<std::mutex> held(lock_);
    if (aborted_) return;
    aborted_ = true;
    message_ = message;
    pending.swap(pending_);
  }
  changed_.notify_all();
  for (auto& entry : pending) entry.second->give_up();
}

void Watch::begin() {
  std::lock_guard<std::mutex> held(lock_);
  watched_ = true;
}

void Watch::wake() {
  {
    std::lock_guard<std::mutex> held(lock_);
    woken_ = true;
  }
  changed_.notify_all();
}

void Watch::poll(std::chrono::milliseconds wait, od_watch_state* out) {
  std::unique_lock<std::mutex> held(lock_);
  changed_.wait_for(held, wait, [&] { return woken_ || (failed_ && !aborted_); });
  woken_ = false;
  std::string lines;
  for (const auto& started : recent_) {
    lines += std::to_string(started.number) + "\t" + started.what + "\t" + started.tensors + "\n";
  }
  std::unique_ptr<char[]> recent(copy_string(lines));
  std::unique_ptr<char[]> what(copy_string(failed_what_));
  std::unique_ptr<char[]> text(copy_string(failed_text_));
  *out = {started_, finished_,  failed_ && !aborted_ ? 1 : 0, aborted_ ? 1 : 0, failed_number_,
          recent.release(), what.release(), text.release()};
}

std::string describe_tensors(at::ArrayRef<at::Tensor> tensors) {
  if (tensors.empty()) return {};
  const auto& first = tensors[0];
  std::string text = c10::toString(first.scalar_type());
  if (tensors.size() == 1) {
    text += " [";
    for (int64_t k = 0; k < first.dim(); ++k) {
      text += (k ? ", " : "") + std::to_string(first.size(k));
    }
    return text + "]";
  }
  int64_t elements = 0;
  for (const auto& tensor : tensors) elements += tensor.numel();
  return text + ", " + std::to_string(tensors.size()) + " tensors of " + std::to_string(elements) +
         " elements";
}

// --- WatchedWork ----------------------------------------------------------------------------------

WatchedWork::WatchedWork(std::shared_ptr<Watch> watch, uint64_t number, std::string what,
                         c10::intrusive_ptr<c10d::Work> inner)
    : Work(-1, c10d::OpType::UNKNOWN),
      watch_(std::move(watch)),
      number_(number),
      what_(std::move(what)),
      inner_(std::move(inner)) {
  if (number_ == 0) return;  // a send or a receive has no future
  try {
    inner_future_ = inner_->getFuture();
  } catch (const std::exception&) {
    return;  // without a future `wait` waits for the inner work
  }
  if (inner_future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(inner_future_->elementType());
  }
}

void WatchedWork::follow() {
  if (!future_) return;
  auto self = c10::intrusive_ptr<WatchedWork>::reclaim_copy(this);
  inner_future_->addCallback([self](c10::ivalue::Future& inner) {
    if (inner.hasError()) {
      self->watch_->fail(self->number_, self->what_, inner.tryRetrieveErrorMessage());
      return;  // `Watch::abort` ends it
    }
    auto value = inner.value();
    self->end(nullptr, &value);
  });
}

void WatchedWork::end(std::exception_ptr error, const c10::IValue* value) {
  {
    std::lock_guard<std::mutex> held(once_);
    if (ended_) return;
    ended_ = true;
  }
  watch_->finish(number_);
  finish(error);
  if (!future_) return;
  if (error) {
    future_->setError(error);
  } else {
    future_->markCompleted(*value);
  }
}

void WatchedWork::give_up() { end(watch_->error(number_, what_), nullptr); }

bool WatchedWork::isCompleted() { return future_ ? Work::isCompleted() : inner_->isCompleted(); }

bool WatchedWork::wait(std::chrono::milliseconds timeout) {
  if (future_) return Work::wait(timeout);
  std::string text;
  try {
    const bool done = inner_->wait(timeout);
    if (number_ != 0) {
      const c10::IValue none;
      end(nullptr, &none);
    }
    return done;
  } catch (const c10::Error& e) {
    text = e.what_without_backtrace();
  } catch (const std::exception& e) {
    text = e.what();
  }
  watch_->fail(number_, what_, text);
  watch_->wait_for_abort();
  std::rethrow_exception(watch_->error(number_, what_));
}

c10::intrusive_ptr<c10::ivalue::Future> WatchedWork::getFuture() {
  return future_ ? future_ : inner_->getFuture();
}

}  // namespace overdrive

// --- Groups ---------------------------------------------------------------------------------------

namespace {

// Gloo and NCCL compute addresses from the number of elements: they would write 1000 elements into the single one
// of an expanded tensor. One place for all collectives and both backends.
void check_tensors(const std::vector<at::Tensor>& tensors, const char* role) {
  for (const auto& tensor : tensors) {
    const auto problem = overdrive::unfit_for_addresses(tensor);
    if (!problem.empty()) {
      throw overdrive::BadArgument(std::string("an ") + role + " of a collective " + problem);
    }
  }
}

#ifdef OVERDRIVE_NCCL
// libtorch's backend has no lock: two threads could create its communicator at once, and the order of their calls
// would differ between the ranks. The reducer calls it from the threads of backward. The lock is recursive, because
// some collectives of the backend call others.
class Nccl : public c10d::ProcessGroupNCCL {
 public:
  using c10d::ProcessGroupNCCL::ProcessGroupNCCL;

  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using Pointer = c10::intrusive_ptr<c10d::Work>;

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::broadcast(tensors, opts); });
  }
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::allreduce(tensors, opts); });
  }
  Pointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::allreduce_coalesced(tensors, opts); });
  }
  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::reduce(tensors, opts); });
  }
  Pointer allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::allgather(outputs, inputs, opts); });
  }
  Pointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::_allgather_base(output, input, opts); });
  }
  Pointer reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::reduce_scatter(outputs, inputs, opts); });
  }
  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::_reduce_scatter_base(output, input, opts); });
  }
  Pointer gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::gather(outputs, inputs, opts); });
  }
  Pointer scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::scatter(outputs, inputs, opts); });
  }
  Pointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                        std::vector<int64_t>& input_counts, const c10d::AllToAllOptions& opts) override {
    return locked([&] {
      return ProcessGroupNCCL::alltoall_base(output, input, output_counts, input_counts, opts);
    });
  }
  Pointer send(Tensors& tensors, int peer, int tag) override {
    return locked([&] { return ProcessGroupNCCL::send(tensors, peer, tag); });
  }
  Pointer recv(Tensors& tensors, int peer, int tag) override {
    return locked([&] { return ProcessGroupNCCL::recv(tensors, peer, tag); });
  }
  Pointer barrier(const c10d::BarrierOptions& opts) override {
    return locked([&] { return ProcessGroupNCCL::barrier(opts); });
  }

 private:
  template <class Call>
  Pointer locked(Call&& call) {
    std::lock_guard<std::recursive_mutex> held(order_);
    return call();
  }

  std::recursive_mutex order_;
};
#endif

// Gives access to the connections, which are protected, in order to close them.
class Gloo : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;
  void close() {
    for (auto& context : contexts_) context->closeConnections();
  }
};

template <class Options>
Options timed(int64_t timeout_ms) {
  Options options;
  if (timeout_ms > 0) options.timeout = std::chrono::milliseconds(timeout_ms);
  return options;
}

}  // namespace

extern "C" od_status* od_group_gloo(const od_store* store, int32_t rank, int32_t size,
                                    int64_t timeout_ms, const char* interface, const char* address,
                                    od_group** out) noexcept {
  return guard([&] {
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::milliseconds(timeout_ms));
    options->devices.push_back(
        interface ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
        : address ? c10d::ProcessGroupGloo::createDeviceForHostname(address)
                  : c10d::ProcessGroupGloo::createDefaultDevice());
    auto gloo = c10::make_intrusive<Gloo>(store->store, rank, size, options);
    auto watch = std::make_shared<Watch>(rank, size);
    auto close = [gloo] { overdrive::discard([&] { gloo->close(); }); };
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store->store, rank, size);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    const auto watched = c10::make_intrusive<WatchedBackend>(std::move(gloo), watch);
    for (const auto type : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
      group->setBackend(type, c10d::ProcessGroup::BackendType::GLOO, watched);
    }
    *out = new od_group{std::move(group), std::move(watch), std::move(close)};
  });
}

extern "C" od_status* od_group_nccl(const od_store* store, int32_t rank, int32_t size,
                                    int64_t timeout_ms, int32_t device, od_group** out) noexcept {
  return guard([&] {
#ifdef OVERDRIVE_NCCL
    const at::Device bound(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    // As `torch.cuda.set_device` does: what names no device, such as the handle of a library, would otherwise
    // go to the first one.
    c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).setDevice(bound);
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = std::chrono::milliseconds(timeout_ms);
    auto nccl = c10::make_intrusive<Nccl>(store->store, rank, size, options);
    nccl->setBoundDeviceId(bound);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store->store, rank, size);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
    // Not watched: its works are events on streams, which a thread of libtorch's NCCL backend watches. It ends the
    // process at a timeout; a lost peer is noticed by the heartbeats, after which the communicators are aborted, so
    // that the kernels that wait for the peer end.
    group->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, nccl);
    auto abort = [nccl] { overdrive::discard([&] { nccl->abort(); }); };
    // The destructor aborts what still runs, as if the process were ending.
    auto leave = [nccl] { overdrive::discard([&] { nccl->shutdown(); }); };
    *out = new od_group{std::move(group), std::make_shared<Watch>(rank, size), std::move(abort), std::move(leave),
                        /*asks_watch=*/true};
#else
    throw overdrive::BadArgument(
        "this build has no NCCL: build with the feature `nccl` where nccl.h, the CUDA headers and "
        "libtorch_cuda are, or use the backend gloo");
#endif
  });
}

extern "C" void od_group_free(od_group* group) noexcept {
  overdrive::discard([&] {
    if (!group->watch->is_aborted()) group->leave();
    delete group;
  });
}

namespace {

// libtorch 2.13 has renamed two functions.
#if OVERDRIVE_TORCH_AT_LEAST(2, 13)
constexpr auto reduce_scatter_single = &c10d::ProcessGroup::reduce_scatter_single;
constexpr auto all_to_all_single = &c10d::ProcessGroup::all_to_all_single;
#else
constexpr auto reduce_scatter_single = &c10d::ProcessGroup::_reduce_scatter_base;
constexpr auto all_to_all_single = &c10d::ProcessGroup::alltoall_base;
#endif

}  // namespace

extern "C" od_status* od_group_start(od_group* group, const od_collective* call,
                                     od_work** out) noexcept {
  return guard([&] {
    using namespace c10d;
    auto& on = *group->group;
    if (group->asks_watch) group->watch->check();
    auto inputs = overdrive::as_tensors(call->inputs, call->n_inputs);
    auto outputs = overdrive::as_tensors(call->outputs, call->n_outputs);
    check_tensors(inputs, "input");
    check_tensors(outputs, "output");
    const ReduceOp reduce(static_cast<ReduceOp::RedOpType>(call->reduce_op));
    const auto timeout = call->timeout_ms;
    const auto root = static_cast<int>(call->root);
    std::vector<std::vector<at::Tensor>> lists;
    c10::intrusive_ptr<Work> work;
    switch (call->kind) {
      case OD_ALL_REDUCE: {
        auto options = timed<AllreduceOptions>(timeout);
        options.reduceOp = reduce;
        work = on.allreduce(inputs, options);
        break;
      }
      case OD_BROADCAST: {
        auto options = timed<BroadcastOptions>(timeout);
        options.rootRank = root;
        work = on.broadcast(inputs, options);
        break;
      }
      case OD_REDUCE: {
        auto options = timed<ReduceOptions>(timeout);
        options.reduceOp = reduce;
        options.rootRank = root;
        work = on.reduce(inputs, options);
        break;
      }
      case OD_ALL_GATHER:
        lists.push_back(outputs);
        work = on.allgather(lists, inputs, timed<AllgatherOptions>(timeout));
        break;
      case OD_REDUCE_SCATTER: {
        auto options = timed<ReduceScatterOptions>(timeout);
        options.reduceOp = reduce;
        work = (on.*reduce_scatter_single)(outputs.at(0), inputs.at(0), options);
        break;
      }
      case OD_GATHER: {
        auto options = timed<GatherOptions>(timeout);
        options.rootRank = root;
        if (on.getRank() == root) lists.push_back(outputs);
        work = on.gather(lists, inputs, options);
        break;
      }
      case OD_SCATTER: {
        auto options = timed<ScatterOptions>(timeout);
        options.rootRank = root;
        if (on.getRank() == root) lists.push_back(inputs);
        work = on.scatter(outputs, lists, options);
        break;
      }
      case OD_ALL_TO_ALL: {
        std::vector<int64_t> equal_in, equal_out;
        work = (on.*all_to_all_single)(outputs.at(0), inputs.at(0), equal_out, equal_in,
                                       timed<AllToAllOptions>(timeout));
        break;
      }
      case OD_SEND:
        work = on.send(inputs, root, call->tag);
        break;
      case OD_RECV:
        work = on.recv(inputs, root, call->tag);
        break;
      case OD_BARRIER:
        work = on.barrier(timed<BarrierOptions>(timeout));
        break;
      default:
        throw overdrive::BadArgument("an unknown collective");
    }
    *out = new od_work{std::move(work), group->asks_watch ? group->watch : nullptr};
  });
}

extern "C" od_status* od_work_wait(od_work* work, int64_t timeout_ms) noexcept {
  return guard([&] {
    work->work->wait(std::chrono::milliseconds(timeout_ms));
    // An abort ends the kernels of a collective without a result.
    if (work->watch) work->watch->check();
  });
}

extern "C" int32_t od_work_is_completed(od_work* work) noexcept {
  int32_t done = 0;
  overdrive::discard([&] { done = work->work->isCompleted() ? 1 : 0; });
  return done;
}

extern "C" void od_work_free(od_work* work) noexcept {
  overdrive::discard([&] { delete work; });
}

extern "C" od_status* od_watch_label(od_group* group, const char* label) noexcept {
  return guard([&] { group->watch->label(label); });
}

extern "C" void od_watch_begin(od_group* group) noexcept {
  overdrive::discard([&] { group->watch->begin(); });
}

extern "C" od_status* od_watch_poll(od_group* group, int64_t wait_ms, od_watch_state* out) noexcept {
  return guard([&] { group->watch->poll(std::chrono::milliseconds(wait_ms), out); });
}

extern "C" void od_watch_wake(od_group* group) noexcept {
  overdrive::discard([&] { group->watch->wake(); });
}

extern "C" od_status* od_watch_abort(od_group* group, const char* message) noexcept {
  return guard([&] {
    group->watch->abort(message);
    group->close_connections();
  });
}
