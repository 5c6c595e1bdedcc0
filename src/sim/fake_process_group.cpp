#include <c10/util/Exception.h>
#include <tessera/fake_world.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "group/check_arguments.h"
#include "group/completed_work.h"
#include "group/local_sum.h"
#include "group/math_bits.h"
#include "group/peer_message.h"
#include "message/part_maker.h"

namespace tessera {
namespace {

// The bytes [begin, end) of `flat` repeated to both sides, up to `total` bytes. Each copy doubles
// what is there, so that the number of ranks does not matter.
void repeat(std::byte* flat, int64_t begin, int64_t end, int64_t total) {
  const int64_t period = end - begin;
  if (period == 0) {
    std::memset(flat, 0, total);
    return;
  }
  while (end < total) {
    const int64_t nbytes = std::min(end - begin, total - end);
    std::memcpy(flat + end, flat + begin, nbytes);
    end += nbytes;
  }
  while (begin > 0) {
    const int64_t shift = (end - begin) / period * period;
    const int64_t nbytes = std::min(shift, begin);
    std::memcpy(flat + begin - nbytes, flat + begin - nbytes + shift, nbytes);
    begin -= nbytes;
  }
}

class FakeProcessGroup : public ProcessGroup, public PartMaker {
 public:
  FakeProcessGroup(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::chrono::milliseconds timeout() const override { return std::chrono::minutes(10); }
  std::string backend_name() const override { return "fake"; }
  ProcessGroupPtr make_part(int rank, int size) const override {
    return fake_process_group(rank, size);
  }

  WorkPtr all_gather(const at::Tensor& flat, const at::Tensor& shard,
                     std::span<const int64_t> bounds, const CollectiveTag& tag) override {
    if (WorkPtr work = plain_all_gather(*this, flat, shard, bounds, tag)) return work;
    check_host_all_gather(*this, flat, shard, bounds, tag);
    if (flat.numel() == 0) return completed_;
    auto* const to = static_cast<std::byte*>(flat.mutable_data_ptr());
    const auto item = static_cast<int64_t>(flat.element_size());
    const int64_t begin = bounds[rank_] * item;
    if (shard.numel() > 0 && to + begin != shard.const_data_ptr())
      std::memmove(to + begin, shard.const_data_ptr(), shard.nbytes());
    repeat(to, begin, bounds[rank_ + 1] * item, bounds.back() * item);
    return completed_;
  }

  WorkPtr reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                         std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                         const CollectiveTag& tag) override {
    if (WorkPtr work = plain_reduce_scatter(*this, out, pieces, bounds, options, tag)) return work;
    const at::ScalarType dtype =
        check_host_reduce_scatter(*this, out, pieces, bounds, options, tag);
    for (const Piece& piece : pieces) {
      const int64_t begin = std::max(piece.begin, bounds[rank_]);
      const int64_t end = std::min(piece.begin + piece.numel, bounds[rank_ + 1]);
      if (begin < end) store(out, piece, begin, end, bounds[rank_], options, dtype);
    }
    return completed_;
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) override {
    if (WorkPtr work = plain_all_reduce(*this, tensor, op, tag)) return work;
    check_host_all_reduce(*this, tensor, op, tag);
    if (op != ReduceOp::kSum || tensor.numel() == 0) return completed_;
    void* const data = tensor.mutable_data_ptr();
    const void* const inputs[] = {data};
    reduce_in_order({.dtype = tensor.scalar_type(), .op = op, .scale = static_cast<double>(size_)},
                    data, inputs, tensor.numel());
    return completed_;
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root, const CollectiveTag& tag) override {
    if (WorkPtr work = plain_broadcast(*this, tensor, root, tag)) return work;
    check_host_broadcast(*this, tensor, root, tag);
    return completed_;
  }

  WorkPtr all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                     const CollectiveTag& tag) override {
    if (WorkPtr work = plain_all_to_all(*this, from, to, tag)) return work;
    check_host_all_to_all(*this, from, to, tag);
    const at::Tensor& own = to[rank_];
    for (const at::Tensor& message : from) {
      if (message_numel(message) == 0) continue;
      auto* const data = static_cast<std::byte*>(message.mutable_data_ptr());
      const int64_t total = message_bytes(message), length = std::min(total, message_bytes(own));
      if (length > 0 && data != own.const_data_ptr())
        std::memcpy(data, own.const_data_ptr(), length);
      repeat(data, 0, length, total);
    }
    return completed_;
  }

  void barrier(const CollectiveTag& /*tag*/) override {}

 private:
  // Elements [begin, end) of the sum of equal pieces; `out` begins at `out_begin`.
  void store(const at::Tensor& out, const Piece& piece, int64_t begin, int64_t end,
             int64_t out_begin, const ReduceScatterOptions& options, at::ScalarType dtype) const {
    auto* const to = static_cast<std::byte*>(out.mutable_data_ptr()) +
                     (begin - out_begin) * static_cast<int64_t>(out.element_size());
    if (piece.data.defined()) {
      const void* const inputs[] = {static_cast<const std::byte*>(piece.data.const_data_ptr()) +
                                    (begin - piece.begin) *
                                        static_cast<int64_t>(piece.data.element_size())};
      reduce_in_order({.dtype = dtype,
                       .scale = options.scale * size_,
                       .accumulate = options.accumulate,
                       .out_dtype = out.scalar_type()},
                      to, inputs, end - begin);
    } else if (!options.accumulate) {
      std::memset(to, 0, (end - begin) * static_cast<int64_t>(out.element_size()));
    }
  }

  const int rank_, size_;
  const WorkPtr completed_ = std::make_shared<CompletedWork>();
};

}  // namespace

ProcessGroupPtr fake_process_group(int rank, int size) {
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size,
                    "[fake_world] `rank` must be from 0 to `size` - 1; got rank ", rank, " of ", size);
  return std::make_shared<FakeProcessGroup>(rank, size);
}

}  // namespace tessera
