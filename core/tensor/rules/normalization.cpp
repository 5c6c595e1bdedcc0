#include "base/device/device.h"
#include "tensor/rules.h"

namespace tessera {
namespace {

// Layer norm.

// For layer or group norm and their gradients: places tensors with the input's rows, and weights.
Placements norm_inputs(const OpCall& call, const Placement& rows, const Placement& weights) {
  return placed_by_name(call, {{"input", rows},
                               {"grad_out", rows},
                               {"mean", rows},
                               {"rstd", rows},
                               {"weight", weights},
                               {"bias", weights}});
}

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
  for (int64_t d = 0; d < leading_dims(call, 0); ++d)
    ways.push_back({norm_inputs(call, Shard{d}, Replicate{}), Placements(3, Shard{d})});
  return ways;
}

std::vector<TensorInfo> layer_norm_backward_sizes(const OpCall& call) {
  const TensorInfo weight{call.argument("normalized_shape").toIntVector()};
  return call.wanted<TensorInfo>({call.inputs[call.input("input")], weight, weight});
}

// Rows give the gradients of rows, and terms of the gradients of weight and bias.
Strategies layer_norm_backward(const OpCall& call) {
  Strategies ways;
  for (int64_t d = 0; d < leading_dims(call, call.input("input")); ++d) {
    const Placement cut = Shard{d};
    ways.push_back(
        {norm_inputs(call, cut, Replicate{}), call.wanted<Placement>({cut, kSum, kSum})});
  }
  return ways;
}

// Root mean square norm of devices that have a kernel for it.

Strategies rms_norm(const OpCall& call) {
  Strategies ways;
  for (int64_t d = 0; d < leading_dims(call, 0); ++d)
    ways.push_back({norm_inputs(call, Shard{d}, Replicate{}), Placements(2, Shard{d})});
  return ways;
}

std::vector<TensorInfo> rms_norm_sizes(const OpCall& call) {
  const auto sizes = layer_norm_sizes(call);
  return {sizes[0], sizes[1]};
}

Strategies rms_norm_backward(const OpCall& call) {
  Strategies ways;
  for (int64_t d = 0; d < leading_dims(call, call.input("input")); ++d)
    ways.push_back(
        {norm_inputs(call, Shard{d}, Replicate{}), call.wanted<Placement>({Shard{d}, kSum})});
  return ways;
}

std::vector<TensorInfo> rms_norm_backward_sizes(const OpCall& call) {
  const TensorInfo weight{call.argument("normalized_shape").toIntVector()};
  return call.wanted<TensorInfo>({call.inputs[call.input("input")], weight});
}

// Group norm: the groups of a row are independent of each other.

std::vector<TensorInfo> group_norm_sizes(const OpCall& call) {
  const TensorInfo statistics{{call.argument("N").toInt(), call.argument("group").toInt()}};
  return {call.inputs[0], statistics, statistics};
}

bool groups_divide(const OpCall& call) { return call.argument("group").toInt() % call.ranks == 0; }

Strategies group_norm(const OpCall& call) {
  const Placement rows = Shard{0}, channels = Shard{1};
  Strategies ways;
  if (call.reaches_all(call.inputs[0].sizes[0]))
    ways.push_back({norm_inputs(call, rows, Replicate{}), Placements(3, rows)});
  if (groups_divide(call))
    ways.push_back({norm_inputs(call, channels, rows), Placements(3, channels)});
  return ways;
}

std::vector<TensorInfo> group_norm_backward_sizes(const OpCall& call) {
  const TensorInfo weight{{call.argument("C").toInt()}};
  return call.wanted<TensorInfo>({call.inputs[call.input("input")], weight, weight});
}

Strategies group_norm_backward(const OpCall& call) {
  const Placement rows = Shard{0}, channels = Shard{1};
  Strategies ways;
  if (call.reaches_all(call.inputs[call.input("input")].sizes[0]))
    ways.push_back(
        {norm_inputs(call, rows, Replicate{}), call.wanted<Placement>({rows, kSum, kSum})});
  if (groups_divide(call))
    ways.push_back(
        {norm_inputs(call, channels, rows), call.wanted<Placement>({channels, rows, rows})});
  return ways;
}

// Passes the sizes of the local part, and a gradient that is contiguous: the kernel reads its
// memory as such, and LibTorch itself calls it with one zero for all elements (of `sgn()`, say).
void local_group_norm(const c10::OperatorHandle& op, const std::vector<LocalPart>&,
                      torch::jit::Stack& stack) {
  stack[0] = stack[0].toTensor().contiguous();
  const auto argument = [&](std::string_view name) -> c10::IValue& {
    return stack[*op.schema().argumentIndexWithName(std::string(name))];
  };
  const at::Tensor input = argument("input").toTensor();
  const int64_t per_group = argument("C").toInt() / argument("group").toInt();
  argument("N") = input.size(0);
  argument("C") = input.size(1);
  argument("group") = input.size(1) / per_group;
  op.callBoxed(stack);
}

// Batch norm with given statistics. In training it is decomposed.

// Operators that have no such argument say it by their names.
bool is_in_training(const OpCall& call) {
  const c10::IValue* const training = call.find("training");
  return training ? training->toBool() : !call.schema.name().ends_with("_no_training");
}

std::vector<TensorInfo> batch_norm_sizes(const OpCall& call) {
  const c10::Device device = call.argument("input").toTensor().device();
  const bool is_empty = !is_in_training(call) && !has_kernels_of_accelerators(device);
  const int64_t channels = is_empty ? 0 : call.inputs[0].sizes[1];
  return {call.inputs[0], {{channels}}, {{channels}}};
}

Placements batch_norm_inputs(const OpCall& call, int64_t dim, std::string_view gradient) {
  const Placement cut = Shard{dim}, channels = dim == 1 ? Placement(Shard{0}) : Replicate{};
  return placed_by_name(call, {{"input", cut},
                               {gradient, cut},
                               {"weight", channels},
                               {"bias", channels},
                               {"running_mean", channels},
                               {"running_var", channels}});
}

Strategies batch_norm(const OpCall& call) {
  Strategies ways;
  for (int64_t d = 0; d < call.inputs[0].ndim(); ++d) {
    if (is_in_training(call) || !call.reaches_all(call.inputs[0].sizes[d])) continue;
    const bool has_own = d == 1 && call.outputs[1].sizes[0] > 0;
    const Placement statistics = has_own ? Placement(Shard{0}) : Replicate{};
    ways.push_back({batch_norm_inputs(call, d, {}), {Shard{d}, statistics, statistics}});
  }
  return ways;
}

std::vector<TensorInfo> batch_norm_backward_sizes(const OpCall& call) {
  const TensorInfo input = call.inputs[call.input("input")], channels{{input.sizes[1]}};
  return call.wanted<TensorInfo>({input, channels, channels});
}

Strategies batch_norm_backward(const OpCall& call) {
  const TensorInfo& input = call.inputs[call.input("input")];
  Strategies ways;
  for (int64_t d = 0; d < input.ndim(); ++d) {
    if (call.argument("train").toBool() || !call.reaches_all(input.sizes[d])) continue;
    const Placement weight = d == 1 ? Placement(Shard{0}) : kSum;
    ways.push_back({batch_norm_inputs(call, d, "grad_out"),
                    call.wanted<Placement>({Shard{d}, weight, weight})});
  }
  return ways;
}

constexpr auto kNormalizationRules = with_splits({
    // On the CPU, statistics have the input's dtype.
    with_known_sizes("native_layer_norm", layer_norm, layer_norm_sizes),
    {"native_layer_norm_backward", layer_norm_backward, layer_norm_backward_sizes},
    {"_fused_rms_norm", rms_norm, rms_norm_sizes},
    {"_fused_rms_norm_backward", rms_norm_backward, rms_norm_backward_sizes},
    {.name = "native_group_norm",
     .rule = group_norm,
     .sizes = group_norm_sizes,
     .local = local_group_norm},
    {.name = "native_group_norm_backward",
     .rule = group_norm_backward,
     .sizes = group_norm_backward_sizes,
     .local = local_group_norm},
    with_known_sizes("native_batch_norm", batch_norm, batch_norm_sizes),
    with_known_sizes("_native_batch_norm_legit", batch_norm, batch_norm_sizes),
    with_known_sizes("_native_batch_norm_legit_no_training", batch_norm, batch_norm_sizes),
    {"native_batch_norm_backward", batch_norm_backward, batch_norm_backward_sizes},
});

}  // namespace

std::span<const RuleEntry> normalization_rules() { return kNormalizationRules; }

}  // namespace tessera
