#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <tessera/comm/process_group.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "base/device/device.h"
#include "base/device/side_stream.h"
#include "comm/group/capability.h"
#include "comm/group/collective.h"
#include "comm/group/collective_form.h"
#include "comm/group/collective_name.h"
#include "comm/group/collective_watch.h"
#include "comm/group/encoding.h"
#include "comm/group/peer_message.h"
#include "comm/group/store_sum.h"

namespace tessera {

// [Note: Collectives on a device]
//
// A device's backend queues a collective on a stream of its own, behind the work that is on the
// current stream at that moment, and `wait()` of its work lets the current stream wait. So the host
// never waits, and the order of issue decides what overlaps: a gather that is issued before the
// kernels of one unit runs beside them.
//
// Everything that belongs to a collective, such as copying pieces into one buffer or adding the
// sums to a tensor, is queued on a side stream that waits for the backend's. The stream of the
// kernels goes on, and waits only when `Work::wait()` is called, for the event behind all of it.
// Until then the work keeps the caller's tensors, whose memory the allocator could otherwise give
// to the next kernel. Temporaries belong to the side stream, in whose order they are reused.
namespace {

using BackendWork = c10::intrusive_ptr<c10d::Work>;

bool is_even(std::span<const int64_t> bounds) {
  for (size_t r = 1; r + 1 < bounds.size(); ++r) {
    if (bounds[r + 1] - bounds[r] != bounds[1]) return false;
  }
  return true;
}

at::Tensor part_of(const at::Tensor& flat, std::span<const int64_t> bounds, int rank) {
  return flat.view(-1).narrow(0, bounds[rank], bounds[rank + 1] - bounds[rank]);
}

// A buffer for the bytes of `messages`, concatenated, and the size of each in bytes.
struct MessageRow {
  MessageRow(std::span<const at::Tensor> messages, at::Device device) {
    for (const at::Tensor& message : messages) sizes.push_back(message_bytes(message));
    const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    bytes = at::empty({all}, at::TensorOptions().dtype(at::kByte).device(device));
  }

  // Calls `copy(message, place)`, with both as byte tensors, for each message that is not empty.
  template <class Copy>
  void for_each(std::span<const at::Tensor> messages, const Copy& copy) const {
    int64_t begin = 0;
    for (size_t r = 0; r < messages.size(); begin += sizes[r++]) {
      if (sizes[r] == 0) continue;
      // One element counts as contiguous with any stride, and view() wants 1.
      const at::Tensor message = messages[r].as_strided({messages[r].numel()}, {1});
      copy(message.view(at::kByte), bytes.narrow(0, begin, sizes[r]));
    }
  }

  at::Tensor bytes;
  std::vector<int64_t> sizes;
};

c10d::ReduceOp to_c10d(ReduceOp op) {
  constexpr c10d::ReduceOp::RedOpType kOps[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::MAX,
                                                c10d::ReduceOp::MIN};
  return kOps[static_cast<size_t>(op)];
}

// A small all-reduce that accompanies a collective and compares its form across ranks. A c10d
// backend's own messages carry no names or sizes, so it would accept a tensor of another collective
// for the expected one.
//
// Computes the maxima of the fingerprints and of their negatives. The two maxima are negatives of
// each other exactly if all fingerprints are equal.
class FormComparison {
 public:
  FormComparison(c10d::Backend& backend, const CollectiveForm& form)
      : form_(form), told_(at::empty({2}, at::TensorOptions().dtype(at::kLong))) {
    const auto fingerprint = static_cast<int64_t>(form.fingerprint() >> 1);
    auto* const data = static_cast<int64_t*>(told_.mutable_data_ptr());
    data[0] = fingerprint;
    data[1] = -fingerprint;
    std::vector<at::Tensor> tensors{told_};
    work_ = backend.allreduce(tensors, {.reduceOp = c10d::ReduceOp::MAX});
  }

  const BackendWork& work() const { return work_; }

  // Throws if ranks have issued different collectives. Call it only after `work()` has completed.
  void check(const CollectiveName& name) const {
    const auto* const data = static_cast<const int64_t*>(told_.const_data_ptr());
    TORCH_CHECK_WITH(DistBackendError, data[0] == -data[1], name.describe(),
                     ": ranks issued different collectives at this position; this rank issued ",
                     form_.text(), ". ", kExpectedCalls);
  }

 private:
  CollectiveForm form_;
  at::Tensor told_;
  BackendWork work_;
};

// A collective made of works of a c10d backend and a `finish` function that `wait()` calls once
// they have completed. They are added before anybody waits.
class BackendProcessGroupWork : public Work {
 public:
  // `on_device`: `wait()` lets the current stream wait, and not the host.
  BackendProcessGroupWork(CollectiveName name, std::chrono::milliseconds timeout, bool on_device)
      : name_(std::move(name)), timeout_(timeout), on_device_(on_device) {}

  const CollectiveName& name() const { return name_; }
  void compare(c10d::Backend& backend, const CollectiveForm& form) {
    comparison_.emplace(backend, form);
  }
  void add(BackendWork work) { works_.push_back(std::move(work)); }
  void set_finish(std::function<void()> finish) { finish_ = std::move(finish); }

  void wait() override {
    check_process(mark_, name_);
    std::lock_guard lock(mutex_);
    const auto start = std::chrono::steady_clock::now();
    if (comparison_) {
      wait_for(comparison_->work(), start);
      comparison_->check(name_);
    }
    for (const BackendWork& work : works_) wait_for(work, start);
    if (finish_) std::exchange(finish_, nullptr)();
  }

  bool is_completed() override {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    return lock.owns_lock() && std::all_of(works_.begin(), works_.end(),
                                           [](const auto& work) { return work->isCompleted(); });
  }

 private:
  void wait_for(const BackendWork& work, std::chrono::steady_clock::time_point start) {
    const auto elapsed = [&] { return std::chrono::steady_clock::now() - start; };
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(timeout_ - elapsed());
    std::exception_ptr error;
    bool completed = false;
    try {
      // A timeout of zero would mean no timeout at all; with one, NCCL lets the host wait.
      completed =
          on_device_ ? work->wait() : work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (...) {
      error = std::current_exception();
    }
    if (error || !completed) throw_wait_failed(name_, Awaited::all(), elapsed(), timeout_, error);
  }

  const ProcessMark mark_;
  const CollectiveName name_;
  const std::chrono::milliseconds timeout_;
  const bool on_device_;
  std::mutex mutex_;
  std::optional<FormComparison> comparison_;
  std::vector<BackendWork> works_;
  std::function<void()> finish_;
};

// A collective that is queued on a side stream. See [Note: Collectives on a device].
class QueuedWork : public Work {
 public:
  // `issuer`: the stream that was current when it was issued. `kept`: the tensors that it reads and
  // writes.
  QueuedWork(CollectiveName name, c10::Stream issuer, c10::Event end, std::vector<at::Tensor> kept,
             bool host_waits)
      : name_(std::move(name)),
        issuer_(issuer),
        end_(std::move(end)),
        kept_(std::move(kept)),
        host_waits_(host_waits) {}

  ~QueuedWork() override {
    if (mark_.is_inherited()) return;
    try {
      if (!kept_.empty()) end_.block(issuer_);
      record_end();
    } catch (...) {  // the device has failed; its next call reports it
    }
  }

  void wait() override {
    check_process(mark_, name_);
    const std::lock_guard lock(mutex_);
    const c10::Stream current = current_stream(issuer_.device());
    end_.block(current);
    if (host_waits_) end_.synchronize();
    if (current == issuer_) kept_.clear();  // their memory is reused in its order
  }

  bool is_completed() override { return !mark_.is_inherited() && record_end(); }

 private:
  // Returns whether it has ended, and tells the flight record.
  bool record_end() {
    const bool has_ended = end_.query();
    if (has_ended && name_.watch) name_.watch->completed(name_.record);
    return has_ended;
  }

  const ProcessMark mark_;
  const CollectiveName name_;
  const c10::Stream issuer_;
  const c10::Event end_;
  std::mutex mutex_;
  std::vector<at::Tensor> kept_;
  const bool host_waits_;
};

std::vector<at::Tensor> tensors_of(const Collective& collective) {
  std::vector<at::Tensor> tensors;
  std::visit(
      [&](const auto& call) {
        for_each_tensor(call, [&](const at::Tensor& tensor, bool /*is_written*/) {
          if (tensor.defined()) tensors.push_back(tensor);
        });
      },
      collective.call);
  return tensors;
}

class BackendProcessGroup : public ProcessGroup,
                            public Closable,
                            public Abortable,
                            public Watchable {
 public:
  BackendProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout,
                      c10::DeviceType device)
      : backend_(std::move(backend)),
        timeout_(timeout),
        device_(device),
        // c10d's Gloo implements these through temporaries and, worse, an all-reduce.
        has_fast_base_collectives_(backend_->getBackendName() != "gloo") {}

  // A forked child must leave its parent's connections alone.
  ~BackendProcessGroup() override {
    if (order_.is_inherited()) static_cast<void>(backend_.release());
  }

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  std::string backend_name() const override { return backend_->getBackendName(); }
  bool has_channels() const override { return false; }
  bool sends_plain() const override { return true; }

  // The host's backends end with their objects.
  void close() noexcept override {
    if (is_on_device()) end([this] { backend_->shutdown(); });
  }
  void abort() noexcept override {
    end([this] { backend_->abort(); });
  }

  void set_watch(std::shared_ptr<CollectiveWatch> watch) override {
    order_.set_watch(std::move(watch));
  }
  const std::shared_ptr<CollectiveWatch>& watch() const override { return order_.watch(); }

  // On the CPU, a backend says itself which tensors it takes.
  std::optional<c10::DeviceType> device_type() const override {
    return is_on_device() ? std::optional(device_.type()) : std::nullopt;
  }

 private:
  void end(const std::function<void()>& how) noexcept {
    if (order_.is_inherited() || has_ended_.exchange(true)) return;
    try {
      how();
    } catch (const std::exception& error) {
      TORCH_WARN("[tessera] the connection over ", backend_name(),
                 " did not end in order: ", error.what());
    }
  }

  WorkPtr issue(Collective collective) override {
    TORCH_CHECK_WITH(DistBackendError, !has_ended_, "[", collective.name(), "] unit '",
                     collective.tag.subject, "': the connection over ", backend_name(),
                     " has been closed");
    at::NoGradGuard no_grad;
    return std::visit([&](auto& call) { return issue_call(call, collective); }, collective.call);
  }

  template <class Call>
  WorkPtr issue_call(Call& call, const Collective& collective) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        encoding_of(call) == Encoding::kPlain, "[", collective.name(), "] unit '",
        collective.tag.subject, "': messages over ", backend_name(), " can't be sent as ",
        to_string(encoding_of(call)),
        "; over Gloo's own connections, and between hosts whose ranks share memory, they can");
    const CollectiveForm form = form_of(call, collective.tag);
    const auto work = std::make_shared<BackendProcessGroupWork>(
        order_.next(*this, call.kName, collective.tag, form), timeout_, is_on_device());
    if (is_on_device()) return queue(*work, call, tensors_of(collective));
    if (size() > 1) work->compare(*backend_, form);
    start(*work, call);
    return work;
  }

  // Does not compare the forms of ranks: reading the result would stall the queued work. NCCL has
  // its own checks (TORCH_DISTRIBUTED_DEBUG=DETAIL).
  template <class Call>
  WorkPtr queue(BackendProcessGroupWork& work, Call& call, std::vector<at::Tensor> tensors) {
    const c10::Device device = tensors.empty() ? device_ : tensors.front().device();
    c10::Event end = side_streams_.of(device).run([&] {
      start(work, call);
      work.wait();
    });
    return std::make_shared<QueuedWork>(work.name(), current_stream(device), std::move(end),
                                        std::move(tensors),
                                        /*host_waits=*/std::is_same_v<Call, Barrier>);
  }

  void start(BackendProcessGroupWork& work, AllGather& call) {
    start_gather(work, call.flat, call.shard, call.bounds);
  }

  void start(BackendProcessGroupWork& work, ReduceScatter& call) {
    const auto& [out, pieces, bounds, options] = call;
    const at::Tensor flat =
        at::zeros({bounds.back()}, out.options().dtype(call.dtype()).requires_grad(false));
    for (Piece& piece : call.pieces) {
      if (piece.data.defined()) flat.narrow(0, piece.begin, piece.numel).copy_(piece.data.view(-1));
      piece.data.reset();  // from here on only the pieces' ranges are needed
    }
    const at::Tensor own = start_reductions(work, flat, bounds);
    work.set_finish([flat, out = out, own, pieces = std::move(call.pieces), options = options,
                     begin = bounds[rank()]] { store_pieces(out, own, pieces, begin, options); });
  }

  void start(BackendProcessGroupWork& work, AllReduce& call) {
    std::vector<at::Tensor> tensors{call.tensor};
    work.add(backend_->allreduce(tensors, {.reduceOp = to_c10d(call.op)}));
  }

  void start(BackendProcessGroupWork& work, Broadcast& call) {
    std::vector<at::Tensor> tensors{call.tensor};
    work.add(backend_->broadcast(tensors, {.rootRank = call.root}));
  }

  void start(BackendProcessGroupWork& work, AllToAll& call) {
    auto& [from, to] = call;
    check_agreement(work, from, to);
    // Sent as bytes: a rank without messages need not know the dtype.
    const at::Device device = device_of(from, to);
    MessageRow sent(to, device), received(from, device);
    sent.for_each(to, [](const at::Tensor& message, const at::Tensor& place) {
      place.copy_(message, /*non_blocking=*/true);
    });
    std::vector<int64_t> received_sizes = received.sizes;  // a copy: c10d's Gloo moves from it
    work.add(backend_->alltoall_base(received.bytes, sent.bytes, received_sizes, sent.sizes));
    work.set_finish([sent, received, from = std::move(from)] {
      at::NoGradGuard no_grad_either;
      received.for_each(from, [](const at::Tensor& message, const at::Tensor& place) {
        message.copy_(place, /*non_blocking=*/true);
      });
    });
  }

  void start(BackendProcessGroupWork& work, Barrier& /*call*/) {
    // Does not use the backend's barrier: Gloo's rethrows the error of an earlier collective.
    const at::Tensor one = at::ones({1}, at::TensorOptions().device(device_of({}, {})));
    std::vector<at::Tensor> tensors{one};
    work.add(backend_->allreduce(tensors));
    work.set_finish([one] {});
  }

  // Returns the device of the messages; if all are empty, the device that the backend requires.
  at::Device device_of(std::span<const at::Tensor> from, std::span<const at::Tensor> to) const {
    for (const auto& messages : {from, to}) {
      for (const at::Tensor& message : messages) {
        if (message_numel(message) > 0) return message.device();
      }
    }
    return device_;
  }

  bool is_on_device() const { return !is_host(device_); }

  void start_gather(BackendProcessGroupWork& work, const at::Tensor& flat, const at::Tensor& shard,
                    std::span<const int64_t> bounds) {
    if (has_fast_base_collectives_ && is_even(bounds)) {
      at::Tensor output = flat.view(-1);
      at::Tensor input = shard.view(-1);
      return work.add(backend_->_allgather_base(output, input));
    }
    const at::Tensor own = part_of(flat, bounds, rank());
    if (own.numel() > 0 && own.const_data_ptr() != shard.const_data_ptr()) {
      own.copy_(shard.view(-1));
    }
    for (int owner = 0; owner < size(); ++owner) {
      std::vector<at::Tensor> tensors{part_of(flat, bounds, owner)};
      if (tensors[0].numel() > 0) work.add(backend_->broadcast(tensors, {.rootRank = owner}));
    }
  }

  // Exchanges the forms of all sent and expected messages between ranks, and waits for them: c10d's
  // Gloo accepts a message that is too short, and ends the process for one that is too long.
  // Skipped on a device, where waiting would stall the queued work.
  void check_agreement(BackendProcessGroupWork& work, std::span<const at::Tensor> from,
                       std::span<const at::Tensor> to) {
    if (size() == 1 || is_on_device()) return;
    static_assert(sizeof(MessageForm) == 2 * sizeof(int64_t));
    const int row = 2 * size();  // forms of messages sent to each rank, then of those expected
    std::vector<int64_t> bounds{0};
    for (int r = 0; r < size(); ++r) bounds.push_back(bounds.back() + 2 * row);
    const at::Tensor all = at::zeros({bounds.back()}, at::TensorOptions().dtype(at::kLong));
    auto* const forms = static_cast<MessageForm*>(all.mutable_data_ptr());
    MessageForm* own = forms + rank() * row;
    for (const auto& messages : {to, from})
      own = std::transform(messages.begin(), messages.end(), own, message_form_of);
    start_gather(work, all, part_of(all, bounds, rank()), bounds);
    work.wait();
    const std::string why = disagreement(
        size(), [&](int sender, int receiver) { return forms[sender * row + receiver]; },
        [&](int sender, int receiver) { return forms[receiver * row + size() + sender]; });
    TORCH_CHECK_WITH(DistBackendError, why.empty(), work.name().describe(), ": ", why);
  }

  // Starts the reductions of all parts. Returns the tensor in which this rank's sums arrive: its
  // part of `flat`, or another one.
  at::Tensor start_reductions(BackendProcessGroupWork& work, at::Tensor flat,
                              std::span<const int64_t> bounds) {
    at::Tensor own = part_of(flat, bounds, rank());
    if (has_fast_base_collectives_ && is_even(bounds)) {
      own = at::zeros({own.numel()}, flat.options());
      work.add(backend_->_reduce_scatter_base(own, flat));
      return own;
    }
    for (int owner = 0; owner < size(); ++owner) {
      std::vector<at::Tensor> tensors{part_of(flat, bounds, owner)};
      if (tensors[0].numel() > 0) work.add(backend_->reduce(tensors, {.rootRank = owner}));
    }
    return own;
  }

  // Stores `own`, the sums of the range that starts at `begin`, in `out`. Skips the gaps between
  // pieces.
  static void store_pieces(const at::Tensor& out, const at::Tensor& own,
                           std::span<const Piece> pieces, int64_t begin,
                           const ReduceScatterOptions& options) {
    at::NoGradGuard no_grad;
    for (const Piece& piece : pieces) {
      const int64_t from = std::max<int64_t>(piece.begin - begin, 0);
      const int64_t to = std::min(piece.begin + piece.numel - begin, own.numel());
      if (from >= to) continue;
      store_sum(out.view(-1).narrow(0, from, to - from), own.narrow(0, from, to - from), options);
    }
  }

  ChannelOrder order_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::chrono::milliseconds timeout_;
  const c10::Device device_;
  SideStreams side_streams_;
  std::atomic<bool> has_ended_ = false;
  const bool has_fast_base_collectives_;
};

}  // namespace

ProcessGroupPtr backend_process_group(c10::intrusive_ptr<c10d::Backend> backend,
                                      std::chrono::milliseconds timeout, c10::DeviceType device) {
  TORCH_CHECK_VALUE(backend.defined(), "[backend_process_group] `backend` must be given");
  TORCH_CHECK_VALUE(timeout.count() > 0, "[backend_process_group] `timeout` must be positive; got ",
                    timeout.count(), " ms");
  return std::make_shared<BackendProcessGroup>(std::move(backend), timeout, device);
}

}  // namespace tessera
