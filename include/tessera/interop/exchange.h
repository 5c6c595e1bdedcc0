#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/checkpoint/checkpoint_files.h>
#include <tessera/checkpoint/rename_rule.h>
#include <tessera/export.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

// Checkpoints to and from files of other tools. Like the functions of `checkpoint_files.h`, these
// need no model and no ranks, and none is collective.

enum class ExportFormat : uint8_t {
  kSafetensors,  ///< one file, for Python's `safetensors.torch.load_file`
  /// One file, for Python's `torch.load(weights_only=True)`. Throws `c10::NotImplementedError` for
  /// float8 tensors, and for unsigned ones of more than a byte.
  kTorch,
  /// A directory of safetensors files, `model-00001-of-00003.safetensors` and so on, and their
  /// index, `model.safetensors.index.json`; or `model.safetensors` alone, if one suffices. Hugging
  /// Face's `from_pretrained` reads it beside the model's `config.json`.
  kHuggingFace,
  kDcp,  ///< a directory, for Python's `torch.distributed.checkpoint.load`; dtypes as
         ///< `kTorch`
};

struct ExportOptions {
  /// None: `kHuggingFace` for a path that ends with `/` or has no extension; else by the extension,
  /// `.safetensors`, or `.pt`, `.pth` or `.bin`.
  std::optional<ExportFormat> format = std::nullopt;
  /// Dtype to which all floating tensors of the model are converted; none: as stored. That is the
  /// dtype of the master weights, if there are any, unless the checkpoint has `whole_parameters`.
  std::optional<at::ScalarType> dtype = std::nullopt;
  CheckpointProgress progress = {};

  /// How names of the checkpoint become names of the files; see `RenameRule`.
  RenameRules rename = {};
  /// Most bytes of a file of `kHuggingFace`, unless one tensor has more. None: 5 GB.
  std::optional<int64_t> max_shard_bytes = std::nullopt;

  /// For `kTorch` and `kDcp`: the keys of a dict in which the model and the optimizer's state dict
  /// are stored. `optimizer_key` empty: no optimizer. `model_key` empty: `model` beside an
  /// optimizer; else the model's tensors are the dict.
  ///
  /// `torch.optim`'s `load_state_dict` reads the optimizer's, of Adagrad, Adam, AdamW, RMSprop or
  /// SGD, with the parameters in the order of the param groups; other classes throw
  /// `c10::NotImplementedError`. In `kDcp`, names are those of `get_state_dict`.
  std::string model_key = "", optimizer_key = "";
};

/// Writes the model's parameters and buffers whole, a tied one under each of its names
/// (safetensors: once; the metadata maps its other names to the first, as `save_model` of Python's
/// safetensors does). Memory: one tensor. A file, or a new directory, appears when it is complete.
///
/// A directory may have other files: for `kHuggingFace`, none of a model's; for `kDcp`, none.
TESSERA_API void export_checkpoint(const std::filesystem::path& path,
                                   const std::filesystem::path& to,
                                   const ExportOptions& options = {});

struct ImportOptions {
  /// How names of the files become names of the checkpoint; see `RenameRule`.
  RenameRules rename = {};
  /// Regular expressions that match whole new names: these tensors, of two dims, are transposed.
  std::vector<std::string> transpose = {};

  /// The key of the dict in which the model is. Empty: `model`, if `optimizer_key` is given; else
  /// all tensors are imported, with names as `OUTER.INNER`.
  std::string model_key = "";
  /// The key of the state dict of an optimizer of `torch.optim`, in a file of `torch.save` or a DCP
  /// directory. Empty: no optimizer is imported.
  ///
  /// Its parameters are known by name in DCP directories, and in files of optimizers that were made
  /// from `named_parameters()` (PyTorch 2.6). Other files number them, and `optimizer_params` must
  /// say which they are.
  std::string optimizer_key = "";
  /// `Adagrad`, `Adam`, `AdamW`, `RMSprop` or `SGD`. Empty: found by the options; those of Adam and
  /// AdamW differ since PyTorch 2.7.
  std::string optimizer_class = "";
  /// The names, in the file, of all parameters of its optimizer, in the order in which the
  /// optimizer was given them, group after group. Only for a file that lacks them.
  std::vector<std::string> optimizer_params = {};

  CheckpointProgress progress = {};
};

/// Makes a checkpoint from files of other tools: all that `load_safetensors()` reads.
/// `load_checkpoint` can then read it into a model with these names. Tensors that shared memory in
/// `torch.save` stay tied. Nothing of a pickle is executed. Memory: one tensor.
TESSERA_API void import_checkpoint(const std::filesystem::path& from,
                                   const std::filesystem::path& path,
                                   const ImportOptions& options = {});

}  // namespace tessera
