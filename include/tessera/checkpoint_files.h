#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/export.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// What can be done with a checkpoint without a model and without ranks: `tessera ckpt` is made of
// these. None is collective. All throw `c10::ValueError` for a directory that is no checkpoint.

/// Is told how many of how many bytes are done, now and then. What it throws ends the work, which
/// leaves nothing that was begun.
using CheckpointProgress = std::function<void(int64_t done, int64_t total)>;

struct CheckpointTensor {
  /// `param`, `buffer`, `state` (of the optimizer), `master`, `tensor` (saved by its name) or
  /// `rank` (what one rank had for itself).
  std::string kind;
  std::vector<std::string> names;  ///< several if it is tied
  std::string state;               ///< of a `state`: which, such as `exp_avg`
  std::string dtype;               ///< as in safetensors: `F32`, `BF16`, ...
  std::vector<int64_t> shape;
  int64_t nbytes = 0;
  int64_t pieces = 0;  ///< that it is stored in
};

struct CheckpointSummary {
  std::string id;    ///< of the save
  std::string plan;  ///< how the model was sharded, for people
  int ranks = 1;     ///< that saved it
  std::map<std::string, double> numbers;
  std::string optimizer;  ///< its class; empty: none
  int64_t optimizer_steps = 0;
  bool has_scaler = false;
  int64_t schedulers = 0;
  std::vector<CheckpointTensor> tensors;
  std::vector<std::string> files;
};

/// Reads the index only.
TESSERA_API CheckpointSummary inspect_checkpoint(const std::filesystem::path& path);

/// Reads everything. Returns what is wrong, one line each that names the file and the piece; empty
/// if all is well. A damaged index is one of those; a directory without one is an error.
TESSERA_API std::vector<std::string> verify_checkpoint(const std::filesystem::path& path,
                                                       const CheckpointProgress& progress = {});

/// What two checkpoints don't have in common, one line each: tensors that one lacks, other shapes
/// or dtypes, values (with the largest difference), options, numbers. How they are cut into pieces,
/// and what ranks had for themselves, does not matter. Memory: two tensors at a time.
TESSERA_API std::vector<std::string> compare_checkpoints(const std::filesystem::path& a,
                                                         const std::filesystem::path& b,
                                                         const CheckpointProgress& progress = {});

/// Writes `from` again as `ranks` ranks would have written it, each tensor cut evenly. What ranks
/// had for themselves is kept for those that there still are. Memory: one tensor.
TESSERA_API void reshard_checkpoint(const std::filesystem::path& from,
                                    const std::filesystem::path& to, int ranks,
                                    const CheckpointProgress& progress = {});

enum class ExportFormat : uint8_t {
  kSafetensors,  ///< one file, as Python's `safetensors.torch.load_file` reads it
  /// One file, as Python's `torch.load(weights_only=True)` reads it. Not of float8 and unsigned
  /// tensors of more than a byte, which throw `c10::NotImplementedError`.
  kTorch,
};

struct ExportOptions {
  /// None: by the file's name, `.safetensors`, or `.pt`, `.pth` or `.bin`.
  std::optional<ExportFormat> format = std::nullopt;
  /// Of all floating tensors; none: as stored, which is that of master weights, if there are any,
  /// unless the checkpoint has `whole_parameters`.
  std::optional<at::ScalarType> dtype = std::nullopt;
  CheckpointProgress progress = {};
};

/// Writes the model's parameters and buffers whole into one file, a tied one under each of its
/// names (safetensors: once, the metadata mapping its other names to the first, as `save_model` of
/// Python's safetensors does). Memory: one tensor. The file appears when it is complete.
TESSERA_API void export_checkpoint(const std::filesystem::path& path,
                                   const std::filesystem::path& file,
                                   const ExportOptions& options = {});

/// Makes a checkpoint of a safetensors file, of a file that Python's `torch.save` made of a state
/// dict, or of a directory of safetensors files: those that its index names
/// (`model.safetensors.index.json`), or all of them, of which none may be missing where they are
/// numbered. `load_checkpoint` then reads it into a model with these names;
/// it has no optimizer. Tensors that `torch.save` found sharing memory stay tied. Memory: one
/// tensor.
TESSERA_API void import_checkpoint(const std::filesystem::path& from,
                                   const std::filesystem::path& path,
                                   const CheckpointProgress& progress = {});

}  // namespace tessera
