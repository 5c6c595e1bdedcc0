#include <algorithm>
#include <array>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Scaled dot product attention of [batch, heads, length, head dim].

// Cuts what has a batch and heads along dim 0 or 1, and leaves what has not: states of generators,
// cumulated lengths.
Placement cut_rows(const TensorInfo& tensor, int64_t dim, const std::array<int64_t, 2>& sizes) {
  const bool has_it =
      tensor.ndim() >= 3 && std::ranges::find(sizes, tensor.sizes[dim]) != sizes.end();
  return has_it ? Placement(Shard{dim}) : Replicate{};
}

// A mask or bias broadcasts to the scores, whose first two dims are those of the query.
Placement placed_mask(const OpCall& call, size_t t, int64_t dim) {
  for (const std::string_view name : {"attn_mask", "attn_bias"}) {
    if (call.find(name) && call.input(name) == static_cast<int>(t))
      return placed_under(call.inputs[t], dim, call.inputs[call.input("query")]);
  }
  return Shard{dim};
}

// Batch and heads are independent of each other. `is_cut(t)` holds for an input that has both.
template <class IsCut>
Strategies by_batch_and_heads(const OpCall& call, IsCut is_cut) {
  if (call.argument("dropout_p").toDouble() > 0) return {};  // the kernel draws numbers
  const int q = call.input("query"), k = call.input("key");
  Strategies ways;
  for (const int64_t dim : {0, 1}) {
    const int64_t size = call.inputs[q].sizes[dim], of_keys = call.inputs[k].sizes[dim];
    // Several heads of q may share one of k: ranks need whole groups.
    const bool are_groups = size % call.ranks == 0 && of_keys > 0 && of_keys % call.ranks == 0;
    if (size == of_keys ? !call.reaches_all(size) : !are_groups) continue;
    Strategy way;
    for (size_t t = 0; t < call.inputs.size(); ++t)
      way.inputs.push_back(is_cut(t) ? placed_mask(call, t, dim) : Replicate{});
    for (const TensorInfo& output : call.outputs)
      way.outputs.push_back(cut_rows(output, dim, {size, of_keys}));
    ways.push_back(std::move(way));
  }
  return ways;
}

Strategies attention(const OpCall& call) {
  return by_batch_and_heads(call, [](size_t) { return true; });
}

// For CUDA's attention kernels. The generator state and cumulative lengths have no head dim.
Strategies attention_on_device(const OpCall& call) {
  return by_batch_and_heads(call, [&](size_t t) { return call.inputs[t].ndim() >= 3; });
}

TensorInfo attention_output(const OpCall& call) {
  TensorInfo output = call.inputs[call.input("query")];
  output.sizes[3] = call.inputs[call.input("value")].sizes[3];
  return output;
}

TensorInfo log_sums(const OpCall& call) {
  TensorInfo sums = call.inputs[call.input("query")];
  sums.sizes.pop_back();
  return sums;
}

std::vector<TensorInfo> attention_sizes(const OpCall& call) {
  return {attention_output(call), log_sums(call)};
}

std::vector<TensorInfo> attention_backward_sizes(const OpCall& call) {
  return {call.inputs[call.input("query")], call.inputs[call.input("key")],
          call.inputs[call.input("value")]};
}

constexpr auto kAttentionRules = with_splits({
    {"_scaled_dot_product_flash_attention_for_cpu", attention, attention_sizes},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", attention, attention_backward_sizes},
    {"_scaled_dot_product_flash_attention", attention_on_device},
    {"_scaled_dot_product_flash_attention_backward", attention_on_device, attention_backward_sizes},
    {"_scaled_dot_product_efficient_attention", attention_on_device},
    {"_scaled_dot_product_efficient_attention_backward", attention_on_device},
    {"_scaled_dot_product_cudnn_attention", attention_on_device},
    {"_scaled_dot_product_cudnn_attention_backward", attention_on_device, attention_backward_sizes},
});

}  // namespace

std::span<const RuleEntry> attention_rules() { return kAttentionRules; }

}  // namespace tessera
