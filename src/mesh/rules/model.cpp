#include "mesh/rules.h"

namespace tessera {
namespace {

// Operators that models are made of and that LibTorch can't compute on meta tensors.

const Partial kSum{PartialOp::kSum};

int64_t leading_dims(const OpCall& call, size_t input) {
  return call.inputs[input].ndim() -
         static_cast<int64_t>(call.argument("normalized_shape").toIntVector().size());
}

std::vector<TensorInfo> layer_norm_sizes(const OpCall& call) {
  TensorInfo statistics = call.inputs[0];
  for (int64_t d = leading_dims(call, 0); d < statistics.ndim(); ++d) statistics.sizes[d] = 1;
  return {call.inputs[0], statistics, statistics};
}

// Each row is normalized by itself; weight and bias are needed whole.
Strategies layer_norm(const OpCall& call) {
  Strategies ways;
  for (int64_t d = 0; d < leading_dims(call, 0); ++d) {
    Strategy way{Placements(call.inputs.size(), Replicate{}), Placements(3, Shard{d})};
    way.inputs[0] = Shard{d};
    ways.push_back(std::move(way));
  }
  return ways;
}

std::vector<bool> output_mask(const OpCall& call) {
  std::vector<bool> mask;
  for (const bool wanted : call.argument("output_mask").toBoolList()) mask.push_back(wanted);
  return mask;
}

std::vector<TensorInfo> layer_norm_backward_sizes(const OpCall& call) {
  const TensorInfo weight{call.argument("normalized_shape").toIntVector()};
  const auto mask = output_mask(call);
  std::vector<TensorInfo> sizes;
  if (mask[0]) sizes.push_back(call.inputs[call.input("input")]);
  if (mask[1]) sizes.push_back(weight);
  if (mask[2]) sizes.push_back(weight);
  return sizes;
}

// Rows give the gradients of rows, and terms of the gradients of weight and bias.
Strategies layer_norm_backward(const OpCall& call) {
  const auto mask = output_mask(call);
  Strategies ways;
  for (int64_t d = 0; d < leading_dims(call, call.input("input")); ++d) {
    Strategy way{Placements(call.inputs.size(), Replicate{}), {}};
    for (const char* name : {"grad_out", "input", "mean", "rstd"})
      way.inputs[call.input(name)] = Shard{d};
    if (mask[0]) way.outputs.push_back(Shard{d});
    if (mask[1]) way.outputs.push_back(kSum);
    if (mask[2]) way.outputs.push_back(kSum);
    ways.push_back(std::move(way));
  }
  return ways;
}

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
  ways.push_back({{kSum, Replicate{}}, {kSum}});
  return ways;
}

std::vector<TensorInfo> embedding_backward_sizes(const OpCall& call) {
  return {{{call.argument("num_weights").toInt(), call.inputs[0].sizes.back()}}};
}

Strategies embedding_backward(const OpCall& call) {
  const int64_t indices = call.inputs[1].ndim();
  // The gradient of a row is divided by how often its index is among all of them.
  const bool counts_indices = call.argument("scale_grad_by_freq").toBool();
  Strategies ways;
  for (int64_t d = 0; d < indices && !counts_indices; ++d)
    ways.push_back({{Shard{d}, Shard{d}}, {kSum}});
  ways.push_back({{Shard{indices}, Replicate{}}, {Shard{1}}});
  ways.push_back({{kSum, Replicate{}}, {kSum}});
  return ways;
}

// Batch and heads are independent of each other.
Strategy attention_by(const OpCall& call, int64_t dim) {
  Strategy way{Placements(call.inputs.size(), Shard{dim}),
               Placements(call.outputs.size(), Shard{dim})};
  const int mask = call.input("attn_mask");
  // It broadcasts to the scores, whose first two dims are those of the query.
  if (mask >= 0) way.inputs[mask] = placed_under(call.inputs[mask], dim, call.inputs[0]);
  return way;
}

bool draws_numbers(const OpCall& call) { return call.argument("dropout_p").toDouble() > 0; }

Strategies attention(const OpCall& call) {
  if (draws_numbers(call)) return {};
  const int q = call.input("query"), k = call.input("key");
  Strategies ways;
  for (const int64_t dim : {0, 1}) {
    const int64_t size = call.inputs[q].sizes[dim];
    // Heads of q and k are cut alike only if there are as many.
    if (size != call.inputs[k].sizes[dim] || !call.reaches_all(size)) continue;
    ways.push_back(attention_by(call, dim));
  }
  return ways;
}

std::vector<TensorInfo> attention_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0], sums = call.inputs[0];
  output.sizes[3] = call.inputs[2].sizes[3];
  sums.sizes.pop_back();
  return {output, sums};
}

std::vector<TensorInfo> attention_backward_sizes(const OpCall& call) {
  return {call.inputs[call.input("query")], call.inputs[call.input("key")],
          call.inputs[call.input("value")]};
}

constexpr int64_t kNone = 0, kMean = 1;  // at::Reduction

// Where the mean is taken, each rank would divide by the size of its own part.
Strategies mse_loss(const OpCall& call) {
  const int64_t reduction = call.argument("reduction").toInt();
  Strategies ways;
  if (call.inputs[0].sizes != call.inputs[1].sizes) return ways;
  for (int64_t d = 0; d < call.inputs[0].ndim(); ++d) {
    const bool is_even = call.inputs[0].sizes[d] % call.ranks == 0;
    if (reduction == kMean && !is_even) continue;
    const Placement output = reduction == kNone   ? Placement(Shard{d})
                             : reduction == kMean ? Placement(Partial{PartialOp::kAvg})
                                                  : Placement(kSum);
    ways.push_back({{Shard{d}, Shard{d}}, {output}});
  }
  return ways;
}

std::vector<TensorInfo> mse_loss_sizes(const OpCall& call) {
  if (call.argument("reduction").toInt() == kNone) return broadcast_sizes(call);
  return {TensorInfo{}};
}

std::vector<TensorInfo> like_input(const OpCall& call) { return {call.inputs[call.input("self")]}; }

// Rows are independent of each other; the mean's weight is that of the whole batch already.
Strategies nll_loss_backward(const OpCall& call) {
  if (call.inputs[call.input("self")].ndim() != 2) return {};
  Strategy way{Placements(call.inputs.size(), Replicate{}), {Shard{0}}};
  for (const char* name : {"self", "target"}) way.inputs[call.input(name)] = Shard{0};
  if (call.argument("reduction").toInt() == kNone) way.inputs[call.input("grad_output")] = Shard{0};
  return {way};
}

// By rows, unless the mean is wanted: of that, ranks have neither a part nor a term.
Strategies nll_loss(const OpCall& call) {
  const int64_t reduction = call.argument("reduction").toInt();
  if (call.inputs[0].ndim() != 2 || reduction == kMean) return {};
  Strategy way{Placements(call.inputs.size(), Replicate{}), {}};
  way.inputs[0] = way.inputs[1] = Shard{0};
  if (reduction == kNone) {
    way.outputs = {Shard{0}, Replicate{}};
  } else {
    way.outputs = {kSum, kSum};
  }
  return {way};
}

std::vector<TensorInfo> nll_loss_sizes(const OpCall& call) {
  if (call.argument("reduction").toInt() != kNone || call.inputs[0].ndim() != 2) return {{}, {}};
  return {{{call.inputs[0].sizes[0]}}, {}};
}

constexpr RuleEntry kRules[] = {
    {"mse_loss", mse_loss, mse_loss_sizes},
    {"nll_loss_forward", nll_loss, nll_loss_sizes},
    {"nll_loss_backward", nll_loss_backward, like_input},
    {"native_layer_norm", layer_norm, layer_norm_sizes},
    {"native_layer_norm_backward", layer_norm_backward, layer_norm_backward_sizes},
    {"embedding", embedding, embedding_sizes},
    {"embedding_dense_backward", embedding_backward, embedding_backward_sizes},
    {"_scaled_dot_product_flash_attention_for_cpu", attention, attention_sizes},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", attention, attention_backward_sizes},
};

}  // namespace

std::span<const RuleEntry> model_rules() { return kRules; }

}  // namespace tessera
