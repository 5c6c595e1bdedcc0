#include "checkpoint/index.h"

#include <c10/util/Exception.h>
#include <c10/util/strides.h>
#include <fmt/format.h>
#include <tessera/version.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/files/json_text.h"
#include "base/files/untrusted.h"
#include "checkpoint/checksum.h"
#include "checkpoint/safetensors.h"
#include "engine/optim/param_state.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "tessera checkpoint";
constexpr int kFormatVersion = 2;
constexpr int64_t kMostRanks = std::numeric_limits<int>::max();
constexpr int64_t kMostIndexBytes = int64_t{1} << 31;
// The checksum is that of the text with these digits in place of the checksum.
constexpr const char* kNoChecksum = "0000000000000000";

// JSON has no infinities and no NaN: they are stored as text.
json to_json_number(double value) {
  if (std::isfinite(value)) return value;
  return fmt::format("{}", value);
}

double from_json_number(const json& value) {
  if (!value.is_string()) return value.get<double>();
  const auto text = value.get<std::string>();
  const double number = std::strtod(text.c_str(), nullptr);
  TORCH_CHECK_VALUE(text == fmt::format("{}", number) && !std::isfinite(number), "'",
                    shortened(text), "' must be a number");
  return number;
}

json to_json_numbers(const std::map<std::string, double>& numbers) {
  json result = json::object();
  for (const auto& [name, value] : numbers) result[name] = to_json_number(value);
  return result;
}

// Whole counts are whole in the file, too.
json to_json_counts(const std::map<std::string, double>& counts) {
  json result = json::object();
  for (const auto& [name, count] : counts)
    result[name] = is_whole(count) ? json(static_cast<int64_t>(count)) : to_json_number(count);
  return result;
}

double from_json_count(const json& value) {
  if (!value.is_number_integer()) return from_json_number(value);
  constexpr int64_t kMost = int64_t{1} << 53;
  return static_cast<double>(whole_number(value, "a count", -kMost, kMost));
}

std::map<std::string, double> from_json_numbers(const json& values) {
  return named_values(values, from_json_number);
}

json to_json_chunk(const ChunkRecord& chunk) {
  json result = {{"file", chunk.file},
                 {"key", chunk.key},
                 {"begin", chunk.region.begin},
                 {"end", chunk.region.end}};
  if (const auto& box = chunk.region.box)
    result["box"] = {{"shape", box->shape}, {"offset", box->offset}, {"sizes", box->sizes}};
  for (const uint64_t block : chunk.checksums) result["xxh3"].push_back(checksum_text(block));
  return result;
}

ChunkRecord from_json_chunk(const json& value) {
  ChunkRecord chunk{value.at("file"), value.at("key")};
  chunk.region.begin = whole_number(value.at("begin"), "the begin of a piece");
  chunk.region.end = whole_number(value.at("end"), "the end of a piece");
  if (value.contains("box")) {
    const auto numbers = [&](const char* name) {
      return whole_numbers(value.at("box").at(name), "a number of a box");
    };
    chunk.region.box = {numbers("shape"), numbers("offset"), numbers("sizes")};
  }
  for (const json& block : value.at("xxh3")) chunk.checksums.push_back(checksum_from_text(block));
  return chunk;
}

json to_json_tensor(const TensorRecord& tensor) {
  json chunks = json::array();
  for (const ChunkRecord& chunk : tensor.chunks) chunks.push_back(to_json_chunk(chunk));
  json result = {{"kind", tensor.kind},       {"names", tensor.names},
                 {"dtype", tensor.dtype},     {"shape", tensor.shape},
                 {"strides", tensor.strides}, {"chunks", std::move(chunks)}};
  if (!tensor.state.empty()) result["state"] = tensor.state;
  return result;
}

TensorRecord from_json_tensor(const json& value) {
  TensorRecord tensor;
  value.at("kind").get_to(tensor.kind);
  tensor.state = value.value("state", "");
  value.at("names").get_to(tensor.names);
  value.at("dtype").get_to(tensor.dtype);
  tensor.shape = whole_numbers(value.at("shape"), "a size");
  tensor.strides = whole_numbers(value.at("strides"), "a stride");
  for (const json& item : value.at("chunks")) tensor.chunks.push_back(from_json_chunk(item));
  return tensor;
}

json to_json_optimizer(const OptimizerRecord& optimizer) {
  json groups = json::array();
  for (const ParamGroupRecord& group : optimizer.param_groups) {
    groups.push_back({{"options", to_json_numbers(group.options)}, {"params", group.params}});
  }
  json counts = json::object();
  for (const auto& [name, values] : optimizer.counts) counts[name] = to_json_counts(values);
  return {{"kind", optimizer.kind},
          {"param_groups", std::move(groups)},
          {"counts", std::move(counts)},
          {"steps", optimizer.steps}};
}

OptimizerRecord from_json_optimizer(const json& value) {
  OptimizerRecord optimizer;
  value.at("kind").get_to(optimizer.kind);
  for (const json& item : value.at("param_groups")) {
    optimizer.param_groups.push_back({from_json_numbers(item.at("options")), item.at("params")});
  }
  optimizer.counts = named_values(
      value.at("counts"), [](const json& counts) { return named_values(counts, from_json_count); });
  if (value.contains("steps")) optimizer.steps = whole_number(value.at("steps"), "the steps");
  return optimizer;
}

constexpr std::array<std::string_view, 6> kKinds = {"param",  "buffer", "state",
                                                    "master", "tensor", "rank"};

void check_box(const Box& box, const TensorRecord& tensor) {
  const CheckedShape shape(box.shape);
  TORCH_CHECK_VALUE(shape.numel() == tensor.numel() && shape.has_box(box.offset, box.sizes) &&
                        is_same_order(tensor.shape, row_major(tensor.shape), tensor.strides),
                    "it must lie in the tensor");
}

void check_chunk(const ChunkRecord& chunk, const TensorRecord& tensor) {
  check_file_name(chunk.file);
  const Region& region = chunk.region;
  if (region.box) naming_part("its box", [&] { check_box(*region.box, tensor); });
  const int64_t numel = region.box ? region.box->numel() : tensor.numel();
  TORCH_CHECK_VALUE(0 <= region.begin && region.begin < region.end && region.end <= numel,
                    "it must be a range of the ", numel, " elements; got ", region.begin, " to ",
                    region.end);
  const int64_t nbytes = region.numel() * item_size(tensor.dtype);
  const int64_t blocks = (nbytes - 1) / kChecksumBlock + 1;
  TORCH_CHECK_VALUE(std::ssize(chunk.checksums) == blocks, "its ", nbytes, " bytes must have ",
                    blocks, " checksums; got ", chunk.checksums.size());
}

void check_rank(const std::string& text, int world_size) {
  int rank = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == text.data() + text.size() && rank >= 0 && rank < world_size,
      "its rank must be 0 to ", world_size - 1, "; got '", shortened(text), "'");
}

void check_parts(const TensorRecord& tensor, int world_size) {
  const CheckedShape shape(tensor.shape, item_size(tensor.dtype));
  shape.reach(tensor.strides);  // throws for invalid strides
  TORCH_CHECK_VALUE(
      shape.is_dense(tensor.strides), "its elements must lie one after another; got shape ",
      c10::IntArrayRef(tensor.shape), " and strides ", c10::IntArrayRef(tensor.strides));
  if (tensor.kind == "rank") check_rank(tensor.state, world_size);
  for (const ChunkRecord& chunk : tensor.chunks) {
    naming_part("the piece '" + shortened(chunk.key) + "'", [&] { check_chunk(chunk, tensor); });
  }
}

// Throws, naming the tensor, unless all numbers of its record are safe to compute with: see
// `index_from_json()`. `check_whole()` checks that its chunks make up the tensor.
void check_record(const TensorRecord& tensor, int world_size) {
  TORCH_CHECK_VALUE(std::find(kKinds.begin(), kKinds.end(), tensor.kind) != kKinds.end(),
                    "a tensor is of the kind '", shortened(tensor.kind),
                    "', which is not known here");
  TORCH_CHECK_VALUE(!tensor.names.empty(), "a tensor of the kind '", tensor.kind, "' has no name");
  naming_part("'" + shortened(tensor.id()) + "'", [&] { check_parts(tensor, world_size); });
}

void check_format(const json& value) {
  const json &format = value.at("format"), &version = value.at("format_version");
  TORCH_CHECK_VALUE(format == json(kFormat), "the format must be '", kFormat, "'; got ",
                    shortened(format.dump()));
  TORCH_CHECK_VALUE(!(version > json(kFormatVersion)), "it has format version ",
                    shortened(version.dump()), " and was written by tessera ",
                    shortened(value.value("tessera_version", "?")), "; this one reads version ",
                    kFormatVersion, ": load it with a newer tessera");
  TORCH_CHECK_VALUE(version == json(kFormatVersion), "it has format version ",
                    shortened(version.dump()), "; expected ", kFormatVersion);
  TORCH_CHECK_VALUE(value.at("checksum_block_bytes") == kChecksumBlock,
                    "checksums must be of blocks of ", kChecksumBlock, " bytes");
}

std::vector<std::string> from_json_models(const json& value) {
  const auto names = value.get<std::vector<std::string>>();
  for (const std::string& name : names)
    TORCH_CHECK_VALUE(is_model_name(name),
                      "a model's name must be of letters, digits, - and _; got '", shortened(name),
                      "'");
  return names;
}

CheckpointIndex from_json_index(const json& value) {
  check_format(value);
  CheckpointIndex index;
  value.at("id").get_to(index.id);
  index.world_size =
      static_cast<int>(whole_number(value.at("world_size"), "world_size", 1, kMostRanks));
  index.plan = value.value("plan", "");
  index.saved_as = value.value("saved_as", "");
  index.numbers = from_json_numbers(value.at("numbers"));
  if (value.contains("texts")) value.at("texts").get_to(index.texts);
  if (value.contains("models")) index.models = from_json_models(value.at("models"));
  int64_t nbytes = 0;
  for (const json& item : value.at("tensors")) {
    const TensorRecord& tensor = index.tensors.emplace_back(from_json_tensor(item));
    check_record(tensor, index.world_size);
    nbytes = checked_sum(nbytes, tensor.nbytes());
  }
  if (value.contains("optimizer")) index.optimizer = from_json_optimizer(value.at("optimizer"));
  if (value.contains("scaler")) index.scaler = from_json_numbers(value.at("scaler"));
  if (value.contains("schedulers")) {
    for (const json& item : value.at("schedulers"))
      index.schedulers.push_back(from_json_numbers(item));
  }
  return index;
}

// Returns where the digits of the checksum begin in the text; npos if it has none.
size_t place_of_checksum(const std::string& text) {
  const std::string name = "\"checksum\": \"";
  const size_t place = text.substr(0, 64).find(name);
  return place == std::string::npos ? place : place + name.size();
}

void check_text(std::string text) {
  const size_t place = place_of_checksum(text);
  if (place == std::string::npos) return;
  const std::string digits = text.substr(place, std::strlen(kNoChecksum));
  text.replace(place, digits.size(), kNoChecksum);
  TORCH_CHECK_VALUE(checksum_text(checksum(text.data(), text.size())) == digits,
                    "it is damaged or was changed: it does not have the checksum that it names");
}

}  // namespace

int64_t TensorRecord::numel() const { return CheckedShape(shape).numel(); }

int64_t TensorRecord::nbytes() const { return CheckedShape(shape, item_size(dtype)).nbytes(); }

int TensorRecord::rank() const { return std::stoi(state); }  // checked in `check_record()`

TensorRecord contiguous_record(std::string kind, std::vector<std::string> names,
                               std::vector<int64_t> shape, at::ScalarType dtype) {
  TensorRecord record{
      .kind = std::move(kind), .names = std::move(names), .shape = std::move(shape)};
  record.strides = row_major(record.shape);
  record.dtype = safetensors_dtype(dtype);
  return record;
}

std::vector<int64_t> row_major(at::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

bool is_same_order(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1 && a[dim] != b[dim]) return false;
  }
  return true;
}

bool is_of_model(const TensorRecord& record) {
  return record.kind == "param" || record.kind == "buffer" || record.kind == "tensor";
}

void add_other_names(const TensorRecord& record, std::map<std::string, std::string>& metadata) {
  for (size_t name = 1; name < record.names.size(); ++name)
    metadata[record.names[name]] = record.names.front();
}

bool is_model_name(const std::string& name) {
  const auto is_allowed = [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_';
  };
  return !name.empty() && std::all_of(name.begin(), name.end(), is_allowed);
}

int64_t total_nbytes(const CheckpointIndex& index) {
  int64_t total = 0;
  for (const TensorRecord& tensor : index.tensors) total += tensor.nbytes();
  return total;
}

std::string TensorRecord::id(size_t name) const {
  return state.empty() ? fmt::format("{}/{}", kind, names[name])
                       : fmt::format("{}/{}/{}", kind, state, names[name]);
}

std::string rank_file(int rank, int size) {
  return fmt::format("rank-{:05}-of-{:05}.safetensors", rank, size);
}

std::string model_file(int number, int count) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", number, count);
}

std::string to_json(const CheckpointIndex& index) {
  json result;
  result["format"] = kFormat;
  result["format_version"] = kFormatVersion;
  result["tessera_version"] =
      fmt::format("{}.{}.{}", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR, TESSERA_VERSION_PATCH);
  result["torch_version"] = TORCH_VERSION;
  result["checksum_block_bytes"] = kChecksumBlock;
  result["id"] = index.id;
  result["world_size"] = index.world_size;
  result["plan"] = index.plan;
  if (!index.saved_as.empty()) result["saved_as"] = index.saved_as;
  result["numbers"] = to_json_numbers(index.numbers);
  if (!index.texts.empty()) result["texts"] = index.texts;
  if (!index.models.empty()) result["models"] = index.models;
  if (index.optimizer) result["optimizer"] = to_json_optimizer(*index.optimizer);
  if (!index.scaler.empty()) result["scaler"] = to_json_numbers(index.scaler);
  for (const auto& scheduler : index.schedulers)
    result["schedulers"].push_back(to_json_numbers(scheduler));
  result["tensors"] = json::array();
  for (const TensorRecord& tensor : index.tensors)
    result["tensors"].push_back(to_json_tensor(tensor));
  std::string text = fmt::format("{{\n \"checksum\": \"{}\",{}\n", kNoChecksum,
                                 result.dump(1).substr(1));  // without its opening brace
  const std::string digits = checksum_text(checksum(text.data(), text.size()));
  return text.replace(place_of_checksum(text), digits.size(), digits);
}

CheckpointIndex index_from_json(const std::string& text, const std::string& path) {
  return naming_file("checkpoint", path, "can't be read", [&] {
    check_text(text);
    return from_json_index(parse_json(text));
  });
}

CheckpointIndex read_index(const File& directory) {
  const File file = directory.open(kIndexFile);
  return index_from_json(file.read_all(kMostIndexBytes), file.path());
}

void check_whole(const CheckpointIndex& index, const std::string& path) {
  naming_file("checkpoint", path, "can't be read", [&] {
    std::unordered_set<std::string> seen;
    for (const TensorRecord& tensor : index.tensors) {
      for (size_t name = 0; name < tensor.names.size(); ++name) {
        // Ranks give their own tensors the same names; `id()` includes the rank.
        TORCH_CHECK_VALUE(seen.insert(tensor.id(name)).second, "it has '",
                          shortened(tensor.id(name)), "' twice");
      }
      std::vector<const Region*> regions;
      for (const ChunkRecord& chunk : tensor.chunks) regions.push_back(&chunk.region);
      const std::string gap = describe_gap(tensor.numel(), regions);
      TORCH_CHECK_VALUE(gap.empty(), "the stored '", shortened(tensor.id()), "' ", gap);
    }
  });
}

CheckpointIndex merged(std::vector<CheckpointIndex> parts) {
  CheckpointIndex index = std::move(parts.front());
  std::unordered_map<std::string, size_t> places;
  for (size_t i = 0; i < index.tensors.size(); ++i) places[index.tensors[i].id()] = i;
  for (size_t rank = 1; rank < parts.size(); ++rank) {
    for (TensorRecord& tensor : parts[rank].tensors) {
      const auto [place, is_new] = places.emplace(tensor.id(), index.tensors.size());
      if (is_new) {
        index.tensors.push_back(std::move(tensor));
        continue;
      }
      std::vector<ChunkRecord>& chunks = index.tensors[place->second].chunks;
      for (ChunkRecord& chunk : tensor.chunks) chunks.push_back(std::move(chunk));
    }
    if (index.optimizer && parts[rank].optimizer) {
      const auto& counts = parts[rank].optimizer->counts;
      index.optimizer->counts.insert(counts.begin(), counts.end());
    }
  }
  return index;
}

}  // namespace tessera
