#pragma once

#include <tessera/planner/transformer_config.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>

// Models with the names, shapes and operators that a TransformerConfig describes.
namespace tessera::testing {

namespace nn = torch::nn;

/// A layer whose weight has the outputs first, or last as in GPT-2.
struct DescribedLinearImpl : nn::Module {
  DescribedLinearImpl(int64_t in, int64_t out, bool bias, bool outputs_last = false)
      : outputs_last(outputs_last),
        weight(register_parameter("weight", outputs_last ? torch::randn({in, out}) * 0.02
                                                         : torch::randn({out, in}) * 0.02)) {
    if (bias) this->bias = register_parameter("bias", torch::zeros({out}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (!outputs_last) return torch::linear(x, weight, bias);
    return torch::addmm(bias, x.flatten(0, 1), weight).view({x.size(0), x.size(1), -1});
  }
  bool outputs_last;
  torch::Tensor weight, bias;
};
TORCH_MODULE(DescribedLinear);

struct DescribedRmsNormImpl : nn::Module {
  explicit DescribedRmsNormImpl(int64_t width)
      : weight(register_parameter("weight", torch::ones({width}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::rms_norm(x, weight.sizes(), weight, 1e-6);
  }
  torch::Tensor weight;
};
TORCH_MODULE(DescribedRmsNorm);

inline torch::Tensor attend(const torch::Tensor& q, const torch::Tensor& k,
                            const torch::Tensor& v) {
  const auto mixed = torch::scaled_dot_product_attention(
      q, k, v, {}, 0, /*is_causal=*/true, std::nullopt, /*enable_gqa=*/q.size(1) != k.size(1));
  return mixed.transpose(1, 2).reshape({q.size(0), q.size(2), q.size(1) * q.size(3)});
}

struct LlamaAttentionImpl : nn::Module {
  explicit LlamaAttentionImpl(const TransformerConfig& c) : head_dim(c.head_dim) {
    const int64_t queries = c.heads * c.head_dim, keys = c.kv_heads * c.head_dim;
    q = register_module("q_proj", DescribedLinear(c.width, queries, c.qkv_bias));
    k = register_module("k_proj", DescribedLinear(c.width, keys, c.qkv_bias));
    v = register_module("v_proj", DescribedLinear(c.width, keys, c.qkv_bias));
    o = register_module("o_proj", DescribedLinear(queries, c.width, c.output_bias));
    if (!c.head_norms) return;
    q_norm = register_module("q_norm", DescribedRmsNorm(c.head_dim));
    k_norm = register_module("k_norm", DescribedRmsNorm(c.head_dim));
  }
  torch::Tensor heads_of(const torch::Tensor& x) const {
    return x.view({x.size(0), x.size(1), -1, head_dim});
  }
  // Rotary positions, whose tables all steps share.
  torch::Tensor turned(const torch::Tensor& x) {
    if (!cos.defined() || cos.dtype() != x.dtype()) {
      const int64_t half = x.size(3) / 2;
      const auto angles = torch::outer(torch::arange(x.size(2)),
                                       torch::pow(10000.0, -torch::arange(half) / double(half)));
      cos = torch::cat({angles, angles}, 1).cos().to(x.dtype());
      sin = torch::cat({angles, angles}, 1).sin().to(x.dtype());
    }
    const auto parts = x.chunk(2, 3);
    return x * cos + torch::cat({-parts[1], parts[0]}, 3) * sin;
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto queries = heads_of(q(x)), keys = heads_of(k(x));
    const auto values = heads_of(v(x)).transpose(1, 2);
    if (q_norm) queries = q_norm(queries), keys = k_norm(keys);
    queries = turned(queries.transpose(1, 2));
    keys = turned(keys.transpose(1, 2));
    return o(attend(queries, keys, values));
  }
  int64_t head_dim;
  DescribedLinear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr};
  DescribedRmsNorm q_norm{nullptr}, k_norm{nullptr};
  torch::Tensor cos, sin;
};
TORCH_MODULE(LlamaAttention);

struct LlamaMlpImpl : nn::Module {
  explicit LlamaMlpImpl(const TransformerConfig& c)
      : gate(register_module("gate_proj", DescribedLinear(c.width, c.hidden, c.mlp_bias))),
        up(register_module("up_proj", DescribedLinear(c.width, c.hidden, c.mlp_bias))),
        down(register_module("down_proj", DescribedLinear(c.hidden, c.width, c.mlp_bias))) {}
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::silu(gate(x)) * up(x)); }
  DescribedLinear gate, up, down;
};
TORCH_MODULE(LlamaMlp);

struct LlamaBlockImpl : nn::Module {
  explicit LlamaBlockImpl(const TransformerConfig& c)
      : attention(register_module("self_attn", LlamaAttention(c))),
        mlp(register_module("mlp", LlamaMlp(c))),
        norm1(register_module("input_layernorm", DescribedRmsNorm(c.width))),
        norm2(register_module("post_attention_layernorm", DescribedRmsNorm(c.width))) {}
  torch::Tensor forward(torch::Tensor x) {
    x = x + attention(norm1(x));
    return x + mlp(norm2(x));
  }
  LlamaAttention attention;
  LlamaMlp mlp;
  DescribedRmsNorm norm1, norm2;
};
TORCH_MODULE(LlamaBlock);

struct Gpt2BlockImpl : nn::Module {
  struct Part : nn::Module {};
  explicit Gpt2BlockImpl(const TransformerConfig& c) : heads(c.heads) {
    const nn::LayerNormOptions norm({c.width});
    norm1 = register_module("ln_1", nn::LayerNorm(norm));
    const auto attention = register_module("attn", std::make_shared<Part>());
    qkv = attention->register_module("c_attn", DescribedLinear(c.width, 3 * c.width, true, true));
    output = attention->register_module("c_proj", DescribedLinear(c.width, c.width, true, true));
    norm2 = register_module("ln_2", nn::LayerNorm(norm));
    const auto mlp = register_module("mlp", std::make_shared<Part>());
    in = mlp->register_module("c_fc", DescribedLinear(c.width, c.hidden, true, true));
    out = mlp->register_module("c_proj", DescribedLinear(c.hidden, c.width, true, true));
    dropout = c.dropout;
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto parts = qkv(norm1(x)).chunk(3, 2);
    const auto heads_of = [&](const torch::Tensor& part) {
      return part.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
    };
    const auto mixed = attend(heads_of(parts[0]), heads_of(parts[1]), heads_of(parts[2]));
    x = x + torch::dropout(output(mixed), dropout, dropout > 0);
    return x + torch::dropout(out(torch::gelu(in(norm2(x)))), dropout, dropout > 0);
  }
  int64_t heads;
  double dropout = 0;
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  DescribedLinear qkv{nullptr}, output{nullptr}, in{nullptr}, out{nullptr};
};
TORCH_MODULE(Gpt2Block);

/// The whole model. `forward` returns logits.
struct DescribedModel : nn::Module {
  DescribedModel(const TransformerConfig& config, bool checkpoints)
      : config(config), checkpoints(checkpoints) {
    if (config.is_gpt2()) {
      body = register_module("transformer", std::make_shared<Part>());
      tokens = body->register_module("wte", nn::Embedding(config.vocabulary, config.width));
      positions = body->register_module("wpe", nn::Embedding(config.positions, config.width));
    } else {
      body = register_module("model", std::make_shared<Part>());
      tokens =
          body->register_module("embed_tokens", nn::Embedding(config.vocabulary, config.width));
    }
    blocks = body->register_module(config.is_gpt2() ? "h" : "layers", nn::ModuleList());
    for (int64_t i = 0; i < config.layers; ++i)
      config.is_gpt2() ? blocks->push_back(Gpt2Block(config))
                       : blocks->push_back(LlamaBlock(config));
    if (config.is_gpt2()) {
      layer_norm =
          body->register_module("ln_f", nn::LayerNorm(nn::LayerNormOptions({config.width})));
    } else {
      rms_norm = body->register_module("norm", DescribedRmsNorm(config.width));
    }
    head = register_module("lm_head", std::make_shared<Part>());
    head_weight = head->register_parameter(
        "weight",
        config.tied_head ? tokens->weight : torch::randn({config.vocabulary, config.width}) * 0.02);
  }

  template <class Block>
  torch::Tensor run(nn::Module& module, const torch::Tensor& x) {
    auto block = std::dynamic_pointer_cast<Block>(module.shared_from_this());
    return checkpoints ? checkpoint(block, x) : block->forward(x);
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = tokens(ids);
    if (config.is_gpt2())
      x = torch::dropout(x + positions(torch::arange(ids.size(1))), config.dropout,
                         config.dropout > 0);
    for (auto& block : *blocks)
      x = config.is_gpt2() ? run<Gpt2BlockImpl>(*block, x) : run<LlamaBlockImpl>(*block, x);
    x = config.is_gpt2() ? layer_norm(x) : rms_norm(x);
    return torch::linear(x, head_weight);
  }

  struct Part : nn::Module {};
  TransformerConfig config;
  bool checkpoints;
  std::shared_ptr<Part> body, head;
  nn::Embedding tokens{nullptr}, positions{nullptr};
  nn::ModuleList blocks;
  nn::LayerNorm layer_norm{nullptr};
  DescribedRmsNorm rms_norm{nullptr};
  torch::Tensor head_weight;
};

}  // namespace tessera::testing
