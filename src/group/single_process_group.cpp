#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/process_group.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "group/check_arguments.h"
#include "group/completed_work.h"
#include "group/local_sum.h"
#include "group/math_bits.h"
#include "group/peer_message.h"

namespace tessera {
namespace {

class SingleProcessGroup : public ProcessGroup {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::chrono::milliseconds timeout() const override { return std::chrono::minutes(10); }
  std::string backend_name() const override { return "single"; }

  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag) override {
    if (WorkPtr work = plain_all_gather(*this, flat, shard, bounds, tag)) return work;
    check_all_gather(*this, flat, shard, bounds, tag);
    if (flat.numel() == 0 || flat.mutable_data_ptr() == shard.const_data_ptr()) {
      return completed_;
    }
    if (flat.device().is_cpu() && shard.device().is_cpu()) {
      std::memmove(flat.mutable_data_ptr(), shard.const_data_ptr(), flat.nbytes());
    } else {
      at::NoGradGuard no_grad;
      flat.view(-1).copy_(shard.view(-1));
    }
    return completed_;
  }

  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) override {
    if (WorkPtr work = plain_reduce_scatter(*this, out, pieces, bounds, options, tag)) return work;
    check_reduce_scatter(*this, out, pieces, bounds, options, tag);
    const at::ScalarType dtype = options.dtype.value_or(out.scalar_type());
    check_reducible("reduce_scatter", dtype, ReduceOp::kSum, out.scalar_type());
    for (const Piece& piece : pieces) {
      if (out.device().is_cpu()) {
        store_on_cpu(out, piece, options);
      } else {
        store_on_device(out, piece, options);
      }
    }
    return completed_;
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) override {
    if (WorkPtr work = plain_all_reduce(*this, tensor, op, tag)) return work;
    check_all_reduce(*this, tensor, tag);
    return completed_;
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) override {
    if (WorkPtr work = plain_broadcast(*this, tensor, root, tag)) return work;
    check_broadcast(*this, tensor, root, tag);
    return completed_;
  }

  WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                     const CollectiveTag& tag) override {
    if (WorkPtr work = plain_all_to_all(*this, from, to, tag)) return work;
    check_all_to_all(*this, from, to, tag);
    take_own_message(from[0], to[0]);
    return completed_;
  }

  void barrier(const CollectiveTag& tag) override {}

 private:
  // Without operators of LibTorch, and with the arithmetic of the other process groups: results
  // agree to the bit.
  static void store_on_cpu(const at::Tensor& out, const Piece& piece,
                           const ReduceScatterOptions& options) {
    const auto element_size = static_cast<int64_t>(out.element_size());
    auto* to = static_cast<std::byte*>(out.mutable_data_ptr()) + piece.begin * element_size;
    if (piece.data.defined()) {
      check_on_cpu("reduce_scatter", piece.data, {});
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
    if (!options.accumulate) {
      part.zero_();
    }
    if (piece.data.defined()) {
      part.add_(piece.data.view(-1), options.scale);
    }
  }

  const WorkPtr completed_ = std::make_shared<CompletedWork>();
};

}  // namespace

ProcessGroupPtr single_process_group() { return std::make_shared<SingleProcessGroup>(); }

}  // namespace tessera
