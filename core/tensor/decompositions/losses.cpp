#include <ATen/ops/div.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/nll_loss2d_forward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/stack.h>

#include "tensor/decompositions.h"
#include "tensor/dist_meta.h"
#include "tensor/placed.h"

namespace tessera {
namespace {

constexpr int64_t kNone = 0, kMean = 1, kSum = 2;  // at::Reduction

// Computes the loss of each element, then their mean over the elements of all ranks.
bool mean_of_losses(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  if (call.argument("reduction").toInt() != kMean || !call.any_cut()) return false;
  torch::jit::Stack losses = call.with({{"reduction", kNone}});
  op.callBoxed(losses);
  return finish(op, stack, {at::mean(losses[0].toTensor())});
}

// The kernel would divide by the size of the local part.
bool mean_of_losses_backward(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  if (call.argument("reduction").toInt() != kMean || !call.any_cut()) return false;
  const at::Tensor gradient =
      at::div(call.tensor("grad_output"), static_cast<double>(call.tensor("self").numel()));
  torch::jit::Stack gradients = call.with({{"grad_output", gradient}, {"reduction", kSum}});
  op.callBoxed(gradients);
  return finish(op, stack, {gradients[0].toTensor()});
}

// Reduces two pending sums in one message.
std::vector<at::Tensor> whole(const at::Tensor& a, const at::Tensor& b, const DeviceMesh& mesh) {
  const at::Tensor both = at::stack({a, b});
  const DistSpecPtr spec = intern(mesh, replicated(mesh));
  const at::Tensor local = placed(both, *spec, "argument");
  const auto one = [&](int64_t index) {
    return make_dist(mesh.is_member() ? local.select(0, index) : local, spec, {});
  };
  return {one(0), one(1)};
}

// The sum of the weighted losses, divided by the sum of the weights of all targets that count.
template <auto kForward>
bool mean_of_classes(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor self = call.tensor("self"), target = call.tensor("target");
  const DistMeta* const meta = find_dist_meta(self);
  if (call.argument("reduction").toInt() != kMean || !meta || self.dim() < 2 || !call.any_cut())
    return false;
  const at::ScalarType dtype = self.scalar_type(), wide = sum_dtype(dtype);
  std::optional<at::Tensor> weight;
  if (call.tensor("weight").defined()) weight = call.tensor("weight").to(wide);
  const auto [sum, weights] =
      kForward(self.to(wide), target, weight, kSum, call.argument("ignore_index").toInt());
  const auto totals = whole(sum, weights, meta->spec->mesh);
  return finish(op, stack, {at::div(totals[0], totals[1]).to(dtype), totals[1].to(dtype)});
}

constexpr DecompositionEntry kLosses[] = {
    {"mse_loss", mean_of_losses},
    {"mse_loss_backward", mean_of_losses_backward},
    {"smooth_l1_loss", mean_of_losses},
    {"smooth_l1_loss_backward", mean_of_losses_backward},
    {"huber_loss", mean_of_losses},
    {"huber_loss_backward", mean_of_losses_backward},
    {"soft_margin_loss", mean_of_losses},
    {"soft_margin_loss_backward", mean_of_losses_backward},
    {"binary_cross_entropy", mean_of_losses},
    {"binary_cross_entropy_backward", mean_of_losses_backward},
    {"binary_cross_entropy_with_logits", mean_of_losses},
    {"nll_loss_forward", mean_of_classes<at::nll_loss_forward>},
    {"nll_loss2d_forward", mean_of_classes<at::nll_loss2d_forward>},
};

}  // namespace

std::span<const DecompositionEntry> loss_decompositions() { return kLosses; }

}  // namespace tessera
