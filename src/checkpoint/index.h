#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/file.h"
#include "checkpoint/region.h"

namespace tessera {

/// A part of a tensor, and where it is stored: in 1-D, in the order of the region.
struct ChunkRecord {
  std::string file;
  std::string key;
  Region region;
  std::vector<uint64_t> checksums = {};  ///< of each block of `kChecksumBlock` bytes
};

/// A tensor of the model or of its optimizer's state. Its elements are stored in the order of
/// memory that `shape` and `strides` describe: the model's own, so that shards are written as they
/// lie, or a contiguous tensor's, if it is stored whole or in boxes.
struct TensorRecord {
  /// `param`, `buffer`, `state`, or `master` for a parameter in the dtype that the optimizer
  /// updates if `param` has another; `tensor` for what was saved by its name alone, and `rank` for
  /// what one rank has for itself.
  std::string kind;
  /// For a `state`: its name, such as `exp_avg`; for what a `rank` has: which, as text.
  std::string state;
  std::vector<std::string> names;  ///< of the parameter or buffer; several if it is tied
  std::string dtype;               ///< as in safetensors
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::vector<ChunkRecord> chunks;  ///< together they are the tensor

  int64_t numel() const;
  int64_t nbytes() const;
  /// `KIND/NAME` or `state/STATE/NAME`: unique in a checkpoint for every name.
  std::string id(size_t name = 0) const;
  /// Of what a `rank` has.
  int rank() const;
};

struct ParamGroupRecord {
  std::map<std::string, double> options;
  std::vector<std::string> params;
};

struct OptimizerRecord {
  std::string kind;  ///< `AdamW`, ...
  std::vector<ParamGroupRecord> param_groups;
  std::map<std::string, std::map<std::string, int64_t>> counts;  ///< by parameter
  int64_t steps = 0;                                             ///< taken so far
};

/// What a checkpoint holds: the contents of its `index.json`.
struct CheckpointIndex {
  std::string id;  ///< of this one save; its files have it, too
  int world_size = 1;
  std::map<std::string, double> numbers;
  std::vector<TensorRecord> tensors;
  std::optional<OptimizerRecord> optimizer;
  std::map<std::string, double> scaler;  ///< its state; empty if there is none
  std::vector<std::map<std::string, double>> schedulers;
  std::string plan;  ///< how the model was sharded, for people
  /// Of one that `SaveOptions::keep_last` may remove later: the name of its directory.
  std::string saved_as;
};

/// True for what a model computes with: a `param`, a `buffer` or a `tensor`.
bool is_of_model(const TensorRecord& record);

/// Notes the names that a tied tensor has besides the one it is stored under, in the metadata of a
/// safetensors file, as `save_model` of Python's safetensors does.
void add_other_names(const TensorRecord& record, std::map<std::string, std::string>& metadata);

/// Of all tensors.
int64_t total_nbytes(const CheckpointIndex& index);

constexpr const char* kIndexFile = "index.json";

/// `rank-00000-of-00002.safetensors`
std::string rank_file(int rank, int size);
/// `model-00001-of-00002.safetensors`: numbered from 1, as other tools do
std::string model_file(int number, int count);

/// The text begins with a checksum of itself.
std::string to_json(const CheckpointIndex& index);
/// Reads what `to_json` wrote; `path` is for messages. Throws `c10::ValueError` for anything else,
/// for an index of another format version, and if the text does not have the checksum that it
/// names. (One that was written by hand may name none.)
///
/// What it returns can be counted with: shapes are those of tensors, chunks lie in them and have a
/// checksum for each block, ranks are those of `world_size`, and the bytes of all are a number.
CheckpointIndex index_from_json(const std::string& text, const std::string& path);
/// The index in a directory.
CheckpointIndex read_index(const File& directory);
/// Throws `c10::ValueError` unless the chunks of each tensor are the whole tensor, and each tensor
/// is there once.
void check_whole(const CheckpointIndex& index, const std::string& path);

/// What all ranks wrote together; `parts` by rank.
CheckpointIndex merged(std::vector<CheckpointIndex> parts);

}  // namespace tessera
