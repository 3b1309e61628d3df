// A backend around another one that numbers its collectives, and holds back the error of one that fails
// until someone has found out why.
//
// Gloo's own error says "connection closed by peer" with an address, or "timed out"; which rank is at
// fault, and what it was doing, is known only after asking the others. That is done outside, by a thread
// that polls the watch. Until it has decided, the collectives under way are neither done nor failed;
// then all of them end with its words, also those that the reducer waits for in the middle of backward.
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

  // Throws if the group has failed before. `tensors` says what takes part: it is the same on all ranks.
  uint64_t start(const std::string& what, std::string tensors);
  // What follows "on rank 0 of 2" in messages.
  void label(const std::string& label);
  void enlist(uint64_t number, const c10::intrusive_ptr<WatchedWork>& work);
  void finish(uint64_t number);
  // A point-to-point call has no number: only two ranks take part.
  void check() const;
  // A collective failed. With nobody watching, it is decided at once.
  void fail(uint64_t number, const std::string& what, const std::string& text);
  // Blocks until it is decided what to say.
  void wait_for_decision();
  void decide(const std::string& words);
  std::exception_ptr error(uint64_t number, const std::string& what) const;

  void begin();
  void wake();
  void poll(std::chrono::milliseconds wait, od_watch_state* out);

 private:
  struct Begun {
    uint64_t number;
    std::string what;
    std::string tensors;
  };
  // As many as a rank may be ahead of another that looks for the difference between them.
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
  bool decided_ = false;
  uint64_t failed_number_ = 0;
  std::deque<Begun> recent_;
  std::string label_;
  std::string failed_what_;
  std::string failed_text_;
  std::string words_;
};

class WatchedWork : public c10d::Work {
 public:
  WatchedWork(std::shared_ptr<Watch> watch, uint64_t number, std::string what,
              c10::intrusive_ptr<c10d::Work> inner);

  void follow();  // once, after it was enlisted
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

// "float [10, 3]"; of several tensors their number and elements in all.
std::string describe_tensors(at::ArrayRef<at::Tensor> tensors);

template <class Call>
c10::intrusive_ptr<c10d::Work> WatchedBackend::numbered(const char* what,
                                                        at::ArrayRef<at::Tensor> tensors,
                                                        Call&& call) {
  // Numbers are given in the order in which the backend, which has no lock of its own, is called.
  std::unique_lock<std::mutex> order(order_);
  const auto number = watch_->start(what, describe_tensors(tensors));
  c10::intrusive_ptr<c10d::Work> inner;
  try {
    inner = call();
  } catch (const std::exception&) {
    watch_->finish(number);  // refused before it was sent: the arguments, not the peers
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
