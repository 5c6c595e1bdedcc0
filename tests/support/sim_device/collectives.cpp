// [Note: Collectives] A collective is one operation of the process group's own stream. There the
// rank meets the others, computes its outputs from their inputs into temporary memory, waits until
// all ranks have done so, and writes its outputs late. It has addresses of tensors only.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "support/sim_device/meeting.h"
#include "support/sim_device/sim_device.h"
#include "support/sim_device/streams.h"
#include "support/sim_device/tensors.h"

namespace tessera::testing::sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Computes the values of this rank's outputs, in their order.
using Compute = std::function<Tensors(const std::vector<Offer>& offers)>;

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

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG:
      return a + b;
    case c10d::ReduceOp::PRODUCT:
      return a * b;
    case c10d::ReduceOp::MIN:
      return at::minimum(a, b);
    case c10d::ReduceOp::MAX:
      return at::maximum(a, b);
    default:
      TORCH_CHECK(false, "[simccl] reductions are sum, avg, product, min and max");
  }
}

// Combines `part(inputs)` of all ranks, in rank order; half types are summed in float.
template <class Part>
at::Tensor reduced(const std::vector<Offer>& offers, c10d::ReduceOp::RedOpType op,
                   const Part& part) {
  const auto dtype = part(offers[0]).scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto wide = is_half ? at::kFloat : dtype;
  at::Tensor result = part(offers[0]).to(wide, /*non_blocking=*/false, /*copy=*/true);
  for (size_t r = 1; r < offers.size(); ++r) result = combine(result, part(offers[r]).to(wide), op);
  if (op == c10d::ReduceOp::AVG) result /= static_cast<int64_t>(offers.size());
  return result.to(dtype);
}

std::string describe(const std::string& kind, const Tensors& tensors, const std::string& more) {
  std::string text = kind + more;
  for (const at::Tensor& tensor : tensors)
    text += c10::str(" ", tensor.scalar_type(), "[", tensor.numel(), "]");
  return text;
}

std::vector<int64_t> split_sizes(const std::vector<int64_t>& given, const at::Tensor& tensor,
                                 int size) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<int64_t> splits = given;
  if (splits.empty()) {
    TORCH_CHECK(rows % size == 0, "[simccl] ", rows, " rows do not divide by ", size, " ranks");
    splits.assign(size, rows / size);
  }
  TORCH_CHECK(std::ssize(splits) == size, "[simccl] expected a split size for each rank");
  TORCH_CHECK(std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows,
              "[simccl] split sizes must add up to ", rows, " rows");
  for (int64_t& split : splits) split *= rows == 0 ? 0 : tensor.numel() / rows;
  return splits;
}

struct Collective {
  c10d::OpType type;
  std::string name;
  std::string form;  // equal on all ranks
  Tensors inputs;
  Tensors outputs;
  Compute compute;
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
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
    return issue({.type = c10d::OpType::BROADCAST,
                  .name = "broadcast",
                  .form = describe("broadcast", tensors, of_root(root)),
                  .inputs = tensors,
                  .outputs = root == rank_ ? Tensors{} : tensors,
                  .compute = [root](const auto& offers) { return Tensors{offers[root].inputs[0]}; },
                  .timeout = options.timeout});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const c10d::ReduceOp::RedOpType op = options.reduceOp;
    return issue(
        {.type = c10d::OpType::ALLREDUCE,
         .name = "all_reduce",
         .form = describe("all_reduce", tensors, of_op(op)),
         .inputs = tensors,
         .outputs = tensors,
         .compute = [op](const auto& offers) { return Tensors{reduced(offers, op, first)}; },
         .timeout = options.timeout});
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const c10d::ReduceOp::RedOpType op = options.reduceOp;
    return issue(
        {.type = c10d::OpType::REDUCE,
         .name = "reduce",
         .form = describe("reduce", tensors, of_op(op) + of_root(options.rootRank)),
         .inputs = tensors,
         .outputs = options.rootRank == rank_ ? tensors : Tensors{},
         .compute = [op](const auto& offers) { return Tensors{reduced(offers, op, first)}; },
         .timeout = options.timeout});
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    check_list(outputs.at(0));
    return issue({.type = c10d::OpType::ALLGATHER,
                  .name = "all_gather",
                  .form = describe("all_gather", inputs, ""),
                  .inputs = inputs,
                  .outputs = outputs[0],
                  .compute = all_firsts,
                  .timeout = options.timeout});
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    check_multiple(output, input);
    return issue(
        {.type = c10d::OpType::_ALLGATHER_BASE,
         .name = "all_gather",
         .form = describe("all_gather", {input}, ""),
         .inputs = {input},
         .outputs = {output},
         .compute = [](const auto& offers) { return Tensors{at::cat(all_firsts(offers))}; },
         .timeout = options.timeout});
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    check_list(inputs.at(0));
    const c10d::ReduceOp::RedOpType op = options.reduceOp;
    const auto own = [rank = rank_](const Offer& offer) { return offer.inputs[rank]; };
    return issue(
        {.type = c10d::OpType::REDUCE_SCATTER,
         .name = "reduce_scatter",
         .form = describe("reduce_scatter", inputs[0], of_op(op)),
         .inputs = inputs[0],
         .outputs = outputs,
         .compute = [op, own](const auto& offers) { return Tensors{reduced(offers, op, own)}; },
         .timeout = options.timeout});
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    check_multiple(input, output);
    const c10d::ReduceOp::RedOpType op = options.reduceOp;
    const auto own = [begin = rank_ * output.numel(), numel = output.numel()](const Offer& offer) {
      return offer.inputs[0].narrow(0, begin, numel);
    };
    return issue(
        {.type = c10d::OpType::_REDUCE_SCATTER_BASE,
         .name = "reduce_scatter",
         .form = describe("reduce_scatter", {input}, of_op(op)),
         .inputs = {input},
         .outputs = {output},
         .compute = [op, own](const auto& offers) { return Tensors{reduced(offers, op, own)}; },
         .timeout = options.timeout});
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    const auto received = split_sizes(output_splits, output, size_);
    const auto sent = split_sizes(input_splits, input, size_);
    // The splits differ among ranks; each compares those of its messages.
    Tensors messages = flat_view(input).split_with_sizes(sent);
    return issue({.type = c10d::OpType::ALLTOALL_BASE,
                  .name = "all_to_all",
                  .form = c10::str("all_to_all ", input.scalar_type()),
                  .inputs = {input},
                  .outputs = {output},
                  .compute =
                      [rank = rank_, received](const auto& offers) {
                        return Tensors{at::cat(messages_to(rank, offers, received))};
                      },
                  .timeout = options.timeout},
                 std::move(messages));
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    check_list(outputs);
    check_list(inputs);
    std::vector<int64_t> received;
    for (const at::Tensor& output : outputs) received.push_back(output.numel());
    return issue(
        {.type = c10d::OpType::ALLTOALL,
         .name = "all_to_all",
         .form = c10::str("all_to_all ", inputs[0].scalar_type()),
         .inputs = inputs,
         .outputs = outputs,
         .compute = [rank = rank_,
                     received](const auto& offers) { return messages_to(rank, offers, received); },
         .timeout = options.timeout});
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const bool is_root = options.rootRank == rank_;
    if (is_root) check_list(outputs.at(0));
    return issue({.type = c10d::OpType::GATHER,
                  .name = "gather",
                  .form = describe("gather", inputs, of_root(options.rootRank)),
                  .inputs = inputs,
                  .outputs = is_root ? outputs[0] : Tensors{},
                  .compute = all_firsts,
                  .timeout = options.timeout});
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const auto root = options.rootRank;
    if (root == rank_) check_list(inputs.at(0));
    return issue({.type = c10d::OpType::SCATTER,
                  .name = "scatter",
                  .form = describe("scatter", outputs, of_root(root)),
                  .inputs = root == rank_ ? inputs[0] : Tensors{},
                  .outputs = outputs,
                  .compute = [root, rank = rank_](
                                 const auto& offers) { return Tensors{offers[root].inputs[rank]}; },
                  .timeout = options.timeout});
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return issue({.type = c10d::OpType::BARRIER,
                  .name = "barrier",
                  .form = "barrier",
                  .inputs = {},
                  .outputs = {},
                  .compute = [](const auto&) { return Tensors{}; },
                  .timeout = options.timeout});
  }

 private:
  static at::Tensor first(const Offer& offer) { return offer.inputs[0]; }
  static Tensors all_firsts(const std::vector<Offer>& offers) {
    Tensors tensors;
    for (const Offer& offer : offers) tensors.push_back(offer.inputs[0]);
    return tensors;
  }
  static Tensors messages_to(int rank, const std::vector<Offer>& offers,
                             const std::vector<int64_t>& sizes) {
    Tensors messages;
    for (size_t r = 0; r < offers.size(); ++r) {
      messages.push_back(offers[r].inputs[rank]);
      TORCH_CHECK_WITH(DistBackendError, messages[r].numel() == sizes[r],
                       "[simccl] all_to_all: rank ", r, " sends ", messages[r].numel(),
                       " elements to rank ", rank, ", which expects ", sizes[r]);
    }
    return messages;
  }
  static std::string of_root(int64_t root) { return " of root " + std::to_string(root); }
  static std::string of_op(c10d::ReduceOp::RedOpType op) {
    return " by op " + std::to_string(static_cast<int>(op));
  }

  void check_list(const Tensors& tensors) const {
    TORCH_CHECK(std::ssize(tensors) == size_, "[simccl] expected a tensor for each of ", size_,
                " ranks, got ", tensors.size());
  }
  void check_multiple(const at::Tensor& whole, const at::Tensor& part) const {
    TORCH_CHECK(whole.numel() == size_ * part.numel() && whole.dtype() == part.dtype(),
                "[simccl] expected ", size_, " times ", part.numel(), " elements, got ",
                whole.numel());
  }

  // The one device of the tensors; without any, the device of the collectives before.
  int device_for(const Collective& call) {
    for (const Tensors& tensors : {call.inputs, call.outputs}) {
      for (const at::Tensor& tensor : tensors) {
        TORCH_CHECK(tensor.is_privateuseone(), "[simccl] ", call.name,
                    ": tensors must be on a sim device; got one on ", tensor.device());
        TORCH_CHECK(tensor.is_contiguous(), "[simccl] ", call.name, ": tensors must be contiguous");
        if (!stream_) stream_ = take_stream(tensor.device().index());
        TORCH_CHECK(tensor.device() == stream_->device(), "[simccl] ", call.name,
                    ": a rank has one device; expected ", stream_->device(), ", got ",
                    tensor.device());
      }
    }
    if (!stream_) stream_ = take_stream(current_device());
    return stream_->device_index();
  }

  // `messages`: the inputs as other ranks read them, if not one message each. See [Note:
  // Collectives].
  WorkPtr issue(const Collective& call, std::optional<Tensors> messages = std::nullopt) {
    auto state = std::make_shared<WorkState>();
    state->device = device_for(call);
    StreamQueue& queue = queue_of(*stream_);
    queue.wait_for(current_queue(state->device).mark());
    const auto timeout = call.timeout == c10d::kUnsetTimeout ? timeout_ : call.timeout;
    queue.push(call.name, [state, place = place_, number = number_++, rank = rank_, timeout,
                           offer = Offer{call.form, messages.value_or(flat_views(call.inputs))},
                           outputs = flat_views(call.outputs), compute = call.compute,
                           delay = queue.draw_delay()] {
      try {
        run(*place, number, rank, timeout, offer, outputs, compute, delay);
      } catch (...) {
        std::lock_guard lock(state->mutex);
        state->error = std::current_exception();
        throw;
      }
    });
    state->done = queue.mark();
    return c10::make_intrusive<SimWork>(rank_, call.type, std::move(state));
  }

  static void run(MeetingPlace& place, uint64_t number, int rank, std::chrono::milliseconds timeout,
                  const Offer& offer, const Tensors& outputs, const Compute& compute,
                  std::chrono::microseconds delay) {
    const PlainDispatch plain;
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    Tensors results;
    std::exception_ptr error;
    const std::vector<Offer>& offers = place.meet(number, rank, offer, deadline);
    try {
      for (const at::Tensor& result : compute(offers)) results.push_back(result.clone());
    } catch (...) {
      error = std::current_exception();
    }
    place.part(number, deadline);
    if (error) std::rethrow_exception(error);
    std::this_thread::sleep_for(delay);
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_(results.at(i));
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
  const std::string kKey = "simccl";
  if (rank == 0) store->set(kKey, "by store " + std::to_string(made++));
  return process_group(store->get_to_str(kKey), rank, size, timeout);
}

}  // namespace tessera::testing::sim
