#pragma once

#include <tessera/planner/transformer_config.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// The layers of a block, by the names that Hugging Face gives them.
struct BlockNames {
  std::string norm1;
  std::vector<std::string> qkv;  ///< queries, keys and values; gpt2: one layer for all
  std::vector<std::string> head_norms = {};
  std::string output;
  std::string norm2;
  std::vector<std::string> in;  ///< gpt2: one layer, else the gate and the values that it scales
  std::string out;
};

BlockNames block_names(const TransformerConfig& config, int64_t layer);

/// What a model has beside its blocks.
struct ModelNames {
  std::vector<std::string> embeddings;  ///< parameters
  std::string norm;                     ///< a layer
};

ModelNames model_names(const TransformerConfig& config);

/// The output layer's parameter.
inline constexpr const char* kHeadWeight = "lm_head.weight";

}  // namespace tessera
