#include "group/math_bits.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace tessera {
namespace {

// Brings what came into copies to the tensors that they stand for.
class PlainWork : public Work {
 public:
  struct Output {
    at::Tensor target, plain;
  };
  PlainWork(WorkPtr inner, std::vector<Output> outputs)
      : inner_(std::move(inner)), outputs_(std::move(outputs)) {}

  void wait() override {
    inner_->wait();
    at::NoGradGuard no_grad;
    for (const Output& output : std::exchange(outputs_, {})) output.target.copy_(output.plain);
  }
  void wait_inputs() override { inner_->wait_inputs(); }
  bool is_completed() override { return inner_->is_completed(); }

 private:
  const WorkPtr inner_;
  std::vector<Output> outputs_;
};

// The outputs of a collective, of which some are copied.
class Outputs {
 public:
  at::Tensor add(const at::Tensor& tensor) {
    if (!has_math_bits(tensor)) return tensor;
    outputs_.push_back({tensor, with_plain_memory(tensor)});
    return outputs_.back().plain;
  }
  WorkPtr finish(WorkPtr work) && {
    return std::make_shared<PlainWork>(std::move(work), std::move(outputs_));
  }

 private:
  std::vector<PlainWork::Output> outputs_;
};

}  // namespace

at::Tensor with_plain_memory(const at::Tensor& tensor) {
  if (!has_math_bits(tensor)) return tensor;
  at::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg();
}

WorkPtr plain_all_gather(ProcessGroup& process_group, const at::Tensor& flat,
                         const at::Tensor& shard, std::span<const int64_t> bounds,
                         const CollectiveTag& tag) {
  if (!has_math_bits(flat) && !has_math_bits(shard)) return nullptr;
  Outputs outputs;
  const at::Tensor into = outputs.add(flat);
  return std::move(outputs).finish(
      process_group.all_gather(into, with_plain_memory(shard), bounds, tag));
}

WorkPtr plain_reduce_scatter(ProcessGroup& process_group, const at::Tensor& out,
                             const std::vector<Piece>& pieces, std::span<const int64_t> bounds,
                             const ReduceScatterOptions& options, const CollectiveTag& tag) {
  const auto is_marked = [](const Piece& piece) { return has_math_bits(piece.data); };
  if (!has_math_bits(out) && std::ranges::none_of(pieces, is_marked)) return nullptr;
  Outputs outputs;
  const at::Tensor into = outputs.add(out);
  std::vector<Piece> plain = pieces;
  for (Piece& piece : plain) piece.data = with_plain_memory(piece.data);
  return std::move(outputs).finish(
      process_group.reduce_scatter(into, std::move(plain), bounds, options, tag));
}

WorkPtr plain_all_reduce(ProcessGroup& process_group, const at::Tensor& tensor, ReduceOp op,
                         const CollectiveTag& tag) {
  if (!has_math_bits(tensor)) return nullptr;
  Outputs outputs;
  const at::Tensor into = outputs.add(tensor);
  return std::move(outputs).finish(process_group.all_reduce(into, op, tag));
}

WorkPtr plain_broadcast(ProcessGroup& process_group, const at::Tensor& tensor, int root,
                        const CollectiveTag& tag) {
  if (!has_math_bits(tensor)) return nullptr;
  Outputs outputs;
  const at::Tensor into = outputs.add(tensor);
  return std::move(outputs).finish(process_group.broadcast(into, root, tag));
}

WorkPtr plain_all_to_all(ProcessGroup& process_group, const std::vector<at::Tensor>& from,
                         const std::vector<at::Tensor>& to, const CollectiveTag& tag) {
  if (std::ranges::none_of(from, has_math_bits) && std::ranges::none_of(to, has_math_bits))
    return nullptr;
  Outputs outputs;
  std::vector<at::Tensor> into, sent;
  for (const at::Tensor& tensor : from) into.push_back(outputs.add(tensor));
  for (const at::Tensor& tensor : to) sent.push_back(with_plain_memory(tensor));
  return std::move(outputs).finish(process_group.all_to_all(std::move(into), std::move(sent), tag));
}

}  // namespace tessera
