#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/files/file.h"
#include "checkpoint/region.h"

namespace tessera {

/// A part of a tensor, and where it is stored: as 1-D data, in the order of the region.
struct ChunkRecord {
  std::string file;
  std::string key;
  Region region;
  std::vector<uint64_t> checksums = {};  ///< of each block of `kChecksumBlock` bytes
};

/// A tensor of the model or of its optimizer's state. Its elements are stored in the memory order
/// that `shape` and `strides` describe: the model's own, so that shards are written as they are in
/// memory, or a contiguous tensor's, if it is stored whole or in boxes.
struct TensorRecord {
  /// `param`, `buffer` or `state`; `master` for a parameter in the dtype that the optimizer
  /// updates, if that of `param` differs; `tensor` for one that was saved by its name alone; `rank`
  /// for one that belongs to a single rank.
  std::string kind;
  /// For a `state`: its name, such as `exp_avg`; for a `rank`: the rank, as text.
  std::string state;
  std::vector<std::string> names;  ///< of the parameter or buffer; several if it is tied
  std::string dtype;               ///< as in safetensors
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::vector<ChunkRecord> chunks;  ///< together they make up the tensor

  int64_t numel() const;
  int64_t nbytes() const;
  /// `KIND/NAME`, or `KIND/STATE/NAME` if `state` is set: unique in a checkpoint for every name.
  std::string id(size_t name = 0) const;
  /// Returns the rank that a `rank` tensor belongs to.
  int rank() const;
};

struct ParamGroupRecord {
  std::map<std::string, double> options;
  std::vector<std::string> params;
};

struct OptimizerRecord {
  std::string kind;  ///< `AdamW`, ...
  std::vector<ParamGroupRecord> param_groups;
  std::map<std::string, std::map<std::string, double>> counts;  ///< by parameter
  int64_t steps = 0;                                            ///< taken so far
};

/// The contents of a checkpoint's `index.json`.
struct CheckpointIndex {
  std::string id;  ///< of this one save; its files carry it, too
  int world_size = 1;
  std::map<std::string, double> numbers;
  std::map<std::string, std::string> texts;
  std::vector<std::string> models;  ///< in subdirectories of these names, with the same id
  std::vector<TensorRecord> tensors;
  std::optional<OptimizerRecord> optimizer;
  std::map<std::string, double> scaler;  ///< the scaler's state; empty if there is none
  std::vector<std::map<std::string, double>> schedulers;
  std::string plan;  ///< how the model was sharded, for human readers
  /// The name of its directory, for a checkpoint that `SaveOptions::keep_last` may remove later.
  std::string saved_as;
};

/// Returns the record of a tensor whose elements are stored in its logical order, without chunks.
TensorRecord contiguous_record(std::string kind, std::vector<std::string> names,
                               std::vector<int64_t> shape, at::ScalarType dtype);

/// Returns the strides of a contiguous tensor.
std::vector<int64_t> row_major(at::IntArrayRef sizes);
/// Returns true if both strides put the elements of `sizes` into the same order.
bool is_same_order(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b);

/// Returns true for the model's own tensors: a `param`, a `buffer` or a `tensor`.
bool is_of_model(const TensorRecord& record);

/// Adds a tied tensor's names, other than the one it is stored under, to the metadata of a
/// safetensors file, as `save_model` of Python's safetensors does.
void add_other_names(const TensorRecord& record, std::map<std::string, std::string>& metadata);

/// Returns true for a name that one of several models may have.
bool is_model_name(const std::string& name);

/// Returns the bytes of all tensors.
int64_t total_nbytes(const CheckpointIndex& index);

constexpr const char* kIndexFile = "index.json";

/// `rank-00000-of-00002.safetensors`
std::string rank_file(int rank, int size);
/// `model-00001-of-00002.safetensors`: numbered from 1, as other tools do
std::string model_file(int number, int count);

/// The end of the names of files by which ranks hand their parts of the index to rank 0.
constexpr const char* kPartSuffix = ".part.json";

/// Returns the index as text that begins with its own checksum.
std::string to_json(const CheckpointIndex& index);
/// Parses the text of `to_json`; `path` is for messages. Throws `c10::ValueError` for anything
/// else, for an index of another format version, and if the text does not have the checksum that it
/// names. (An index that was written by hand may name none.)
///
/// The result's numbers are safe to compute with: shapes are valid, chunks lie within them and have
/// a checksum for each block, ranks are less than `world_size`, and the total of bytes does not
/// overflow.
CheckpointIndex index_from_json(const std::string& text, const std::string& path);
/// Reads the index in a directory.
CheckpointIndex read_index(const File& directory);
/// Throws `c10::ValueError` unless the chunks of each tensor make up the whole tensor, and each
/// tensor is listed once.
void check_whole(const CheckpointIndex& index, const std::string& path);

/// Merges the indices that all ranks wrote; `parts` by rank.
CheckpointIndex merged(std::vector<CheckpointIndex> parts);

}  // namespace tessera
