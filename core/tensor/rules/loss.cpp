#include <ATen/ops/masked_select.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>
#include <vector>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Losses. Their means over cut tensors are decomposed.

constexpr int64_t kNone = 0, kMean = 1, kSumOfAll = 2;  // at::Reduction

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

// The gradient of a reduced loss is one number: it is whole and broadcasts.
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

// Where classes are cut, each rank has the losses of the targets among its own. See local_nll_loss.
// With reduction = sum, the backward does not read the total weight.
Placements cut_by_classes(const OpCall& call) {
  const Placement total = reduction_of(call) == kSumOfAll ? Placement(kSum) : Replicate{};
  return placed_by_name(call, {{"self", Shard{1}}, {"weight", Shard{0}}, {"total_weight", total}});
}

bool has_classes(const OpCall& call) { return call.inputs[call.input("self")].ndim() >= 2; }

// Targets as indices among the classes of this rank, and this in place of others.
constexpr int64_t kElsewhere = -100;

at::Tensor own_targets(const at::Tensor& target, Range classes, int64_t count, int64_t ignored) {
  const at::Tensor counts = target.ne(ignored);
  if (target.is_cpu()) {
    const at::Tensor is_wrong = target.lt(0).logical_or_(target.ge(count)).logical_and_(counts);
    TORCH_CHECK_INDEX(
        !is_wrong.any().item().toBool(),
        "[nll_loss] targets must be those of classes, or ignore_index; expected 0 to ", count - 1,
        ", got ", at::masked_select(target, is_wrong)[0].item().toLong());
  }
  const at::Tensor own = target.sub(classes.begin);
  const at::Tensor is_own = own.ge(0).logical_and_(own.lt(classes.size())).logical_and_(counts);
  return own.masked_fill(is_own.logical_not_(), kElsewhere);
}

// For classes that are cut: targets of other ranks are ignored here.
void local_nll_loss(const c10::OperatorHandle& op, const std::vector<LocalPart>& parts,
                    torch::jit::Stack& stack) {
  const auto at = [&](const char* name) { return *op.schema().argumentIndexWithName(name); };
  const bool is_backward = op.schema().argumentIndexWithName("grad_output").has_value();
  const LocalPart& self = parts[is_backward ? 1 : 0];
  if (self.sizes.size() < 2 || self.box[1].size() == self.sizes[1]) return op.callBoxed(stack);
  c10::IValue& ignored = stack[at("ignore_index")];
  stack[at("target")] =
      own_targets(stack[at("target")].toTensor(), self.box[1], self.sizes[1], ignored.toInt());
  ignored = kElsewhere;
  if (self.box[1].size() > 0) return op.callBoxed(stack);
  // The kernel needs a class.
  const at::Tensor part = stack[at("self")].toTensor();
  const auto target = stack[at("target")].toTensor().sizes();
  const at::Tensor none = at::zeros({}, part.options());
  const bool is_each = stack[at("reduction")].toInt() == kNone;
  stack = is_backward ? torch::jit::Stack{at::zeros_like(part)}
                      : torch::jit::Stack{is_each ? at::zeros(target, part.options()) : none, none};
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
  if (has_classes(call)) ways.push_back({cut_by_classes(call), {Shard{1}}, /*can_split=*/false});
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
  if (has_classes(call)) {
    const Placement weights = reduction == kNone ? Placement(Replicate{}) : kSum;
    ways.push_back({cut_by_classes(call), {kSum, weights}, /*can_split=*/false});
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
  for (RuleEntry& rule : rules) rule.local = local_nll_loss;
  for (const auto name : {"mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
                          "binary_cross_entropy", "binary_cross_entropy_with_logits"})
    rules.push_back({name, elementwise_loss, loss_sizes});
  for (const auto name : {"mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
                          "soft_margin_loss_backward", "binary_cross_entropy_backward"})
    rules.push_back({name, elementwise_loss_backward, broadcast_sizes});
  for (RuleEntry& rule : rules) rule.splits = true;
  return rules;
}

}  // namespace

std::span<const RuleEntry> loss_rules() {
  static const auto* const rules = new std::vector<RuleEntry>(make_loss_rules());
  return *rules;
}

}  // namespace tessera
