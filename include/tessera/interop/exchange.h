#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/checkpoint/checkpoint_files.h>
#include <tessera/checkpoint/rename_rule.h>
#include <tessera/export.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// Checkpoints to and from files of other tools. Like the functions of `checkpoint_files.h`, these
// need no model and no ranks, and none is collective.
//
// Files of `torch.save`, directories of `torch.distributed.checkpoint`, and the state of PyTorch's
// optimizers in both are written and read by the Python package: `python -m tessera.exchange`.

enum class ExportFormat : uint8_t {
  kSafetensors,  ///< one file, for Python's `safetensors.torch.load_file`
  /// A directory of safetensors files, `model-00001-of-00003.safetensors` and so on, and their
  /// index, `model.safetensors.index.json`; or `model.safetensors` alone, if one suffices. Hugging
  /// Face's `from_pretrained` reads it beside the model's `config.json`.
  kHuggingFace
};

struct ExportOptions {
  /// None: `kHuggingFace` for a path that ends with `/` or has no extension; `kSafetensors` for one
  /// that ends with `.safetensors`.
  std::optional<ExportFormat> format = std::nullopt;
  /// Dtype to which all floating tensors of the model are converted; none: as stored. That is the
  /// dtype of the master weights, if there are any, unless the checkpoint has `whole_parameters`.
  std::optional<at::ScalarType> dtype = std::nullopt;
  CheckpointProgress progress = {};

  /// How names of the checkpoint become names of the files; see `RenameRule`.
  RenameRules rename = {};
  /// Most bytes of a file of `kHuggingFace`, unless one tensor has more. None: 5 GB.
  std::optional<int64_t> max_shard_bytes = std::nullopt;
};

/// Writes the model's parameters and buffers whole, a tied one once; the metadata maps its other
/// names to the first, as `save_model` of Python's safetensors does. Memory: one tensor. A file, or
/// a new directory, appears when it is complete. A directory may have other files, but none of a
/// model's.
TESSERA_API void export_checkpoint(const std::filesystem::path& path,
                                   const std::filesystem::path& to,
                                   const ExportOptions& options = {});

struct ImportOptions {
  /// How names of the files become names of the checkpoint; see `RenameRule`.
  RenameRules rename = {};
  /// Regular expressions that match whole new names: these tensors, of two dims, are transposed.
  std::vector<std::string> transpose = {};

  /// The key of the dict in which the model is. Empty: all tensors are imported, with names as
  /// `OUTER.INNER`.
  std::string model_key = "";

  CheckpointProgress progress = {};
};

/// Makes a checkpoint from files of other tools: all that `load_safetensors()` reads.
/// `load_checkpoint` can then read it into a model with these names. Tensors that shared memory in
/// `torch.save` stay tied. Nothing of a pickle is executed. Memory: one tensor.
TESSERA_API void import_checkpoint(const std::filesystem::path& from,
                                   const std::filesystem::path& path,
                                   const ImportOptions& options = {});

class ExportedModel;

/// The tensors of a checkpoint one by one, for programs that write them in other formats, as the
/// Python package does.
class TESSERA_API CheckpointTensors {
 public:
  /// `with_state`: also those of the optimizer's state. Only `rename`, `dtype` and `progress` of
  /// `options` apply.
  CheckpointTensors(const std::filesystem::path& path, bool with_state,
                    const ExportOptions& options = {});
  ~CheckpointTensors();
  CheckpointTensors(const CheckpointTensors&) = delete;
  CheckpointTensors& operator=(const CheckpointTensors&) = delete;

  /// Returns JSON as in the checkpoint's `index.json`, with the new names and dtypes, and without
  /// where tensors are stored.
  std::string index() const;
  /// Returns a tensor whole; `number` counts those of the index.
  at::Tensor read(size_t number);

 private:
  std::unique_ptr<ExportedModel> model_;
};

/// Makes a checkpoint of tensors: `index` is JSON as `CheckpointTensors::index()` returns it, of
/// which `names`, `dtype` and `shape` of each tensor, `kind`, `state` and the optimizer count.
/// Calls `read` with the number of a tensor in the index when it is written. Throws
/// `c10::ValueError` if the index is not well formed, or if a tensor has another dtype or number of
/// elements.
TESSERA_API void import_tensors(const std::string& index,
                                const std::function<at::Tensor(size_t number)>& read,
                                const std::filesystem::path& path,
                                const ImportOptions& options = {});

}  // namespace tessera
