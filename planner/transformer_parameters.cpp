#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "planner/transformer_names.h"

namespace tessera {
namespace {

using Shape = std::vector<int64_t>;

// Collects parameters, and where a layer has a bias, that as well.
class ParameterList {
 public:
  explicit ParameterList(at::ScalarType dtype) : dtype_(dtype) {}

  void add(const std::string& name, Shape shape) {
    sizes_.push_back({{name}, std::move(shape), dtype_});
  }
  // A layer's weight is stored with the outputs first, but for gpt2's.
  void add_linear(const std::string& name, int64_t in, int64_t out, bool bias,
                  bool outputs_last = false) {
    add(name + ".weight", outputs_last ? Shape{in, out} : Shape{out, in});
    if (bias) add(name + ".bias", {out});
  }
  void add_norm(const std::string& name, int64_t width, bool bias) {
    add(name + ".weight", {width});
    if (bias) add(name + ".bias", {width});
  }
  void tie(const std::string& name, const std::string& other) {
    for (ParameterSize& size : sizes_)
      if (size.names.front() == name) size.names.push_back(other);
  }
  std::vector<ParameterSize> sizes() && { return std::move(sizes_); }

 private:
  at::ScalarType dtype_;
  std::vector<ParameterSize> sizes_;
};

void add_gpt2_block(ParameterList& list, const TransformerConfig& config, const BlockNames& names) {
  const int64_t width = config.width;
  list.add_norm(names.norm1, width, true);
  list.add_linear(names.qkv.front(), width, 3 * width, true, true);
  list.add_linear(names.output, width, width, true, true);
  list.add_norm(names.norm2, width, true);
  list.add_linear(names.in.front(), width, config.hidden, true, true);
  list.add_linear(names.out, config.hidden, width, true, true);
}

void add_llama_block(ParameterList& list, const TransformerConfig& config,
                     const BlockNames& names) {
  const int64_t queries = config.heads * config.head_dim;
  const int64_t keys = config.kv_heads * config.head_dim;
  for (size_t i = 0; i < names.qkv.size(); ++i)
    list.add_linear(names.qkv[i], config.width, i == 0 ? queries : keys, config.qkv_bias);
  list.add_linear(names.output, queries, config.width, config.output_bias);
  for (const std::string& norm : names.head_norms) list.add_norm(norm, config.head_dim, false);
  for (const std::string& in : names.in)
    list.add_linear(in, config.width, config.hidden, config.mlp_bias);
  list.add_linear(names.out, config.hidden, config.width, config.mlp_bias);
  list.add_norm(names.norm1, config.width, false);
  list.add_norm(names.norm2, config.width, false);
}

}  // namespace

BlockNames block_names(const TransformerConfig& config, int64_t layer) {
  if (config.is_gpt2()) {
    const std::string block = fmt::format("transformer.h.{}.", layer);
    return {.norm1 = block + "ln_1",
            .qkv = {block + "attn.c_attn"},
            .output = block + "attn.c_proj",
            .norm2 = block + "ln_2",
            .in = {block + "mlp.c_fc"},
            .out = block + "mlp.c_proj"};
  }
  const std::string block = fmt::format("model.layers.{}.", layer);
  const std::string attention = block + "self_attn.";
  BlockNames names{.norm1 = block + "input_layernorm",
                   .qkv = {attention + "q_proj", attention + "k_proj", attention + "v_proj"},
                   .output = attention + "o_proj",
                   .norm2 = block + "post_attention_layernorm",
                   .in = {block + "mlp.gate_proj", block + "mlp.up_proj"},
                   .out = block + "mlp.down_proj"};
  if (config.head_norms) names.head_norms = {attention + "q_norm", attention + "k_norm"};
  return names;
}

ModelNames model_names(const TransformerConfig& config) {
  if (config.is_gpt2())
    return {{"transformer.wte.weight", "transformer.wpe.weight"}, "transformer.ln_f"};
  return {{"model.embed_tokens.weight"}, "model.norm"};
}

std::vector<ParameterSize> parameter_sizes(const TransformerConfig& config) {
  ParameterList list(config.dtype);
  const ModelNames names = model_names(config);
  list.add(names.embeddings.front(), {config.vocabulary, config.width});
  if (config.is_gpt2()) list.add(names.embeddings.back(), {config.positions, config.width});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const BlockNames block = block_names(config, layer);
    config.is_gpt2() ? add_gpt2_block(list, config, block) : add_llama_block(list, config, block);
  }
  list.add_norm(names.norm, config.width, config.is_gpt2());
  if (config.tied_head) {
    list.tie(names.embeddings.front(), kHeadWeight);
  } else {
    list.add(kHeadWeight, {config.vocabulary, config.width});
  }
  return std::move(list).sizes();
}

}  // namespace tessera
