#pragma once

#include <tessera/engine/fully_shard.h>
#include <tessera/planner/transformer_config.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// Returns whether attention keeps a matrix of scores for each head.
inline bool keeps_scores(const TransformerConfig& config, const ActivationOptions& options) {
  return !options.fused_attention || (options.on_cpu && config.attention_dropout > 0);
}

/// A model that a config describes, of meta tensors, with the names of Hugging Face.
class DescribedModel {
 public:
  /// `dtype`: of the parameters.
  DescribedModel(const TransformerConfig& config, at::ScalarType dtype);

  /// In the order of registration.
  const std::vector<NamedTensor>& parameters() const { return parameters_; }

  /// Runs the model and the loss on a batch; the logits are kept in `logits`.
  at::Tensor loss(const ActivationOptions& options, at::Tensor& logits);

 private:
  struct Layer {
    at::Tensor weight, bias;  // `bias` may be undefined
  };
  struct Block {
    Layer norm1, norm2, output, out;
    std::vector<Layer> qkv, in;     // gpt2: one each
    std::vector<Layer> head_norms;  // of queries and of keys
  };

  at::Tensor add(const std::string& name, at::IntArrayRef sizes);
  Layer add_linear(const std::string& name, int64_t in, int64_t out, bool bias);
  Layer add_norm(const std::string& name, int64_t width);
  Block add_gpt2_block(const std::string& name);
  Block add_llama_block(const std::string& name);

  const TransformerConfig config_;
  const at::ScalarType dtype_;
  std::vector<NamedTensor> parameters_;
  at::Tensor tokens_, positions_, head_;
  std::vector<Block> blocks_;
  Layer norm_;
  at::Tensor cos_, sin_;  // rotary positions, which all steps share

  friend class DescribedForward;
};

}  // namespace tessera
