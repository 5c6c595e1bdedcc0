#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Images and other grids: resized, padded, sampled, or reordered. Rows of the batch and channels
// are cut, never the spatial dims, and no part may be empty.

// Batch and channels of [batch, channels, spatial dims...] are independent of each other.
Strategies by_channel(const OpCall& call) {
  Strategies ways;
  for (const int64_t d : {0, 1}) {
    if (call.reaches_all(call.inputs[0].sizes[d])) ways.push_back(all_cut(call, d));
  }
  return ways;
}

// All channels of an image are sampled at the same places.
Strategies grid_sampler(const OpCall& call) {
  const auto channels = placed_by_name(call, {{"input", Shard{1}}});
  Strategies ways;
  if (call.reaches_all(call.inputs[0].sizes[0])) ways.push_back(all_cut(call, 0));
  if (call.reaches_all(call.inputs[0].sizes[1])) ways.push_back({channels, {Shard{1}}});
  ways.push_back({placed_by_name(call, {{"input", kSum}}), {kSum}});
  return ways;
}

// The gradient of the places has a term for each channel.
Strategies grid_sampler_backward(const OpCall& call) {
  const auto channels = placed_by_name(call, {{"grad_output", Shard{1}}, {"input", Shard{1}}});
  Strategies ways;
  if (call.reaches_all(call.inputs[0].sizes[0])) ways.push_back(all_cut(call, 0));
  // The kernel returns an undefined gradient of the input for a mask without it.
  if (call.reaches_all(call.inputs[0].sizes[1]) && call.outputs.size() == 2)
    ways.push_back({channels, {Shard{1}, kSum}});
  return ways;
}

std::vector<TensorInfo> grid_sampler_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0];
  const TensorInfo& grid = call.inputs[1];
  for (int64_t d = 2; d < output.ndim(); ++d) output.sizes[d] = grid.sizes[d - 1];
  return {output};
}

std::vector<TensorInfo> grid_sampler_backward_sizes(const OpCall& call) {
  return call.wanted<TensorInfo>({call.inputs[1], call.inputs[2]});
}

// Windows of an image as columns, and back: a channel is a block of rows of the columns.
Strategies columns(const OpCall& call) {
  const TensorInfo &input = call.inputs[0], &output = call.outputs[0];
  const int64_t channels = input.ndim() - (input.ndim() > output.ndim() ? 3 : 2);
  Strategies ways;
  if (channels == 1 && call.reaches_all(input.sizes[0])) ways.push_back(all_cut(call, 0));
  if (input.sizes[channels] % call.ranks == 0 && output.sizes[channels] % call.ranks == 0)
    ways.push_back(all_cut(call, channels));
  add_sums(ways, call);
  return ways;
}

std::vector<TensorInfo> column_sizes(const OpCall& call) {
  const TensorInfo& image = call.inputs[0];
  int64_t elements = 1, places = 1;
  for (size_t d = 0; d < 2; ++d) {
    const int64_t kernel = stretched(call, "kernel_size", d);
    const int64_t reach = stretched(call, "dilation", d) * (kernel - 1) + 1;
    const int64_t room =
        image.sizes[image.ndim() - 2 + d] + 2 * stretched(call, "padding", d) - reach;
    elements *= kernel;
    places *= room / stretched(call, "stride", d) + 1;
  }
  TensorInfo output = image;
  output.sizes.pop_back();
  output.sizes.back() = places;
  output.sizes[output.ndim() - 2] *= elements;
  return {output};
}

std::vector<TensorInfo> image_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0];
  const int64_t elements = stretched(call, "kernel_size", 0) * stretched(call, "kernel_size", 1);
  output.sizes[output.ndim() - 2] /= elements;
  output.sizes.back() = stretched(call, "output_size", 0);
  output.sizes.push_back(stretched(call, "output_size", 1));
  return {output};
}

std::vector<TensorInfo> padded_images(const OpCall& call) {
  return surrounded_sizes(call, "padding");
}

// Channels become blocks of pixels, or pixels channels: only the dims before the channels are cut.
Strategies before_channels(const OpCall& call) {
  Strategies ways;
  for (int64_t d = 0; d < call.inputs[0].ndim() - 3; ++d) {
    if (call.reaches_all(call.inputs[0].sizes[d])) ways.push_back(all_cut(call, d));
  }
  add_pending(ways, call);
  return ways;
}

std::vector<RuleEntry> make_spatial_rules() {
  std::vector<RuleEntry> rules = {
      {"grid_sampler_2d", grid_sampler, grid_sampler_sizes},
      {"grid_sampler_2d_backward", grid_sampler_backward, grid_sampler_backward_sizes},
      {"grid_sampler_3d", grid_sampler, grid_sampler_sizes},
      {"grid_sampler_3d_backward", grid_sampler_backward, grid_sampler_backward_sizes},
      {"im2col", columns, column_sizes},
      {"col2im", columns, image_sizes},
      {"pixel_shuffle", before_channels},
      {"pixel_unshuffle", before_channels},
      {"channel_shuffle", before_channels, like_first},
  };
  for (const auto& [forward, backward] : {
           std::pair{"upsample_nearest1d", "upsample_nearest1d_backward"},
           {"upsample_nearest2d", "upsample_nearest2d_backward"},
           {"upsample_nearest3d", "upsample_nearest3d_backward"},
           {"_upsample_nearest_exact1d", "_upsample_nearest_exact1d_backward"},
           {"_upsample_nearest_exact2d", "_upsample_nearest_exact2d_backward"},
           {"_upsample_nearest_exact3d", "_upsample_nearest_exact3d_backward"},
           {"upsample_linear1d", "upsample_linear1d_backward"},
           {"upsample_bilinear2d", "upsample_bilinear2d_backward"},
           {"upsample_bicubic2d", "upsample_bicubic2d_backward"},
           {"upsample_trilinear3d", "upsample_trilinear3d_backward"},
           {"_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward"},
           {"_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa_backward"},
           {"_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward"},
       }) {
    rules.push_back({forward, by_channel});
    rules.push_back({backward, by_channel, nullptr, "input_size"});
  }
  const auto add_pads = [&](const char* forward, const char* backward, Rule rule) {
    rules.push_back({forward, rule, padded_images});
    rules.push_back({backward, rule, like_self});
  };
  add_pads("reflection_pad1d", "reflection_pad1d_backward", before_spatial<1>);
  add_pads("reflection_pad2d", "reflection_pad2d_backward", before_spatial<2>);
  add_pads("reflection_pad3d", "reflection_pad3d_backward", before_spatial<3>);
  add_pads("replication_pad1d", "replication_pad1d_backward", before_spatial<1>);
  add_pads("replication_pad2d", "replication_pad2d_backward", before_spatial<2>);
  add_pads("replication_pad3d", "replication_pad3d_backward", before_spatial<3>);
  for (RuleEntry& rule : rules) rule.splits = true;
  return rules;
}

}  // namespace

std::span<const RuleEntry> spatial_rules() {
  static const auto* const rules = new std::vector<RuleEntry>(make_spatial_rules());
  return *rules;
}

}  // namespace tessera
