#pragma once

#include <c10/core/ScalarType.h>
#include <tessera/export.h>
#include <tessera/planner/plan_report.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A decoder of texts as the `config.json` of a Hugging Face model describes it.
struct TransformerConfig {
  std::string type = "llama";  ///< `model_type`: gpt2, llama, mistral, qwen2 or qwen3
  int64_t layers = 1;
  int64_t width = 1;       ///< elements of a token between the blocks
  int64_t hidden = 1;      ///< elements of a token inside the feed-forward part
  int64_t heads = 1;       ///< of queries
  int64_t kv_heads = 1;    ///< of keys, and of values
  int64_t head_dim = 1;    ///< elements of a head
  int64_t vocabulary = 1;  ///< tokens that the model knows
  int64_t positions = 1;   ///< the longest sequence
  bool tied_head = false;  ///< the output layer's weights are those of the embedding
  bool qkv_bias = false, output_bias = false, mlp_bias = false;
  bool head_norms = false;       ///< queries and keys of each head are normalized
  double dropout = 0;            ///< of what is added between the blocks; gpt2 only
  double attention_dropout = 0;  ///< of the scores
  at::ScalarType dtype = at::kFloat;

  bool is_gpt2() const { return type == "gpt2"; }
};

/// Reads a description. `path` is a `config.json`, a directory that has one, or an index
/// (`*.safetensors.index.json`) in such a directory. No other file is read but the directory's
/// index, if there is one: its names must be those of the described parameters, and its
/// `total_size` their bytes.
///
/// Throws `c10::ValueError`, naming the file, for a file that is missing or damaged, or an index
/// that does not agree; `c10::NotImplementedError` for types other than gpt2, llama, mistral, qwen2
/// and qwen3, for cross attention and for quantized models.
TESSERA_API TransformerConfig read_transformer_config(const std::string& path);

/// Returns the parameters with Hugging Face's names and shapes, in the order of registration.
TESSERA_API std::vector<ParameterSize> parameter_sizes(const TransformerConfig& config);

/// How a transformer is trained, as far as the memory of its activations depends on it.
struct ActivationOptions {
  int64_t batch = 1;     ///< sequences in a forward, on each rank
  int64_t sequence = 1;  ///< tokens of each

  /// Dtype in which the parameters are used.
  at::ScalarType dtype = at::kFloat;
  /// Narrower dtype of autocast: matrix products and attention are computed in it.
  std::optional<at::ScalarType> autocast = std::nullopt;

  /// True: `scaled_dot_product_attention()` in one kernel that keeps no matrix of sequence by
  /// sequence. False: such a matrix is kept for each head, and with dropout its mask and the
  /// result, too. LibTorch's kernel for the CPU has no dropout: with that, it is as if this were
  /// false.
  bool fused_attention = true;
  /// Each block is a `checkpoint()`: its forward runs again in backward.
  bool checkpoint = false;
  /// Ranks compute on the CPU, where LibTorch composes `rms_norm()` and dropout of several
  /// operators that keep more.
  bool on_cpu = false;
};

/// Returns the moments of a forward and a backward in which memory is greatest, for
/// `PlanReportOptions::moments`.
///
/// Runs the model with tensors that have no memory, and counts those that LibTorch's autograd keeps
/// and its operators make if the model is written with its fused functions (`linear`, `rms_norm` or
/// `layer_norm`, `silu`, `gelu`, `scaled_dot_product_attention`), and the loss is the cross entropy
/// of logits in float32, while the program still holds the logits. Not counted: the context of a
/// device, workspaces of its libraries, and gaps between allocated blocks.
///
/// Throws `c10::ValueError` for a batch or sequence below 1, a sequence longer than a gpt2 has
/// positions, and numbers that overflow.
TESSERA_API std::vector<ActivationMoment> activation_moments(const TransformerConfig& config,
                                                             const ActivationOptions& options);

}  // namespace tessera
