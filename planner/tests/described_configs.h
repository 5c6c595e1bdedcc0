#pragma once

#include <tessera/planner/transformer_config.h>

#include <nlohmann/json.hpp>
#include <vector>

// Descriptions of known models, as far as they are read, and of small ones.
namespace tessera::testing {

inline nlohmann::json llama3_8b() {
  return {{"model_type", "llama"},
          {"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 4096},
          {"intermediate_size", 14336},
          {"num_hidden_layers", 32},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 8},
          {"vocab_size", 128256},
          {"max_position_embeddings", 8192},
          {"tie_word_embeddings", false},
          {"attention_bias", false},
          {"torch_dtype", "bfloat16"}};
}

inline nlohmann::json llama3_70b() {
  nlohmann::json config = llama3_8b();
  config["hidden_size"] = 8192;
  config["intermediate_size"] = 28672;
  config["num_hidden_layers"] = 80;
  config["num_attention_heads"] = 64;
  return config;
}

inline nlohmann::json gpt2() {
  return {{"model_type", "gpt2"}, {"n_embd", 768},       {"n_layer", 12},
          {"n_head", 12},         {"n_positions", 1024}, {"vocab_size", 50257}};
}

inline nlohmann::json qwen2_7b() {
  return {{"model_type", "qwen2"},   {"hidden_size", 3584},          {"intermediate_size", 18944},
          {"num_hidden_layers", 28}, {"num_attention_heads", 28},    {"num_key_value_heads", 4},
          {"vocab_size", 152064},    {"tie_word_embeddings", false}, {"torch_dtype", "bfloat16"}};
}

inline nlohmann::json qwen3_600m() {
  return {{"model_type", "qwen3"},    {"hidden_size", 1024},       {"intermediate_size", 3072},
          {"num_hidden_layers", 28},  {"num_attention_heads", 16}, {"num_key_value_heads", 8},
          {"head_dim", 128},          {"vocab_size", 151936},      {"tie_word_embeddings", true},
          {"torch_dtype", "bfloat16"}};
}

inline nlohmann::json smollm_135m() {
  return {{"model_type", "llama"},   {"hidden_size", 576},          {"intermediate_size", 1536},
          {"num_hidden_layers", 30}, {"num_attention_heads", 9},    {"num_key_value_heads", 3},
          {"vocab_size", 49152},     {"tie_word_embeddings", true}, {"torch_dtype", "bfloat16"}};
}

inline nlohmann::json qwen2_500m() {
  return {{"model_type", "qwen2"},   {"hidden_size", 896},          {"intermediate_size", 4864},
          {"num_hidden_layers", 24}, {"num_attention_heads", 14},   {"num_key_value_heads", 2},
          {"vocab_size", 151936},    {"tie_word_embeddings", true}, {"torch_dtype", "bfloat16"}};
}

/// A GPT-2, a Llama with fewer heads of keys, and a Qwen3, small enough to train.
inline std::vector<TransformerConfig> small_configs() {
  TransformerConfig gpt2{.type = "gpt2",
                         .layers = 4,
                         .width = 128,
                         .hidden = 512,
                         .heads = 4,
                         .kv_heads = 4,
                         .head_dim = 32,
                         .vocabulary = 1000,
                         .positions = 256,
                         .tied_head = true,
                         .qkv_bias = true,
                         .output_bias = true,
                         .mlp_bias = true};
  TransformerConfig llama{.type = "llama",
                          .layers = 4,
                          .width = 128,
                          .hidden = 352,
                          .heads = 4,
                          .kv_heads = 2,
                          .head_dim = 32,
                          .vocabulary = 1000,
                          .positions = 256};
  TransformerConfig qwen3 = llama;
  qwen3.type = "qwen3";
  qwen3.head_norms = true;
  qwen3.head_dim = 48;
  qwen3.tied_head = true;
  return {gpt2, llama, qwen3};
}

}  // namespace tessera::testing
