// [Note: Collectives] A collective is one operation of the process group's own stream. There the
// rank meets the others, computes its outputs from their inputs into temporary memory, waits until
// all ranks have done so, and writes its outputs late. It has addresses of tensors only.
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "support/sim_device/backend.h"
#include "support/sim_device/sim_device.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Op = c10d::ReduceOp::RedOpType;
using Deadline = std::chrono::steady_clock::time_point;

// A rank's part of a collective: the form, which must be that of the other ranks, and the tensors
// that they read.
struct Offer {
  std::string form;
  Tensors inputs;
};

// The ranks of a process group, which meet here for each of their collectives.
class MeetingPlace {
 public:
  explicit MeetingPlace(int size) : size_(size) {}

  // Returns the offers of all ranks to collective `number`, once all have come. Throws on all ranks
  // if one does not come in time or has another form.
  const std::vector<Offer>& meet(uint64_t number, int rank, Offer offer, Deadline deadline) {
    std::unique_lock lock(mutex_);
    Meeting& meeting = meetings_[number];
    meeting.offers.resize(size_);
    meeting.offers[rank] = std::move(offer);
    const auto is_complete = [&] { return missing_ranks(meeting).empty(); };
    if (is_complete() && meeting.failure.empty()) {
      meeting.failure = difference(meeting.offers);
      changed_.notify_all();
    }
    wait(lock, meeting, deadline, is_complete);
    check(meeting, number, rank);
    return meeting.offers;
  }

  // Returns once all ranks have read the offers, whose tensors may then be overwritten.
  void part(uint64_t number, int rank, Deadline deadline) {
    std::unique_lock lock(mutex_);
    Meeting& meeting = meetings_.at(number);
    ++meeting.have_read;
    changed_.notify_all();
    wait(lock, meeting, deadline, [&] { return meeting.have_read == size_; });
    check(meeting, number, rank);
    if (++meeting.have_parted == size_) meetings_.erase(number);
  }

  // Fails the collective on the ranks that are in it, or come later.
  void fail(uint64_t number, const std::string& why) {
    std::lock_guard lock(mutex_);
    const auto found = meetings_.find(number);
    if (found != meetings_.end() && found->second.failure.empty()) found->second.failure = why;
    changed_.notify_all();
  }

  // Fails the collectives that have begun, and all later ones.
  void abort() {
    std::lock_guard lock(mutex_);
    is_aborted_ = true;
    changed_.notify_all();
  }

 private:
  struct Meeting {
    std::vector<Offer> offers;  // without a form until the rank has come
    int have_read = 0;
    int have_parted = 0;
    std::string failure;
  };

  static std::string missing_ranks(const Meeting& meeting) {
    std::string ranks;
    for (size_t r = 0; r < meeting.offers.size(); ++r)
      if (meeting.offers[r].form.empty())
        ranks += (ranks.empty() ? "rank " : ", rank ") + std::to_string(r);
    return ranks;
  }

  static std::string difference(const std::vector<Offer>& offers) {
    for (size_t r = 1; r < offers.size(); ++r)
      if (offers[r].form != offers[0].form)
        return c10::str("ranks issued different collectives: rank 0 ", offers[0].form, ", rank ", r,
                        " ", offers[r].form);
    return {};
  }

  template <class Condition>
  void wait(std::unique_lock<std::mutex>& lock, Meeting& meeting, Deadline deadline,
            const Condition& condition) {
    constexpr std::chrono::milliseconds kPoll(20);  // for the end of the program
    while (!condition() && meeting.failure.empty()) {
      const auto now = std::chrono::steady_clock::now();
      if (is_aborted_ || is_ending()) meeting.failure = "aborted";
      if (now >= deadline) meeting.failure = missing_ranks(meeting) + " did not come in time";
      if (meeting.failure.empty()) changed_.wait_until(lock, std::min(deadline, now + kPoll));
    }
    if (!meeting.failure.empty()) changed_.notify_all();
  }

  void check(const Meeting& meeting, uint64_t number, int rank) const {
    TORCH_CHECK_WITH(DistBackendError, meeting.failure.empty(), "[simccl] collective ", number,
                     " (", meeting.offers[rank].form, ", rank ", rank, " of ", size_,
                     "): ", meeting.failure);
  }

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Meeting> meetings_;
  bool is_aborted_ = false;
};

// The place of all ranks that name this token, while one of them keeps it.
std::shared_ptr<MeetingPlace> meeting_place(const std::string& token, int size) {
  static auto& places = *new std::map<std::string, std::weak_ptr<MeetingPlace>>;
  static auto& mutex = *new std::mutex;
  std::lock_guard lock(mutex);
  std::shared_ptr<MeetingPlace> place = places[token].lock();
  if (!place) places[token] = place = std::make_shared<MeetingPlace>(size);
  return place;
}

struct WorkState {
  int device;
  MarkPtr done;
  std::mutex mutex;
  std::exception_ptr error;
};

class SimWork final : public c10d::Work {
 public:
  SimWork(int rank, c10d::OpType type, std::shared_ptr<WorkState> state)
      : c10d::Work(rank, type), state_(std::move(state)) {}

  bool isCompleted() override { return state_->done->is_reached(); }
  bool isSuccess() const override { return state_->done->is_reached() && !exception(); }
  std::exception_ptr exception() const override {
    std::lock_guard lock(state_->mutex);
    return state_->error;
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    current_queue(state_->device).wait_for(state_->done);
    if (opType_ == c10d::OpType::BARRIER) state_->done->wait();
    if (const auto error = exception()) {
      forget_fault(state_->device, error);  // thrown here, not again by a synchronization
      std::rethrow_exception(error);
    }
    throw_fault(state_->device);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }

 private:
  const std::shared_ptr<WorkState> state_;
};

at::Tensor flat_view(const at::Tensor& tensor) {
  const PlainDispatch plain;
  return kernel_view(tensor).view(-1);
}

Tensors flat_views(const Tensors& tensors) {
  Tensors views;
  for (const at::Tensor& tensor : tensors) views.push_back(flat_view(tensor));
  return views;
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, Op op) {
  if (op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG) return a + b;
  if (op == c10d::ReduceOp::PRODUCT) return a * b;
  if (op == c10d::ReduceOp::MIN) return at::minimum(a, b);
  TORCH_CHECK(op == c10d::ReduceOp::MAX, "[simccl] ops are sum, avg, product, min and max");
  return at::maximum(a, b);
}

// Combines a part of the inputs of all ranks, in rank order; half types are summed in float.
at::Tensor reduced(const std::vector<Offer>& offers, Op op,
                   const std::function<at::Tensor(const Offer&)>& part) {
  const auto dtype = part(offers[0]).scalar_type();
  const auto wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  at::Tensor result = part(offers[0]).to(wide);
  for (size_t r = 1; r < offers.size(); ++r) result = combine(result, part(offers[r]).to(wide), op);
  if (op == c10d::ReduceOp::AVG) result = result / static_cast<int64_t>(offers.size());
  return result.to(dtype);
}

at::Tensor first(const Offer& offer) { return offer.inputs[0]; }

Tensors all_firsts(const std::vector<Offer>& offers) {
  Tensors tensors;
  for (const Offer& offer : offers) tensors.push_back(first(offer));
  return tensors;
}

Tensors messages_to(int rank, const std::vector<Offer>& offers, const std::vector<int64_t>& sizes) {
  Tensors messages;
  for (size_t r = 0; r < offers.size(); ++r) {
    messages.push_back(offers[r].inputs[rank]);
    TORCH_CHECK_WITH(DistBackendError, messages[r].numel() == sizes[r],
                     "[simccl] all_to_all: rank ", r, " sends ", messages[r].numel(),
                     " elements to rank ", rank, ", which expects ", sizes[r]);
  }
  return messages;
}

// In elements.
std::vector<int64_t> split_sizes(std::vector<int64_t> rows, const at::Tensor& tensor, int size) {
  if (rows.empty()) rows.assign(size, tensor.size(0) / size);
  TORCH_CHECK(std::ssize(rows) == size && c10::sum_integers(rows) == tensor.size(0),
              "[simccl] expected split sizes for ", size, " ranks of ", tensor.size(0),
              " rows; got ", rows);
  for (int64_t& split : rows) split *= tensor.stride(0);
  return rows;
}

// Computes the values of this rank's outputs, in their order.
using Compute = std::function<Tensors(const std::vector<Offer>& offers)>;

struct Collective {
  c10d::OpType type;
  std::string name;
  std::string form;  // equal on all ranks
  std::chrono::milliseconds timeout;
};

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(std::shared_ptr<MeetingPlace> place, int rank, int size,
             std::chrono::milliseconds timeout)
      : c10d::Backend(rank, size), place_(std::move(place)), timeout_(timeout) {}
  ~SimBackend() override {
    if (stream_) give_back_stream(*stream_);
  }

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("simccl", timeout_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void abort() override { place_->abort(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto root = options.rootRank;
    const Tensors outputs = root == rank_ ? Tensors{} : tensors;
    return issue(
        {c10d::OpType::BROADCAST, "broadcast", form(tensors, "root", root), options.timeout},
        flat_inputs(tensors), outputs,
        [root](const auto& offers) { return Tensors{first(offers[root])}; });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const Op op = options.reduceOp;
    return issue({c10d::OpType::ALLREDUCE, "all_reduce", form(tensors, "op", op), options.timeout},
                 flat_inputs(tensors), tensors,
                 [op](const auto& offers) { return Tensors{reduced(offers, op, first)}; });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Op op = options.reduceOp;
    const auto root = options.rootRank;
    return issue({c10d::OpType::REDUCE, "reduce", form(tensors, "op", op) + form({}, "root", root),
                  options.timeout},
                 flat_inputs(tensors), root == rank_ ? tensors : Tensors{},
                 [op](const auto& offers) { return Tensors{reduced(offers, op, first)}; });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    return issue({c10d::OpType::ALLGATHER, "all_gather", form(inputs), options.timeout},
                 flat_inputs(inputs), one_for_each_rank(outputs.at(0)), all_firsts);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    check_multiple(output, input);
    return issue({c10d::OpType::_ALLGATHER_BASE, "all_gather", form({input}), options.timeout},
                 flat_inputs({input}), {output},
                 [](const auto& offers) { return Tensors{at::cat(all_firsts(offers))}; });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const Op op = options.reduceOp;
    const auto own = [rank = rank_](const Offer& offer) { return offer.inputs[rank]; };
    return issue({c10d::OpType::REDUCE_SCATTER, "reduce_scatter", form(inputs.at(0), "op", op),
                  options.timeout},
                 flat_inputs(one_for_each_rank(inputs[0])), outputs,
                 [op, own](const auto& offers) { return Tensors{reduced(offers, op, own)}; });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check_multiple(input, output);
    const Op op = options.reduceOp;
    const auto own = [rank = rank_, numel = output.numel()](const Offer& offer) {
      return first(offer).narrow(0, rank * numel, numel);
    };
    return issue({c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", form({input}, "op", op),
                  options.timeout},
                 flat_inputs({input}), {output},
                 [op, own](const auto& offers) { return Tensors{reduced(offers, op, own)}; });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    const auto sizes = split_sizes(output_splits, output, size_);
    const auto sent = split_sizes(input_splits, input, size_);
    return issue({c10d::OpType::ALLTOALL_BASE, "all_to_all", dtype_form(input), options.timeout},
                 flat_inputs({input})[0].split_with_sizes(sent), {output},
                 [rank = rank_, sizes](const auto& offers) {
                   return Tensors{at::cat(messages_to(rank, offers, sizes))};
                 });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    std::vector<int64_t> sizes;
    for (const at::Tensor& output : one_for_each_rank(outputs)) sizes.push_back(output.numel());
    return issue(
        {c10d::OpType::ALLTOALL, "all_to_all", dtype_form(inputs.at(0)), options.timeout},
        flat_inputs(one_for_each_rank(inputs)), outputs,
        [rank = rank_, sizes](const auto& offers) { return messages_to(rank, offers, sizes); });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const auto root = options.rootRank;
    return issue({c10d::OpType::GATHER, "gather", form(inputs, "root", root), options.timeout},
                 flat_inputs(inputs), root == rank_ ? one_for_each_rank(outputs.at(0)) : Tensors{},
                 all_firsts);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const auto root = options.rootRank;
    return issue(
        {c10d::OpType::SCATTER, "scatter", form(outputs, "root", root), options.timeout},
        flat_inputs(root == rank_ ? one_for_each_rank(inputs.at(0)) : Tensors{}), outputs,
        [root, rank = rank_](const auto& offers) { return Tensors{offers[root].inputs[rank]}; });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return issue({c10d::OpType::BARRIER, "barrier", "", options.timeout}, {}, {},
                 [](const auto&) { return Tensors{}; });
  }

 private:
  static std::string form(const Tensors& tensors, const char* key = nullptr, int64_t value = 0) {
    std::string text = key ? c10::str(" ", key, "=", value) : "";
    for (const at::Tensor& tensor : tensors)
      text += c10::str(" ", tensor.scalar_type(), "[", tensor.numel(), "]");
    return text;
  }
  // Sizes differ among the ranks of an all-to-all; each compares those of its messages.
  static std::string dtype_form(const at::Tensor& tensor) {
    return c10::str(" ", tensor.scalar_type());
  }

  const Tensors& one_for_each_rank(const Tensors& tensors) const {
    TORCH_CHECK(std::ssize(tensors) == size_, "[simccl] expected a tensor for each of ", size_,
                " ranks, got ", tensors.size());
    return tensors;
  }
  void check_multiple(const at::Tensor& whole, const at::Tensor& part) const {
    TORCH_CHECK(whole.numel() == size_ * part.numel() && whole.dtype() == part.dtype(),
                "[simccl] expected ", size_, " times ", part.numel(), " elements, got ",
                whole.numel());
  }

  Tensors flat_inputs(const Tensors& tensors) {
    check_tensors(tensors);
    return flat_views(tensors);
  }

  // A rank has one device, that of its first collective.
  void check_tensors(const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(tensor.is_privateuseone(),
                  "[simccl] tensors must be on a sim device; got one on ", tensor.device());
      TORCH_CHECK(tensor.is_contiguous(), "[simccl] tensors must be contiguous");
      if (!stream_) stream_ = take_stream(tensor.device().index());
      TORCH_CHECK(tensor.device() == stream_->device(), "[simccl] a rank has one device; expected ",
                  stream_->device(), ", got ", tensor.device());
    }
  }

  // See [Note: Collectives]. `inputs` are views for kernels, `outputs` the caller's tensors.
  WorkPtr issue(const Collective& call, Tensors inputs, const Tensors& outputs, Compute compute) {
    check_tensors(outputs);
    if (!stream_) stream_ = take_stream(current_device());
    StreamQueue& queue = queue_of(*stream_);
    auto state = std::make_shared<WorkState>();
    state->device = queue.device();
    queue.wait_for(current_queue(state->device).mark());
    queue.push(call.name, [state, place = place_, number = number_++, rank = rank_,
                           timeout = call.timeout == c10d::kUnsetTimeout ? timeout_ : call.timeout,
                           offer = Offer{call.name + call.form, std::move(inputs)},
                           outputs = flat_views(outputs), compute = std::move(compute),
                           delay = queue.draw_delay()] {
      try {
        const PlainDispatch plain;
        const Deadline deadline = std::chrono::steady_clock::now() + timeout;
        Tensors results;
        for (const at::Tensor& result : compute(place->meet(number, rank, offer, deadline)))
          results.push_back(result.clone());
        place->part(number, rank, deadline);
        std::this_thread::sleep_for(delay);
        for (size_t i = 0; i < outputs.size(); ++i) {
          const at::Tensor& result = results.at(i);
          TORCH_CHECK(outputs[i].numel() == result.numel() && outputs[i].dtype() == result.dtype(),
                      "[simccl] an output must have ", result.numel(), " elements of ",
                      result.dtype(), ", got ", outputs[i].numel(), " of ", outputs[i].dtype());
          outputs[i].copy_(result);
        }
      } catch (const c10::Error& error) {
        place->fail(number, error.what_without_backtrace());
        std::lock_guard lock(state->mutex);
        state->error = std::current_exception();
        throw;
      }
    });
    state->done = queue.mark();
    return c10::make_intrusive<SimWork>(rank_, call.type, std::move(state));
  }

  const std::shared_ptr<MeetingPlace> place_;
  std::chrono::milliseconds timeout_;
  std::optional<c10::Stream> stream_;
  uint64_t number_ = 0;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> process_group(const std::string& token, int rank, int size,
                                                std::chrono::milliseconds timeout) {
  return c10::make_intrusive<SimBackend>(meeting_place(token, size), rank, size, timeout);
}

c10::intrusive_ptr<c10d::Backend> process_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                int rank, int size,
                                                std::chrono::milliseconds timeout) {
  static std::atomic<int> made{0};
  if (rank == 0) store->set("simccl", "by store " + std::to_string(made++));
  return process_group(store->get_to_str("simccl"), rank, size, timeout);
}

}  // namespace tessera::testing::sim
