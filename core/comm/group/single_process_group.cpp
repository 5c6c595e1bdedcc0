#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/comm/process_group.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "comm/group/completed_work.h"
#include "comm/group/local_sum.h"
#include "comm/group/peer_message.h"
#include "comm/group/store_sum.h"

namespace tessera {
namespace {

class SingleProcessGroup : public ProcessGroup {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::chrono::milliseconds timeout() const override { return std::chrono::minutes(10); }
  std::string backend_name() const override { return "single"; }
  bool gathers_sums() const override { return true; }

 private:
  WorkPtr issue(Collective collective) override {
    std::visit([this](const auto& call) { perform(call); }, collective.call);
    return completed_;
  }

  void perform(const AllGather& call) {
    const auto& [flat, shard, bounds, encoding] = call;
    if (flat.numel() == 0 || flat.mutable_data_ptr() == shard.const_data_ptr()) return;
    if (flat.device().is_cpu() && shard.device().is_cpu()) {
      std::memmove(flat.mutable_data_ptr(), shard.const_data_ptr(), flat.nbytes());
    } else {
      at::NoGradGuard no_grad;
      flat.view(-1).copy_(shard.view(-1));
    }
  }

  void perform(const ReduceScatter& call) {
    check_reducible("reduce_scatter", call.dtype(), ReduceOp::kSum, call.out.scalar_type());
    for (const Piece& piece : call.pieces) {
      (call.out.device().is_cpu() ? store_on_cpu : store_on_device)(call.out, piece, call.options);
    }
  }

  void perform(const AllReduce& /*call*/) {}
  void perform(const Broadcast& /*call*/) {}
  void perform(const AllToAll& call) { take_own_message(call.from[0], call.to[0]); }
  void perform(const Barrier& /*call*/) {}

  // Calls no LibTorch operators and uses the arithmetic of the other process groups, so that
  // results are bit-identical.
  static void store_on_cpu(const at::Tensor& out, const Piece& piece,
                           const ReduceScatterOptions& options) {
    const auto element_size = static_cast<int64_t>(out.element_size());
    auto* to = static_cast<std::byte*>(out.mutable_data_ptr()) + piece.begin * element_size;
    if (piece.data.defined()) {
      TORCH_CHECK_VALUE(
          piece.data.device().is_cpu(),
          "[reduce_scatter] pieces must lie in host memory, as `out` does; got device ",
          piece.data.device());
      const void* inputs[] = {piece.data.const_data_ptr()};
      reduce_in_order({piece.data.scalar_type(), ReduceOp::kSum, options.scale, options.accumulate,
                       out.scalar_type()},
                      to, inputs, piece.numel);
    } else if (!options.accumulate) {
      std::memset(to, 0, piece.numel * element_size);
    }
  }

  static void store_on_device(const at::Tensor& out, const Piece& piece,
                              const ReduceScatterOptions& options) {
    at::NoGradGuard no_grad;
    const at::Tensor part = out.view(-1).narrow(0, piece.begin, piece.numel);
    if (piece.data.defined()) {
      store_sum(part, piece.data.view(-1), options);
    } else if (!options.accumulate) {
      part.zero_();
    }
  }

  const WorkPtr completed_ = std::make_shared<CompletedWork>();
};

}  // namespace

ProcessGroupPtr single_process_group() { return std::make_shared<SingleProcessGroup>(); }

}  // namespace tessera
