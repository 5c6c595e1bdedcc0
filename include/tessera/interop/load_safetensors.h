#pragma once

#include <tessera/checkpoint/rename_rule.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/export.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace tessera {

struct LoadSafetensorsOptions {
  /// How names of the files become names of the model; see `RenameRule`.
  RenameRules rename = {};
  /// Called after `rename` with each name; returns the new name, or an empty one to leave the
  /// tensor out. Must return the same on every rank. Null: names stay.
  std::function<std::string(const std::string&)> rename_by = nullptr;

  /// Regular expressions that match whole names of the model: these tensors, of two dims, are
  /// stored transposed. `Conv1D` of Hugging Face's GPT-2 has weights of [in, out], and
  /// `torch::nn::Linear` of [out, in]. Such a tensor is read whole by every rank that has a part of
  /// it.
  std::vector<std::string> transpose = {};

  /// `allow_missing`: parameters and buffers that the files lack keep their values.
  /// `allow_unexpected`: tensors that the model lacks are ignored. The result lists both.
  bool allow_missing = false;
  bool allow_unexpected = false;
};

/// Differences that the options allowed: names of the model, after the renaming.
struct LoadedTensors {
  std::vector<std::string> missing, unexpected;
};

/// Reads parameters and buffers from files of other tools into a sharded model of any level and
/// number of ranks. Collective, with the same arguments. Optimizer state is not touched.
///
/// `path` is
/// - a `.safetensors` file;
/// - the index of a set of them, `model.safetensors.index.json`;
/// - a directory as Hugging Face's tools write it, with either, or with `pytorch_model.bin` or
///   `pytorch_model.bin.index.json`;
/// - a file that Python's `torch.save` made of a state dict, or the index of a set of them.
///
/// GPT-2 from `openai-community/gpt2`, for a model whose blocks are `blocks.0` and so on, with
/// `torch::nn::Linear` layers:
///
///     load_safetensors("gpt2/", sharded,
///                      {.rename = {{R"(^(transformer\.)?h\.(\d+)\.attn\.(masked_)?bias$)", ""}, //
///                      no weights
///                                  {R"(^(transformer\.)?)", ""},
///                                  {R"(^h\.(\d+)\.attn\.c_attn\.)", "blocks.$1.qkv."},
///                                  {R"(^h\.(\d+)\.)", "blocks.$1."}},
///                       .transpose = {R"(blocks\..*(qkv|c_proj|c_fc)\.weight)"}});
///
/// A tensor that the model ties needs to be stored under one of its names; if it is stored under
/// several, the values must be equal. Values are converted between float and half precisions.
///
/// **Reads** headers, and the bytes that this rank's shards need, in one process as in many; whole
/// are read transposed tensors, tensors that are not contiguous in a `torch.save` file, and copies
/// of tied ones. **Memory**: the bytes read of one tensor.
/// **Throws** `c10::ValueError` on every rank, and leaves the model unchanged, if a file is missing
/// or damaged, or if tensors are missing, unexpected or of another shape: the message lists them,
/// each missing one with the most similar of those that were not expected. The files have no
/// checksums.
TESSERA_API LoadedTensors load_safetensors(const std::filesystem::path& path, ShardedModule& module,
                                           const LoadSafetensorsOptions& options = {});

/// Reads into a module that is not sharded, in one process, on each rank before `fully_shard`, or
/// with parameters that are DistTensors. Each process reads by itself, and waits for no other.
TESSERA_API LoadedTensors load_safetensors(const std::filesystem::path& path,
                                           torch::nn::Module& module,
                                           const LoadSafetensorsOptions& options = {});

}  // namespace tessera
