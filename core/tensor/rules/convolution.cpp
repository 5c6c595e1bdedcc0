#include "tensor/rules.h"

namespace tessera {
namespace {

// Convolutions and pooling: rows of the batch and channels are cut, never the spatial dims.

const Placement kRows = Shard{0}, kColumns = Shard{1};

std::vector<TensorInfo> convolution_sizes(const OpCall& call) {
  const TensorInfo &input = call.inputs[0], &weight = call.inputs[1];
  const bool transposed = call.argument("transposed").toBool();
  const int64_t groups = call.argument("groups").toInt();
  TensorInfo output{{input.sizes[0], transposed ? weight.sizes[1] * groups : weight.sizes[0]}};
  for (size_t d = 2; d < input.sizes.size(); ++d) {
    const int64_t stride = stretched(call, "stride", d - 2),
                  padding = stretched(call, "padding", d - 2),
                  reach = stretched(call, "dilation", d - 2) * (weight.sizes[d] - 1);
    output.sizes.push_back(transposed ? (input.sizes[d] - 1) * stride - 2 * padding + reach +
                                            stretched(call, "output_padding", d - 2) + 1
                                      : (input.sizes[d] + 2 * padding - reach - 1) / stride + 1);
  }
  return {output};
}

// The dims of the weight that are the channels of the output and of the input.
struct WeightDims {
  Placement output, input;
};
WeightDims weight_dims(const OpCall& call) {
  return call.argument("transposed").toBool() ? WeightDims{kColumns, kRows}
                                              : WeightDims{kRows, kColumns};
}

// Groups would have to be cut along with their channels.
bool has_cut_channels(const OpCall& call, int64_t channels) {
  return call.argument("groups").toInt() == 1 && call.reaches_all(channels);
}

Strategies convolution(const OpCall& call) {
  const WeightDims weight = weight_dims(call);
  Strategies ways;
  const auto add = [&](const Placement& input, const Placement& own_weight, const Placement& bias,
                       const Placement& output) {
    ways.push_back(
        {placed_by_name(call, {{"input", input}, {"weight", own_weight}, {"bias", bias}}),
         {output}});
  };
  if (call.reaches_all(call.inputs[0].sizes[0])) add(kRows, Replicate{}, Replicate{}, kRows);
  if (has_cut_channels(call, call.outputs[0].sizes[1]))
    add(Replicate{}, weight.output, kRows, kColumns);
  if (has_cut_channels(call, call.inputs[0].sizes[1])) add(kColumns, weight.input, kSum, kSum);
  add(kSum, Replicate{}, kSum, kSum);
  add(Replicate{}, kSum, kSum, kSum);
  return ways;
}

std::vector<TensorInfo> convolution_backward_sizes(const OpCall& call) {
  const TensorInfo& gradient = call.inputs[0];
  return call.wanted<TensorInfo>({call.inputs[1], call.inputs[2], {{gradient.sizes[1]}}});
}

Strategies convolution_backward(const OpCall& call) {
  const WeightDims weight = weight_dims(call);
  Strategies ways;
  const auto add = [&](const Placements& inputs, const std::vector<Placement>& outputs) {
    ways.push_back({inputs, call.wanted<Placement>(outputs)});
  };
  if (call.reaches_all(call.inputs[0].sizes[0]))
    add({kRows, kRows, Replicate{}}, {kRows, kSum, kSum});
  if (has_cut_channels(call, call.inputs[0].sizes[1]))
    add({kColumns, Replicate{}, weight.output}, {kSum, weight.output, kRows});
  if (has_cut_channels(call, call.inputs[1].sizes[1]))
    add({Replicate{}, kColumns, weight.input}, {kColumns, weight.input, Replicate{}});
  return ways;
}

// The bias has as many elements as the local part of the gradient has channels.
void local_convolution_backward(const c10::OperatorHandle& op, const std::vector<LocalPart>&,
                                torch::jit::Stack& stack) {
  c10::IValue& sizes = stack[*op.schema().argumentIndexWithName("bias_sizes")];
  if (!sizes.isNone()) sizes = std::vector<int64_t>{stack[0].toTensor().size(1)};
  op.callBoxed(stack);
}

// Random samples have a batch, of one image if the input has none.
template <int64_t kSpatial>
Strategies fractional_pooling(const OpCall& call) {
  return call.inputs[0].ndim() == kSpatial + 2 ? before_spatial<kSpatial>(call) : Strategies();
}

// For max_pool3d alone: LibTorch has no meta kernel for it.
std::vector<TensorInfo> max_pool3d_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0];
  const bool has_stride = !call.argument("stride").toIntVector().empty();
  for (int64_t d = 0; d < 3; ++d) {
    int64_t& size = output.sizes[output.ndim() - 3 + d];
    const int64_t stride = stretched(call, has_stride ? "stride" : "kernel_size", d),
                  padding = stretched(call, "padding", d),
                  reach = stretched(call, "dilation", d) * (stretched(call, "kernel_size", d) - 1);
    const bool rounds_up = call.argument("ceil_mode").toBool();
    int64_t count = (size + 2 * padding - reach - 1 + (rounds_up ? stride - 1 : 0)) / stride + 1;
    // The last window has to start in the input, or in the padding before it.
    if (rounds_up && (count - 1) * stride >= size + padding) --count;
    size = count;
  }
  return {output, output};
}

// An `output_size` for each spatial dim.
template <int64_t kSpatial, int kOutputs>
std::vector<TensorInfo> adapted_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0];
  const auto sizes = call.argument("output_size").toIntVector();
  for (int64_t d = 0; d < kSpatial; ++d)
    output.sizes[output.ndim() - kSpatial + d] = sizes[sizes.size() == 1 ? 0 : d];
  return std::vector<TensorInfo>(kOutputs, output);
}

constexpr RuleEntry kConvolutionRules[] = {
    {"convolution", convolution, convolution_sizes},
    {.name = "convolution_backward",
     .rule = convolution_backward,
     .sizes = convolution_backward_sizes,
     .local = local_convolution_backward},
    {"max_pool2d_with_indices", before_spatial<2>},
    {"max_pool2d_with_indices_backward", before_spatial<2>, like_self},
    {"max_pool3d_with_indices", before_spatial<3>, max_pool3d_sizes},
    {"max_pool3d_with_indices_backward", before_spatial<3>, like_self},
    {"avg_pool1d", before_spatial<1>},
    {"avg_pool2d", before_spatial<2>},
    {"avg_pool2d_backward", before_spatial<2>, like_self},
    {"avg_pool3d", before_spatial<3>},
    {"avg_pool3d_backward", before_spatial<3>, like_self},
    {"adaptive_avg_pool1d", before_spatial<1>, adapted_sizes<1, 1>},
    {"_adaptive_avg_pool2d", before_spatial<2>, adapted_sizes<2, 1>},
    {"_adaptive_avg_pool2d_backward", before_spatial<2>, like_self},
    {"_adaptive_avg_pool3d", before_spatial<3>, adapted_sizes<3, 1>},
    {"_adaptive_avg_pool3d_backward", before_spatial<3>, like_self},
    {"adaptive_max_pool2d", before_spatial<2>, adapted_sizes<2, 2>},
    {"adaptive_max_pool2d_backward", before_spatial<2>, like_self},
    {"adaptive_max_pool3d", before_spatial<3>, adapted_sizes<3, 2>},
    {"adaptive_max_pool3d_backward", before_spatial<3>, like_self},
    {"max_unpool2d", before_spatial<2>, adapted_sizes<2, 1>},
    {"max_unpool3d", before_spatial<3>, adapted_sizes<3, 1>},
    {"fractional_max_pool2d", fractional_pooling<2>},
    {"fractional_max_pool2d_backward", before_spatial<2>, like_self},
    {"fractional_max_pool3d", fractional_pooling<3>},
    {"fractional_max_pool3d_backward", before_spatial<3>, like_self},
};

}  // namespace

std::span<const RuleEntry> convolution_rules() { return kConvolutionRules; }

}  // namespace tessera
