#include "mesh/rules.h"

namespace tessera {
namespace {

// Losses. Their means over cut tensors are decomposed.

constexpr int64_t kNone = 0, kMean = 1;  // at::Reduction

int64_t reduction_of(const OpCall& call) { return call.argument("reduction").toInt(); }

// Losses of each element.
Strategies elementwise_loss(const OpCall& call) {
  const int64_t reduction = reduction_of(call);
  Strategies ways;
  if (reduction == kMean) return ways;
  const TensorInfo whole = broadcast_sizes(call)[0];
  for (int64_t d = 0; d < whole.ndim(); ++d) {
    const Placement output = reduction == kNone ? Placement(Shard{d}) : Placement(kSum);
    ways.push_back({inputs_under(call, d, whole), {output}});
  }
  return ways;
}

std::vector<TensorInfo> loss_sizes(const OpCall& call) {
  if (reduction_of(call) == kNone) return broadcast_sizes(call);
  return {TensorInfo{}};
}

// The gradient of a reduced loss is one number, which is whole and broadcasts.
Strategies elementwise_loss_backward(const OpCall& call) {
  Strategies ways;
  if (reduction_of(call) == kMean) return ways;
  const TensorInfo& self = call.inputs[call.input("self")];
  if (broadcast_sizes(call)[0].sizes != self.sizes) return ways;
  for (int64_t d = 0; d < self.ndim(); ++d)
    ways.push_back({inputs_under(call, d, self), {Shard{d}}});
  return ways;
}

// Pairs of a dim of `self`, other than the classes, and the dim of the target that matches it.
std::vector<std::pair<int64_t, int64_t>> rows_of(const OpCall& call) {
  const int64_t ndim = call.inputs[call.input("self")].ndim();
  std::vector<std::pair<int64_t, int64_t>> rows;
  if (ndim >= 2) rows.emplace_back(0, 0);
  for (int64_t d = 2; d < ndim; ++d) rows.emplace_back(d, d - 1);
  return rows;
}

// Rows are independent of each other; the weight of a mean is already that of the whole batch.
Strategies nll_loss_backward(const OpCall& call) {
  Strategies ways;
  for (const auto& [self, target] : rows_of(call)) {
    const Placement gradient =
        reduction_of(call) == kNone ? Placement(Shard{target}) : Placement(Replicate{});
    ways.push_back(
        {placed_by_name(
             call, {{"self", Shard{self}}, {"target", Shard{target}}, {"grad_output", gradient}}),
         {Shard{self}}});
  }
  return ways;
}

Strategies nll_loss(const OpCall& call) {
  const int64_t reduction = reduction_of(call);
  Strategies ways;
  if (reduction == kMean) return ways;
  for (const auto& [self, target] : rows_of(call)) {
    Strategy way{placed_by_name(call, {{"self", Shard{self}}, {"target", Shard{target}}}),
                 {kSum, kSum}};
    if (reduction == kNone) way.outputs = {Shard{target}, Replicate{}};
    ways.push_back(std::move(way));
  }
  return ways;
}

std::vector<TensorInfo> nll_loss_sizes(const OpCall& call) {
  const bool is_each = reduction_of(call) == kNone && call.inputs[0].ndim() >= 2;
  return {is_each ? TensorInfo{call.inputs[call.input("target")].sizes} : TensorInfo{}, {}};
}

std::vector<RuleEntry> make_loss_rules() {
  std::vector<RuleEntry> rules = {
      {"nll_loss_forward", nll_loss, nll_loss_sizes},
      {"nll_loss2d_forward", nll_loss, nll_loss_sizes},
      {"nll_loss_backward", nll_loss_backward, like_self},
      {"nll_loss2d_backward", nll_loss_backward, like_self},
  };
  for (const auto name : {"mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
                          "binary_cross_entropy", "binary_cross_entropy_with_logits"})
    rules.push_back({name, elementwise_loss, loss_sizes});
  for (const auto name : {"mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
                          "soft_margin_loss_backward", "binary_cross_entropy_backward"})
    rules.push_back({name, elementwise_loss_backward, like_self});
  for (RuleEntry& rule : rules) rule.splits = true;
  return rules;
}

}  // namespace

std::span<const RuleEntry> loss_rules() {
  static const auto* const rules = new std::vector<RuleEntry>(make_loss_rules());
  return *rules;
}

}  // namespace tessera
