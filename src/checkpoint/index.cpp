#include "checkpoint/index.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/version.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "checkpoint/checksum.h"
#include "checkpoint/safetensors.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "tessera checkpoint";
constexpr int kFormatVersion = 2;
// The checksum of the text in which it has these digits.
constexpr const char* kNoChecksum = "0000000000000000";

// JSON has no infinities and no NaN: they become text.
json to_json_number(double value) {
  if (std::isfinite(value)) return value;
  return fmt::format("{}", value);
}

double from_json_number(const json& value) {
  return value.is_string() ? std::strtod(value.get<std::string>().c_str(), nullptr)
                           : value.get<double>();
}

json to_json_numbers(const std::map<std::string, double>& numbers) {
  json result = json::object();
  for (const auto& [name, value] : numbers) result[name] = to_json_number(value);
  return result;
}

std::map<std::string, double> from_json_numbers(const json& values) {
  std::map<std::string, double> result;
  for (const auto& [name, value] : values.items()) result[name] = from_json_number(value);
  return result;
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
  ChunkRecord chunk{value.at("file"), value.at("key"), {value.at("begin"), value.at("end")}};
  if (value.contains("box")) {
    const json& box = value.at("box");
    chunk.region.box = {box.at("shape"), box.at("offset"), box.at("sizes")};
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
  value.at("shape").get_to(tensor.shape);
  value.at("strides").get_to(tensor.strides);
  for (const json& item : value.at("chunks")) tensor.chunks.push_back(from_json_chunk(item));
  return tensor;
}

json to_json_optimizer(const OptimizerRecord& optimizer) {
  json groups = json::array();
  for (const ParamGroupRecord& group : optimizer.param_groups) {
    groups.push_back({{"options", to_json_numbers(group.options)}, {"params", group.params}});
  }
  return {{"kind", optimizer.kind},
          {"param_groups", std::move(groups)},
          {"counts", optimizer.counts},
          {"steps", optimizer.steps}};
}

OptimizerRecord from_json_optimizer(const json& value) {
  OptimizerRecord optimizer;
  value.at("kind").get_to(optimizer.kind);
  for (const json& item : value.at("param_groups")) {
    optimizer.param_groups.push_back({from_json_numbers(item.at("options")), item.at("params")});
  }
  value.at("counts").get_to(optimizer.counts);
  optimizer.steps = value.value("steps", int64_t{0});
  return optimizer;
}

void check_format(const json& value) {
  const json format = value.at("format"), version = value.at("format_version");
  TORCH_CHECK_VALUE(format == json(kFormat), "the format must be '", kFormat, "'; got ",
                    format.dump());
  TORCH_CHECK_VALUE(!(version > json(kFormatVersion)), "it has format version ", version.dump(),
                    " and was written by tessera ", value.value("tessera_version", "?"),
                    "; this one reads version ", kFormatVersion, ": load it with a newer tessera");
  TORCH_CHECK_VALUE(version == json(kFormatVersion), "it has format version ", version.dump(),
                    "; expected ", kFormatVersion);
  TORCH_CHECK_VALUE(value.at("checksum_block_bytes") == kChecksumBlock,
                    "checksums must be of blocks of ", kChecksumBlock, " bytes");
}

CheckpointIndex from_json_index(const json& value) {
  check_format(value);
  CheckpointIndex index;
  value.at("id").get_to(index.id);
  value.at("world_size").get_to(index.world_size);
  index.plan = value.value("plan", "");
  index.numbers = from_json_numbers(value.at("numbers"));
  for (const json& item : value.at("tensors")) index.tensors.push_back(from_json_tensor(item));
  if (value.contains("optimizer")) index.optimizer = from_json_optimizer(value.at("optimizer"));
  if (value.contains("scaler")) index.scaler = from_json_numbers(value.at("scaler"));
  if (value.contains("schedulers")) {
    for (const json& item : value.at("schedulers"))
      index.schedulers.push_back(from_json_numbers(item));
  }
  return index;
}

// Where the digits of the checksum are in the text; npos if it has none.
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

// The position of the last element; elements fill the memory without gaps if it is numel - 1.
int64_t last_position(const TensorRecord& tensor) {
  int64_t last = 0;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim)
    last += (tensor.shape[dim] - 1) * tensor.strides[dim];
  return last;
}

bool are_sizes(const std::vector<int64_t>& values) {
  return std::none_of(values.begin(), values.end(), [](int64_t value) { return value < 0; });
}

bool is_tensor(const TensorRecord& tensor) {
  return !tensor.names.empty() && tensor.shape.size() == tensor.strides.size() &&
         are_sizes(tensor.shape) && are_sizes(tensor.strides) &&
         (tensor.numel() == 0 || last_position(tensor) == tensor.numel() - 1);
}

bool is_box_of(const Box& box, const TensorRecord& tensor) {
  if (box.offset.size() != box.shape.size() || box.sizes.size() != box.shape.size()) return false;
  int64_t numel = 1;
  for (size_t dim = 0; dim < box.shape.size(); ++dim) {
    numel *= box.shape[dim];
    if (box.offset[dim] < 0 || box.sizes[dim] < 1 ||
        box.offset[dim] + box.sizes[dim] > box.shape[dim])
      return false;
  }
  return numel == tensor.numel() && is_row_major(tensor);
}

void check_tensor(const TensorRecord& tensor) {
  TORCH_CHECK_VALUE(is_tensor(tensor), "the shape and strides of '",
                    tensor.names.empty() ? "" : tensor.id(), "' don't describe a tensor");
  std::vector<const Region*> regions;
  for (const ChunkRecord& chunk : tensor.chunks) {
    TORCH_CHECK_VALUE(!chunk.file.empty() && chunk.file.find('/') == std::string::npos, "'",
                      chunk.file, "' must be the name of a file beside the index");
    TORCH_CHECK_VALUE(!chunk.region.box || is_box_of(*chunk.region.box, tensor),
                      "a box of the stored '", tensor.id(), "' is not in the tensor");
    regions.push_back(&chunk.region);
  }
  const std::string gap = describe_gap(tensor.numel(), regions);
  TORCH_CHECK_VALUE(gap.empty(), "the stored '", tensor.id(), "' ", gap);
}

// Lets errors of `f` begin with what is wrong: the index.
template <class F>
auto naming(const std::string& path, F&& f) {
  try {
    return f();
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, "[checkpoint] '", path, "' must be the index of a checkpoint: ",
                      error.what());
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "[checkpoint] '", path, "' can't be read: ",
                      error.what_without_backtrace());
  }
}

}  // namespace

int64_t TensorRecord::numel() const {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

int64_t TensorRecord::nbytes() const {
  return numel() * static_cast<int64_t>(c10::elementSize(scalar_type_of(dtype)));
}

bool is_of_model(const TensorRecord& record) {
  return record.kind == "param" || record.kind == "buffer" || record.kind == "tensor";
}

void add_other_names(const TensorRecord& record, std::map<std::string, std::string>& metadata) {
  for (size_t name = 1; name < record.names.size(); ++name)
    metadata[record.names[name]] = record.names.front();
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

bool is_row_major(const TensorRecord& tensor) {
  int64_t stride = 1;
  for (size_t dim = tensor.shape.size(); dim-- > 0; stride *= tensor.shape[dim]) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != stride && tensor.numel() > 0) return false;
  }
  return true;
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
  result["numbers"] = to_json_numbers(index.numbers);
  if (index.optimizer) result["optimizer"] = to_json_optimizer(*index.optimizer);
  if (!index.scaler.empty()) result["scaler"] = to_json_numbers(index.scaler);
  for (const auto& scheduler : index.schedulers)
    result["schedulers"].push_back(to_json_numbers(scheduler));
  result["tensors"] = json::array();
  for (const TensorRecord& tensor : index.tensors)
    result["tensors"].push_back(to_json_tensor(tensor));
  std::string text = fmt::format("{{\n \"checksum\": \"{}\",{}\n", kNoChecksum,
                                 result.dump(1).substr(1));  // without its brace
  const std::string digits = checksum_text(checksum(text.data(), text.size()));
  return text.replace(place_of_checksum(text), digits.size(), digits);
}

CheckpointIndex index_from_json(const std::string& text, const std::string& path) {
  return naming(path, [&] {
    check_text(text);
    return from_json_index(json::parse(text));
  });
}

void check_whole(const CheckpointIndex& index, const std::string& path) {
  naming(path, [&] {
    for (const TensorRecord& tensor : index.tensors) check_tensor(tensor);
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
