#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera {

// Functions on checkpoints that need no model and no ranks; `tessera ckpt` is made of them. None is
// collective. All throw `c10::ValueError` for a directory that is not a checkpoint.

/// Called now and then with the number of bytes done and the total. An exception that it throws
/// ends the work, and incomplete output is removed.
using CheckpointProgress = std::function<void(int64_t done, int64_t total)>;

struct CheckpointTensor {
  /// `param`, `buffer`, `state` (of the optimizer), `master`, `tensor` (saved by its name) or
  /// `rank` (state of one rank alone).
  std::string kind;
  std::vector<std::string> names;  ///< several if the tensor is tied
  std::string state;               ///< for the kind `state`: its name, such as `exp_avg`
  std::string dtype;               ///< as in safetensors: `F32`, `BF16`, ...
  std::vector<int64_t> shape;
  int64_t nbytes = 0;
  int64_t pieces = 0;  ///< number of pieces in which it is stored
};

struct CheckpointSummary {
  std::string id;      ///< of this save
  int64_t saved = 0;   ///< when, in seconds since 1970 (UTC), as the index's file says
  int64_t nbytes = 0;  ///< of all tensors, those of all models included
  std::string plan;    ///< how the model was sharded, as text for people
  int ranks = 1;       ///< number of ranks that saved
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> texts;
  std::vector<std::string> models;  ///< of several; each is a checkpoint in a directory of its name
  std::string optimizer;            ///< its class; empty if none was saved
  int64_t optimizer_steps = 0;
  bool has_scaler = false;
  int64_t schedulers = 0;
  std::vector<CheckpointTensor> tensors;
  std::vector<std::string> files;
};

/// Returns a summary of a checkpoint; reads the indices only.
TESSERA_API CheckpointSummary inspect_checkpoint(const std::filesystem::path& path);

struct ListedCheckpoint {
  std::filesystem::path path;
  /// The reason why it can't be loaded: one line; empty if its index is right and its files have
  /// all that it names. Checksums are not compared.
  std::string problem;
  CheckpointSummary summary;  ///< as far as its index can be read
  bool is_latest = false;     ///< `latest_checkpoint()` of its directory returns it
};

/// Returns the checkpoints in `directory` and in the directories below, each directory's by the
/// numbers at the ends of their names. Links to checkpoints are listed, those to other directories
/// not followed; what can't be read is left out. Throws `c10::ValueError` if `directory` is none.
TESSERA_API std::vector<ListedCheckpoint> list_checkpoints(const std::filesystem::path& directory);

/// Reads everything, of all models, and returns the problems found; empty if all is well. Each is
/// one line that names the file and the piece. A damaged index is such a problem; a directory
/// without one is an error.
TESSERA_API std::vector<std::string> verify_checkpoint(const std::filesystem::path& path,
                                                       const CheckpointProgress& progress = {});

/// Returns the differences between two checkpoints, one line each: tensors that only one of them
/// has, shapes, dtypes, values (with the largest difference), options, numbers. Ignores how tensors
/// are cut into pieces, and the state of single ranks. Those of a model among several begin with
/// its name. Memory: two tensors at a time.
TESSERA_API std::vector<std::string> compare_checkpoints(const std::filesystem::path& a,
                                                         const std::filesystem::path& b,
                                                         const CheckpointProgress& progress = {});

/// Writes `from` again as `ranks` ranks would have written it, each tensor cut evenly. Keeps the
/// state of single ranks for rank numbers below `ranks`. Memory: one tensor. Throws
/// `c10::ValueError` for a checkpoint of several models: write each again.
TESSERA_API void reshard_checkpoint(const std::filesystem::path& from,
                                    const std::filesystem::path& to, int ranks,
                                    const CheckpointProgress& progress = {});

}  // namespace tessera
