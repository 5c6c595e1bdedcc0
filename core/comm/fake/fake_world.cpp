#include <c10/util/Exception.h>
#include <tessera/comm/fake_world.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>

#include "comm/group/capability.h"
#include "comm/group/completed_work.h"
#include "comm/group/local_sum.h"
#include "comm/group/peer_message.h"

namespace tessera {
namespace {

// Repeats the bytes [begin, end) of `flat` to both sides, up to `total` bytes. Each copy doubles
// the filled part, so that the number of ranks does not matter.
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

class FakeProcessGroup : public ProcessGroup, public MakesParts {
 public:
  FakeProcessGroup(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::chrono::milliseconds timeout() const override { return std::chrono::minutes(10); }
  std::string backend_name() const override { return "fake"; }
  bool gathers_sums() const override { return true; }
  std::optional<c10::DeviceType> device_type() const override { return at::kCPU; }
  ProcessGroupPtr make_part(int rank, int size) const override {
    return fake_process_group(rank, size);
  }

 private:
  WorkPtr issue(Collective collective) override {
    std::visit([this](const auto& call) { perform(call); }, collective.call);
    return completed_;
  }

  void perform(const AllGather& call) const {
    const auto& [flat, shard, bounds, encoding] = call;
    if (flat.numel() == 0 || flat.is_meta()) return;
    auto* const to = static_cast<std::byte*>(flat.mutable_data_ptr());
    const auto item = static_cast<int64_t>(flat.element_size());
    const int64_t begin = bounds[rank_] * item;
    if (shard.numel() > 0 && to + begin != shard.const_data_ptr())
      std::memmove(to + begin, shard.const_data_ptr(), shard.nbytes());
    repeat(to, begin, bounds[rank_ + 1] * item, bounds.back() * item);
  }

  void perform(const ReduceScatter& call) const {
    if (call.out.is_meta()) return;
    for (const Piece& piece : call.pieces) {
      const int64_t begin = std::max(piece.begin, call.bounds[rank_]);
      const int64_t end = std::min(piece.begin + piece.numel, call.bounds[rank_ + 1]);
      if (begin < end) store(call, piece, begin, end);
    }
    const at::Tensor& all = call.options.gather_into;
    if (!all.defined() || all.numel() == 0) return;
    const auto item = static_cast<int64_t>(all.element_size());
    repeat(static_cast<std::byte*>(all.mutable_data_ptr()), call.bounds[rank_] * item,
           call.bounds[rank_ + 1] * item, call.bounds.back() * item);
  }

  void perform(const AllReduce& call) const {
    const auto& [tensor, op] = call;
    if (op != ReduceOp::kSum || tensor.numel() == 0 || tensor.is_meta()) return;
    void* const data = tensor.mutable_data_ptr();
    const void* const inputs[] = {data};
    reduce_in_order({.dtype = tensor.scalar_type(), .op = op, .scale = static_cast<double>(size_)},
                    data, inputs, tensor.numel());
  }

  void perform(const Broadcast& /*call*/) const {}

  void perform(const AllToAll& call) const {
    const at::Tensor& own = call.to[rank_];
    for (const at::Tensor& message : call.from) {
      if (message_numel(message) == 0) continue;
      auto* const data = static_cast<std::byte*>(message.mutable_data_ptr());
      const int64_t total = message_bytes(message), length = std::min(total, message_bytes(own));
      if (length > 0 && data != own.const_data_ptr())
        std::memcpy(data, own.const_data_ptr(), length);
      repeat(data, 0, length, total);
    }
  }

  void perform(const Barrier& /*call*/) const {}

  // Writes elements [begin, end) of the flat buffer: the sum of equal pieces.
  void store(const ReduceScatter& call, const Piece& piece, int64_t begin, int64_t end) const {
    const auto& [out, pieces, bounds, options] = call;
    auto* const to = static_cast<std::byte*>(out.mutable_data_ptr()) +
                     (begin - bounds[rank_]) * static_cast<int64_t>(out.element_size());
    if (piece.data.defined()) {
      const void* const inputs[] = {static_cast<const std::byte*>(piece.data.const_data_ptr()) +
                                    (begin - piece.begin) *
                                        static_cast<int64_t>(piece.data.element_size())};
      reduce_in_order({.dtype = call.dtype(),
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
                    "[fake_world] `rank` must be from 0 to `size` - 1; got rank ", rank, " of ",
                    size);
  return std::make_shared<FakeProcessGroup>(rank, size);
}

World fake_world(int size, int rank) {
  ProcessGroupPtr process_group = fake_process_group(rank, size);
  return World({.rank = rank, .size = size, .source = "fake"},
               c10::make_intrusive<c10d::HashStore>(), std::move(process_group));
}

}  // namespace tessera
