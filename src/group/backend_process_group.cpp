#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "group/backend_work.h"
#include "group/channel_order.h"
#include "group/collective_form.h"
#include "group/local_sum.h"
#include "group/peer_message.h"

namespace tessera {
namespace {

bool is_even(std::span<const int64_t> bounds) {
  for (size_t r = 1; r + 1 < bounds.size(); ++r) {
    if (bounds[r + 1] - bounds[r] != bounds[1]) {
      return false;
    }
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
      if (sizes[r] > 0) copy(messages[r].view(at::kByte), bytes.narrow(0, begin, sizes[r]));
    }
  }

  at::Tensor bytes;
  std::vector<int64_t> sizes;
};

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    default:
      return c10d::ReduceOp::SUM;
  }
}

class BackendProcessGroup : public ProcessGroup {
 public:
  BackendProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout)
      : backend_(std::move(backend)),
        timeout_(timeout),
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

 private:
  WorkPtr issue(Collective collective) override {
    at::NoGradGuard no_grad;
    return std::visit(
        [&](auto& call) {
          CollectiveName name = order_.next(*this, call.kName, collective.tag);
          return start(call, std::move(name), form_of(call, collective.tag));
        },
        collective.call);
  }

  WorkPtr start(AllGather& call, CollectiveName name, const CollectiveForm& form) {
    auto comparison = compare(form);
    return make_work(std::move(name), std::move(comparison),
                     start_gather(call.flat, call.shard, call.bounds));
  }

  WorkPtr start(ReduceScatter& call, CollectiveName name, const CollectiveForm& form) {
    const auto& [out, pieces, bounds, options] = call;
    const auto dtype = call.dtype();
    // With a single dtype, the backend itself rejects dtypes that it can't sum.
    if (dtype != out.scalar_type())
      check_reducible("reduce_scatter", dtype, ReduceOp::kSum, out.scalar_type());
    const at::Tensor flat =
        at::zeros({bounds.back()}, out.options().dtype(dtype).requires_grad(false));
    for (const Piece& piece : pieces) {
      if (piece.data.defined()) flat.narrow(0, piece.begin, piece.numel).copy_(piece.data.view(-1));
      // From here on only the pieces' ranges are needed; the tensors may be freed.
    }
    at::Tensor own = part_of(flat, bounds, rank());
    auto comparison = compare(form);
    std::vector<BackendWork> works = start_reductions(flat, own, bounds);
    auto finish = [out, own, pieces = cut_of(std::move(call.pieces)), options,
                   begin = bounds[rank()]] { store_pieces(out, own, pieces, begin, options); };
    return make_work(std::move(name), std::move(comparison), std::move(works), std::move(finish));
  }

  WorkPtr start(AllReduce& call, CollectiveName name, const CollectiveForm& form) {
    std::vector<at::Tensor> tensors{call.tensor};
    auto comparison = compare(form);
    return make_work(std::move(name), std::move(comparison),
                     {backend_->allreduce(tensors, {.reduceOp = to_c10d(call.op)})});
  }

  WorkPtr start(Broadcast& call, CollectiveName name, const CollectiveForm& form) {
    std::vector<at::Tensor> tensors{call.tensor};
    auto comparison = compare(form);
    return make_work(std::move(name), std::move(comparison),
                     {backend_->broadcast(tensors, {.rootRank = call.root})});
  }

  WorkPtr start(AllToAll& call, CollectiveName name, const CollectiveForm& form) {
    auto& [from, to] = call;
    check_agreement(from, to, name, form);
    // Sent as bytes: a rank without messages need not know the dtype.
    const at::Device device = device_of(from, to);
    MessageRow sent(to, device), received(from, device);
    sent.for_each(to, [](const at::Tensor& message, const at::Tensor& place) {
      place.copy_(message, /*non_blocking=*/true);
    });
    std::vector<int64_t> received_sizes = received.sizes;  // a copy: c10d's Gloo moves from it
    std::vector<BackendWork> works{
        backend_->alltoall_base(received.bytes, sent.bytes, received_sizes, sent.sizes)};
    auto finish = [received, from = std::move(from)] {
      at::NoGradGuard no_grad_either;
      received.for_each(from, [](const at::Tensor& message, const at::Tensor& place) {
        message.copy_(place, /*non_blocking=*/true);
      });
    };
    return make_work(std::move(name), /*comparison=*/{}, std::move(works), std::move(finish));
  }

  WorkPtr start(Barrier& /*call*/, CollectiveName name, const CollectiveForm& form) {
    // Does not use the backend's barrier: Gloo's rethrows the error of an earlier collective.
    const at::Tensor one = at::ones({1}, at::TensorOptions().device(device_of({}, {})));
    std::vector<at::Tensor> tensors{one};
    auto comparison = compare(form);
    return make_work(std::move(name), std::move(comparison), {backend_->allreduce(tensors)},
                     [one] { one.item(); });  // on a device, wait() only orders the stream
  }

  // Returns the device of the messages; if all are empty, the device that the backend requires.
  at::Device device_of(std::span<const at::Tensor> from, std::span<const at::Tensor> to) const {
    for (const auto& messages : {from, to}) {
      for (const at::Tensor& message : messages) {
        if (message_numel(message) > 0) return message.device();
      }
    }
    return is_on_device() ? at::kCUDA : at::kCPU;
  }

  bool is_on_device() const { return backend_name() == "nccl"; }

  // Call it before the collective is issued. Returns nothing on a device, where reading the result
  // would stall the queued work; NCCL has its own checks (TORCH_DISTRIBUTED_DEBUG=DETAIL).
  std::optional<FormComparison> compare(const CollectiveForm& form) const {
    if (size() == 1 || is_on_device()) return std::nullopt;
    return FormComparison(*backend_, form);
  }

  std::vector<BackendWork> start_gather(const at::Tensor& flat, const at::Tensor& shard,
                                        std::span<const int64_t> bounds) {
    std::vector<BackendWork> works;
    if (has_fast_base_collectives_ && is_even(bounds)) {
      at::Tensor output = flat.view(-1);
      at::Tensor input = shard.view(-1);
      works.push_back(backend_->_allgather_base(output, input));
      return works;
    }
    const at::Tensor own = part_of(flat, bounds, rank());
    if (own.numel() > 0 && own.const_data_ptr() != shard.const_data_ptr()) {
      own.copy_(shard.view(-1));
    }
    for (int owner = 0; owner < size(); ++owner) {
      std::vector<at::Tensor> tensors{part_of(flat, bounds, owner)};
      if (tensors[0].numel() > 0) {
        works.push_back(backend_->broadcast(tensors, {.rootRank = owner}));
      }
    }
    return works;
  }

  // Exchanges the forms of all sent and expected messages between ranks, and waits for them: c10d's
  // Gloo accepts a message that is too short, and ends the process for one that is too long.
  // Skipped on a device, where waiting would stall the queued work.
  void check_agreement(std::span<const at::Tensor> from, std::span<const at::Tensor> to,
                       const CollectiveName& name, const CollectiveForm& form) {
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
    auto comparison = compare(form);
    make_work(name, std::move(comparison), start_gather(all, part_of(all, bounds, rank()), bounds))
        ->wait();
    const std::string why = disagreement(
        size(), [&](int sender, int receiver) { return forms[sender * row + receiver]; },
        [&](int sender, int receiver) { return forms[receiver * row + size() + sender]; });
    TORCH_CHECK_WITH(DistBackendError, why.empty(), name.describe(), ": ", why);
  }

  // Starts the reductions of all parts. This rank's sums arrive in `own`, which is its part of
  // `flat` or is replaced by a separate tensor.
  std::vector<BackendWork> start_reductions(const at::Tensor& flat, at::Tensor& own,
                                            std::span<const int64_t> bounds) {
    std::vector<BackendWork> works;
    if (has_fast_base_collectives_ && is_even(bounds)) {
      at::Tensor input = flat;
      own = at::zeros({own.numel()}, flat.options());
      works.push_back(backend_->_reduce_scatter_base(own, input));
      return works;
    }
    for (int owner = 0; owner < size(); ++owner) {
      std::vector<at::Tensor> tensors{part_of(flat, bounds, owner)};
      if (tensors[0].numel() > 0) {
        works.push_back(backend_->reduce(tensors, {.rootRank = owner}));
      }
    }
    return works;
  }

  static std::vector<Piece> cut_of(std::vector<Piece> pieces) {
    for (Piece& piece : pieces) {
      piece.data.reset();
    }
    return pieces;
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
      if (from >= to) {
        continue;
      }
      // Computes in the wider of the two dtypes; `add_` and `copy_` round to the dtype of `out`.
      const auto dtype = c10::promoteTypes(own.scalar_type(), out.scalar_type());
      at::Tensor sum = own.narrow(0, from, to - from).to(dtype);
      const at::Tensor target = out.view(-1).narrow(0, from, to - from);
      if (options.scale != 1.0) {  // integers are scaled in double; to() drops the fractions
        sum = at::isFloatingType(sum.scalar_type()) || at::isComplexType(sum.scalar_type())
                  ? sum.mul_(options.scale)
                  : sum.to(at::kDouble).mul_(options.scale).to(sum.scalar_type());
      }
      if (options.accumulate) {
        target.add_(sum);
      } else {
        target.copy_(sum);
      }
    }
  }

  WorkPtr make_work(CollectiveName name, std::optional<FormComparison> comparison,
                    std::vector<BackendWork> works, std::function<void()> finish = nullptr) const {
    return std::make_shared<BackendProcessGroupWork>(
        std::move(name), timeout_, std::move(comparison), std::move(works), std::move(finish));
  }

  ChannelOrder order_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::chrono::milliseconds timeout_;
  const bool has_fast_base_collectives_;
};

}  // namespace

ProcessGroupPtr backend_process_group(c10::intrusive_ptr<c10d::Backend> backend,
                                      std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(backend.defined(), "[backend_process_group] `backend` must be given");
  TORCH_CHECK_VALUE(timeout.count() > 0, "[backend_process_group] `timeout` must be positive; got ",
                    timeout.count(), " ms");
  return std::make_shared<BackendProcessGroup>(std::move(backend), timeout);
}

}  // namespace tessera
