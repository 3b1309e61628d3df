// A wrapper of a backend that numbers its collectives, and withholds the error of a failed collective
// until its cause is known.
//
// Gloo's own error says "connection closed by peer" with an address, or "timed out"; the rank at fault
// and its last collective are known only after asking the other ranks. A thread outside of this file does
// that: it polls the watch and then aborts the group with a message. Until then the running collectives
// are neither done nor failed; all of them end with that message, also those that the reducer waits for
// during backward.
#pragma once

#include "handles.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>

namespace overdrive {

class WatchedWork;

class Watch {
 public:
  Watch(int rank, int size) : rank_(rank), size_(size) {}

  // Throws if the group has been aborted. `tensors` describes the tensors, equally on all ranks.
  uint64_t start(const std::string& what, std::string tensors);
  // Sets the text after "on rank 0 of 2" in messages.
  void label(const std::string& label);
  void enlist(uint64_t number, const c10::intrusive_ptr<WatchedWork>& work);
  void finish(uint64_t number);
  // Throws if the group has been aborted. For point-to-point calls, which have no number, because only
  // two ranks take part in them, and for backends that do not report to the watch.
  void check() const;
  bool is_aborted() const;
  // Records a failed collective. Aborts the group at once if nobody watches it.
  void fail(uint64_t number, const std::string& what, const std::string& text);
  // Blocks until the group is aborted.
  void wait_for_abort();
  void abort(const std::string& message);
  std::exception_ptr error(uint64_t number, const std::string& what) const;

  void begin();
  void wake();
  void poll(std::chrono::milliseconds wait, od_watch_state* out);

 private:
  struct Started {
    uint64_t number;
    std::string what;
    std::string tensors;
  };
  // A rank finds the first difference between its collectives and those of a peer that is at most this far
  // ahead.
  static constexpr size_t kRecent = 8;

  std::string describe(uint64_t number, const std::string& what) const;

  const int rank_;
  const int size_;
  mutable std::mutex lock_;
  mutable std::condition_variable changed_;
  std::map<uint64_t, c10::intrusive_ptr<WatchedWork>> pending_;
  uint64_t started_ = 0;
  uint64_t finished_ = 0;
  bool watched_ = false;
  bool woken_ = false;
  bool failed_ = false;
  bool aborted_ = false;
  uint64_t failed_number_ = 0;
  std::deque<Started> recent_;
  std::string label_;
  std::string failed_what_;
  std::string failed_text_;
  std::string message_;
};

class WatchedWork : public c10d::Work {
 public:
  WatchedWork(std::shared_ptr<Watch> watch, uint64_t number, std::string what,
              c10::intrusive_ptr<c10d::Work> inner);

  void follow();  // called once, after it was enlisted
  void give_up();

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::vector<at::Tensor> result() override { return inner_->result(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  uint64_t getSequencenumber() const override { return number_; }
  void synchronize() override { inner_->synchronize(); }
  void abort() override { inner_->abort(); }

 private:
  void end(std::exception_ptr error, const c10::IValue* value);

  const std::shared_ptr<Watch> watch_;
  const uint64_t number_;  // 0: point to point
  const std::string what_;
  const c10::intrusive_ptr<c10d::Work> inner_;
  c10::intrusive_ptr<c10::ivalue::Future> inner_future_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::mutex once_;
  bool ended_ = false;
};

class WatchedBackend : public c10d::Backend {
 public:
  WatchedBackend(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Watch> watch)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        watch_(std::move(watch)) {}

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using Pointer = c10::intrusive_ptr<c10d::Work>;

  Pointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return numbered("broadcast", tensors, [&] { return inner_->broadcast(tensors, opts); });
  }
  Pointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return numbered("all_reduce", tensors, [&] { return inner_->allreduce(tensors, opts); });
  }
  Pointer allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return numbered("all_reduce", tensors,
                    [&] { return inner_->allreduce_coalesced(tensors, opts); });
  }
  Pointer reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return numbered("reduce", tensors, [&] { return inner_->reduce(tensors, opts); });
  }
  Pointer allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return numbered("all_gather", inputs, [&] { return inner_->allgather(outputs, inputs, opts); });
  }
  Pointer _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return numbered("all_gather_into_tensor", {input},
                    [&] { return inner_->_allgather_base(output, input, opts); });
  }
  Pointer gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return numbered("gather", inputs, [&] { return inner_->gather(outputs, inputs, opts); });
  }
  Pointer scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& opts) override {
    return numbered("scatter", outputs, [&] { return inner_->scatter(outputs, inputs, opts); });
  }
  Pointer reduce_scatter(Tensors& outputs, Lists& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    return numbered("reduce_scatter", outputs,
                    [&] { return inner_->reduce_scatter(outputs, inputs, opts); });
  }
  Pointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return numbered("reduce_scatter_tensor", {output},
                    [&] { return inner_->_reduce_scatter_base(output, input, opts); });
  }
  Pointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
                        std::vector<int64_t>& input_counts,
                        const c10d::AllToAllOptions& opts) override {
    return numbered("all_to_all", {input}, [&] {
      return inner_->alltoall_base(output, input, output_counts, input_counts, opts);
    });
  }
  Pointer barrier(const c10d::BarrierOptions& opts) override {
    return numbered("barrier", {}, [&] { return inner_->barrier(opts); });
  }
  Pointer send(Tensors& tensors, int peer, int tag) override {
    return direct("send to rank " + std::to_string(peer),
                  [&] { return inner_->send(tensors, peer, tag); });
  }
  Pointer recv(Tensors& tensors, int peer, int tag) override {
    return direct("recv from rank " + std::to_string(peer),
                  [&] { return inner_->recv(tensors, peer, tag); });
  }

 private:
  template <class Call>
  Pointer numbered(const char* what, at::ArrayRef<at::Tensor> tensors, Call&& call);
  template <class Call>
  Pointer direct(std::string what, Call&& call);

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<Watch> watch_;
  std::mutex order_;
};

// Returns "float [10, 3]"; for several tensors the dtype, their number and the total number of elements.
std::string describe_tensors(at::ArrayRef<at::Tensor> tensors);

template <class Call>
c10::intrusive_ptr<c10d::Work> WatchedBackend::numbered(const char* what,
                                                        at::ArrayRef<at::Tensor> tensors,
                                                        Call&& call) {
  // The lock makes the numbers follow the order in which the backend is called; the backend has no lock.
  std::unique_lock<std::mutex> order(order_);
  const auto number = watch_->start(what, describe_tensors(tensors));
  c10::intrusive_ptr<c10d::Work> inner;
  try {
    inner = call();
  } catch (const std::exception&) {
    watch_->finish(number);  // refused before anything was sent: an error of the arguments, not of a peer
    throw;
  }
  auto work = c10::make_intrusive<WatchedWork>(watch_, number, what, std::move(inner));
  watch_->enlist(number, work);
  order.unlock();
  work->follow();
  return work;
}

template <class Call>
c10::intrusive_ptr<c10d::Work> WatchedBackend::direct(std::string what, Call&& call) {
  watch_->check();
  std::lock_guard<std::mutex> order(order_);
  return c10::make_intrusive<WatchedWork>(watch_, 0, std::move(what), call());
}

}  // namespace overdrive
