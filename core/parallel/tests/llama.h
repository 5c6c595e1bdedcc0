#pragma once

#include <tessera/parallel/parallelize.h>
#include <torch/torch.h>

#include <cstdint>

#include "support/test_device.h"

// A Llama of two layers, and plans for it.
namespace tessera::testing::llama {

namespace nn = torch::nn;

constexpr int64_t kVocabulary = 24, kWidth = 32, kHeads = 4, kHidden = 48, kLength = 8, kBatch = 4;
constexpr int64_t kLayers = 2;
constexpr int64_t kActivationBytes = kBatch * kLength * kWidth * 4;

struct RmsNormImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return torch::rms_norm(x, {kWidth}, weight, 1e-5); }
  at::Tensor weight = register_parameter("weight", torch::ones({kWidth}));
};
TORCH_MODULE(RmsNorm);

inline nn::Linear make_linear(int64_t in, int64_t out, bool bias = false) {
  return nn::Linear(nn::LinearOptions(in, out).bias(bias));
}

struct AttentionImpl : nn::Module {
  at::Tensor heads_of(const at::Tensor& x) {
    return x.view({x.size(0), x.size(1), kHeads, kWidth / kHeads}).transpose(1, 2);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor mixed = torch::scaled_dot_product_attention(
        heads_of(wq(x)), heads_of(wk(x)), heads_of(wv(x)), {}, 0.0, /*is_causal=*/true);
    return wo(mixed.transpose(1, 2).contiguous().view({x.size(0), x.size(1), kWidth}));
  }
  nn::Linear wq = register_module("wq", make_linear(kWidth, kWidth, true));
  nn::Linear wk = register_module("wk", make_linear(kWidth, kWidth, true));
  nn::Linear wv = register_module("wv", make_linear(kWidth, kWidth, true));
  nn::Linear wo = register_module("wo", make_linear(kWidth, kWidth));
};
TORCH_MODULE(Attention);

struct FeedForwardImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) { return w2(torch::silu(w1(x)) * w3(x)); }
  nn::Linear w1 = register_module("w1", make_linear(kWidth, kHidden));
  nn::Linear w2 = register_module("w2", make_linear(kHidden, kWidth, true));
  nn::Linear w3 = register_module("w3", make_linear(kWidth, kHidden));
};
TORCH_MODULE(FeedForward);

struct LayerImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x + attention(attention_norm(x));
    return h + feed_forward(ffn_norm(h));
  }
  Attention attention = register_module("attention", Attention());
  FeedForward feed_forward = register_module("feed_forward", FeedForward());
  RmsNorm attention_norm = register_module("attention_norm", RmsNorm());
  nn::LayerNorm ffn_norm =
      register_module("ffn_norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
};
TORCH_MODULE(Layer);

struct LlamaImpl : nn::Module {
  LlamaImpl() {
    for (int64_t i = 0; i < kLayers; ++i) layers->push_back(Layer());
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters())
      parameter.dim() == 2 ? parameter.normal_(0, 0.1, generator)
                           : parameter.uniform_(0.5, 1.5, generator);
    to(testing::test_device());
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor h = tok_embeddings(tokens);
    for (const auto& layer : *layers) h = layer->as<LayerImpl>()->forward(h);
    return output(norm(h));
  }
  nn::Embedding tok_embeddings =
      register_module("tok_embeddings", nn::Embedding(kVocabulary, kWidth));
  nn::ModuleList layers = register_module("layers", nn::ModuleList());
  RmsNorm norm = register_module("norm", RmsNorm());
  nn::Linear output = register_module("output", make_linear(kWidth, kVocabulary));
};
TORCH_MODULE(Llama);

inline ParallelPlan tensor_plan() {
  return {{"tok_embeddings", RowwiseParallel{}},
          {"layers.*.attention.w[qkv]", ColwiseParallel{}},
          {"layers.*.attention.wo", RowwiseParallel{}},
          {"**.w[13]", ColwiseParallel{}},
          {"layers.?.feed_forward.w2", RowwiseParallel{}},
          {"output", ColwiseParallel{.output = Replicate{}}}};
}

// Activations between the blocks are cut by the sequence, and each norm's output is gathered once.
inline ParallelPlan sequence_plan() {
  const SequenceParallel gathered{.output = Replicate{}};
  return {{"tok_embeddings", RowwiseParallel{.output = Shard{1}}},
          {"layers.*.*_norm", gathered},
          {"layers.*.attention.w[qkv]", ColwiseParallel{}},
          {"layers.*.attention.wo", RowwiseParallel{.output = Shard{1}}},
          {"layers.*.feed_forward.w[13]", ColwiseParallel{}},
          {"layers.*.feed_forward.w2", RowwiseParallel{.output = Shard{-2}}},
          {"norm", gathered},
          {"output", ColwiseParallel{}}};
}

inline at::Tensor some_tokens(uint64_t seed = 2) {
  return on_test_device(torch::randint(kVocabulary, {kBatch, kLength},
                                       at::make_generator<at::CPUGeneratorImpl>(seed)));
}

}  // namespace tessera::testing::llama
