#include <ATen/ops/aminmax.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Operators of models that LibTorch can't compute on meta tensors.

std::vector<TensorInfo> embedding_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[1];
  output.sizes.push_back(call.inputs[0].sizes[1]);
  return {output};
}

Strategies embedding(const OpCall& call) {
  const int64_t indices = call.inputs[1].ndim();
  Strategies ways;
  for (int64_t d = 0; d < indices; ++d) ways.push_back({{Replicate{}, Shard{d}}, {Shard{d}}});
  ways.push_back({{Shard{1}, Replicate{}}, {Shard{indices}}});
  ways.push_back({{Shard{0}, Replicate{}}, {kSum}});  // see local_embedding
  ways.push_back({{kSum, Replicate{}}, {kSum}});
  return ways;
}

// As in one process, an index without a row is an error. On a device the kernel finds it.
void check_indices(const at::Tensor& indices, int64_t rows) {
  if (!indices.is_cpu() || indices.numel() == 0) return;
  const auto [least, most] = at::aminmax(indices);
  TORCH_CHECK_INDEX(least.item().toLong() >= 0 && most.item().toLong() < rows,
                    "[embedding] indices must be those of rows; expected 0 to ", rows - 1,
                    ", got some from ", least.item().toLong(), " to ", most.item().toLong());
}

// For a weight that is cut by rows: results whose row is on another rank are zero here.
void local_embedding(const c10::OperatorHandle& op, const std::vector<LocalPart>& parts,
                     torch::jit::Stack& stack) {
  const Range rows = parts[0].box[0];
  if (rows.size() == parts[0].sizes[0]) return op.callBoxed(stack);
  const at::Tensor weight = stack[0].toTensor(), indices = stack[1].toTensor();
  check_indices(indices, parts[0].sizes[0]);
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  stack.clear();
  if (rows.size() == 0) {
    stack.emplace_back(at::zeros(sizes, weight.options()));
    return;
  }
  const at::Tensor own = indices.sub(rows.begin);
  const at::Tensor is_row = indices.ge(0).logical_and_(indices.lt(parts[0].sizes[0]));
  const at::Tensor elsewhere = own.lt(0).logical_or_(own.ge(rows.size())).logical_and_(is_row);
  stack.emplace_back(at::index_select(weight, 0, own.masked_fill(elsewhere, 0).view(-1))
                         .view(sizes)
                         .masked_fill_(elsewhere.unsqueeze(-1), 0));
}

std::vector<TensorInfo> embedding_backward_sizes(const OpCall& call) {
  return {{{call.argument("num_weights").toInt(), call.inputs[0].sizes.back()}}};
}

Strategies embedding_backward(const OpCall& call) {
  const int64_t indices = call.inputs[1].ndim();
  // The gradient of a row is divided by the count of its index among all indices.
  const bool counts_indices = call.argument("scale_grad_by_freq").toBool();
  Strategies ways;
  for (int64_t d = 0; d < indices && !counts_indices; ++d)
    ways.push_back({{Shard{d}, Shard{d}}, {kSum}});
  ways.push_back({{Shard{indices}, Replicate{}}, {Shard{1}}});
  ways.push_back({{kSum, Replicate{}}, {kSum}});
  return ways;
}

// The bags of the columns of the weight are independent of each other.
Strategies embedding_bag_backward(const OpCall& call) {
  if (call.find("sparse") && call.argument("sparse").toBool()) return {};
  constexpr int64_t kMax = 2;
  Strategy way{first_placed(call, Shard{1}), {Shard{1}}};
  const int maximum = call.input("maximum_indices");
  if (call.argument("mode").toInt() == kMax) way.inputs[maximum] = Shard{1};
  return {way, {first_placed(call, kSum), {kSum}}};
}

std::vector<TensorInfo> embedding_bag_backward_sizes(const OpCall& call) {
  return {{{call.argument("num_weights").toInt(), call.inputs[0].sizes[1]}}};
}

constexpr auto kModelRules = with_splits({
    {.name = "embedding", .rule = embedding, .sizes = embedding_sizes, .local = local_embedding},
    {"embedding_dense_backward", embedding_backward, embedding_backward_sizes},
    {"_embedding_bag_backward", embedding_bag_backward, embedding_bag_backward_sizes},
    {"_embedding_bag_dense_backward", embedding_bag_backward, embedding_bag_backward_sizes},
});

}  // namespace

std::span<const RuleEntry> model_rules() { return kModelRules; }

}  // namespace tessera
