#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/check_arguments.h"
#include "comm/collective_name.h"
#include "comm/local_sum.h"

namespace tessera {
namespace {

using BackendWork = c10::intrusive_ptr<c10d::Work>;

// A collective made of works of the backend, and of what is left to do when they have ended.
class BackendProcessGroupWork : public Work {
 public:
  BackendProcessGroupWork(CollectiveName name, std::chrono::milliseconds timeout,
                          std::vector<BackendWork> works, std::function<void()> finish)
      : name_(std::move(name)),
        timeout_(timeout),
        works_(std::move(works)),
        finish_(std::move(finish)) {}

  void wait() override {
    std::lock_guard lock(mutex_);
    const auto start = std::chrono::steady_clock::now();
    for (const BackendWork& work : works_) {
      wait_for(work, start);
    }
    if (finish_) {
      std::exchange(finish_, nullptr)();
    }
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
      // Zero would mean no timeout at all.
      completed = work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (...) {
      error = std::current_exception();
    }
    if (error || !completed) {
      throw_wait_failed(name_, "its peers", elapsed(), timeout_, error);
    }
  }

  const CollectiveName name_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::vector<BackendWork> works_;
  std::function<void()> finish_;
};

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
        // c10d's Gloo gathers and scatters through temporaries and, worse, all-reduces.
        has_fast_base_collectives_(backend_->getBackendName() != "gloo") {}

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  std::string backend_name() const override { return backend_->getBackendName(); }
  bool has_channels() const override { return false; }

  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag) override {
    at::NoGradGuard no_grad;
    check_all_gather(*this, flat, shard, bounds, tag);
    std::vector<BackendWork> works;
    if (has_fast_base_collectives_ && is_even(bounds)) {
      at::Tensor output = flat.view(-1);
      at::Tensor input = shard.view(-1);
      works.push_back(backend_->_allgather_base(output, input));
      return make_work("all_gather", tag, std::move(works));
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
    return make_work("all_gather", tag, std::move(works));
  }

  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) override {
    at::NoGradGuard no_grad;
    check_reduce_scatter(*this, out, pieces, bounds, options, tag);
    const auto dtype = options.dtype.value_or(out.scalar_type());
    // Of one dtype, the backend knows what it can sum.
    if (dtype != out.scalar_type())
      check_reducible("reduce_scatter", dtype, ReduceOp::kSum, out.scalar_type());
    const at::Tensor flat =
        at::zeros({bounds.back()}, out.options().dtype(dtype).requires_grad(false));
    for (const Piece& piece : pieces) {
      if (piece.data.defined()) {
        flat.narrow(0, piece.begin, piece.numel).copy_(piece.data.view(-1));
      }
      // From here on only the cut is needed: the tensors may go.
    }
    at::Tensor own = part_of(flat, bounds, rank());
    std::vector<BackendWork> works = start_reductions(flat, own, bounds);
    auto finish = [out, own, pieces = cut_of(pieces), options, begin = bounds[rank()]] {
      store_pieces(out, own, pieces, begin, options);
    };
    return make_work("reduce_scatter", tag, std::move(works), std::move(finish));
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) override {
    check_all_reduce(*this, tensor, tag);
    std::vector<at::Tensor> tensors{tensor};
    return make_work("all_reduce", tag, {backend_->allreduce(tensors, {.reduceOp = to_c10d(op)})});
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) override {
    check_broadcast(*this, tensor, root, tag);
    std::vector<at::Tensor> tensors{tensor};
    return make_work("broadcast", tag, {backend_->broadcast(tensors, {.rootRank = root})});
  }

  void barrier(const CollectiveTag& tag) override {
    // Not the backend's: Gloo's rethrows the error of an earlier collective.
    const bool on_device = backend_name() == "nccl";
    const at::Tensor one =
        at::ones({1}, at::TensorOptions().device(on_device ? at::kCUDA : at::kCPU));
    std::vector<at::Tensor> tensors{one};
    make_work("barrier", tag, {backend_->allreduce(tensors)})->wait();
    one.item();  // on a device, waiting only orders the stream
  }

 private:
  // Starts the sums of all parts; `own` is this rank's part of `flat`, or becomes a tensor of its
  // own.
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

  // Stores `own`, the sums of the range from `begin` on, in `out`, but not what lies between
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
      // In the wider dtype of both from here on; `add_` and `copy_` round to that of `out`.
      const auto dtype = c10::promoteTypes(own.scalar_type(), out.scalar_type());
      at::Tensor sum = own.narrow(0, from, to - from).to(dtype);
      const at::Tensor target = out.view(-1).narrow(0, from, to - from);
      if (options.scale != 1.0) {  // in double for integers, of which copy_() drops the fractions
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

  WorkPtr make_work(const char* collective, const CollectiveTag& tag,
                    std::vector<BackendWork> works, std::function<void()> finish = nullptr) {
    CollectiveName name{collective,  std::string(tag.subject),
                        tag.channel, sequences_.at(static_cast<size_t>(tag.channel))++,
                        rank(),      size()};
    return std::make_shared<BackendProcessGroupWork>(std::move(name), timeout_, std::move(works),
                                                     std::move(finish));
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::chrono::milliseconds timeout_;
  const bool has_fast_base_collectives_;
  std::array<std::atomic<int64_t>, 3> sequences_{};
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
