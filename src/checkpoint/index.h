#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A range of a tensor, and where it is stored.
struct ChunkRecord {
  std::string file;
  std::string key;
  int64_t begin = 0, end = 0;  ///< elements of the tensor in the order of its memory
};

/// A tensor of the model or of its optimizer's state. Its elements are stored in the order of
/// memory that `shape` and `strides` describe: the model's own, so that shards are written as they
/// lie, or a contiguous tensor's, if it is stored whole.
struct TensorRecord {
  /// `param`, `buffer`, `state`, or `master` for a parameter in the dtype that the optimizer
  /// updates if `param` has another.
  std::string kind;
  std::string state;               ///< for a `state`: its name, such as `exp_avg`
  std::vector<std::string> names;  ///< of the parameter or buffer; several if it is tied
  std::string dtype;               ///< as in safetensors
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::vector<ChunkRecord> chunks;  ///< ascending; together they are the tensor

  int64_t numel() const;
  /// `KIND/NAME` or `state/STATE/NAME`: unique in a checkpoint for every name.
  std::string id(size_t name = 0) const;
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
};

constexpr const char* kIndexFile = "index.json";

/// `rank-00000-of-00002.safetensors`
std::string rank_file(int rank, int size);
/// `model-00001-of-00002.safetensors`: numbered from 1, as other tools do
std::string model_file(int number, int count);

std::string to_json(const CheckpointIndex& index);
/// Reads what `to_json` wrote. Throws `c10::ValueError` for anything else.
CheckpointIndex index_from_json(const std::string& text);
/// Throws `c10::ValueError` unless the chunks of each tensor are the whole tensor.
void check_whole(const CheckpointIndex& index);

/// Adds what another rank wrote.
void merge_into(CheckpointIndex& index, const CheckpointIndex& part);

}  // namespace tessera
