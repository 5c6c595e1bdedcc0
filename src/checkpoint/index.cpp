#include "checkpoint/index.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/version.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "tessera checkpoint";
constexpr int kFormatVersion = 1;

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

json to_json_tensor(const TensorRecord& tensor) {
  json chunks = json::array();
  for (const ChunkRecord& chunk : tensor.chunks) {
    chunks.push_back(
        {{"file", chunk.file}, {"key", chunk.key}, {"begin", chunk.begin}, {"end", chunk.end}});
  }
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
  for (const json& item : value.at("chunks")) {
    tensor.chunks.push_back({item.at("file"), item.at("key"), item.at("begin"), item.at("end")});
  }
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

CheckpointIndex from_json_index(const json& value) {
  TORCH_CHECK_VALUE(
      value.at("format") == json(kFormat) && value.at("format_version") == kFormatVersion,
      "[load_checkpoint] the index must have the format '", kFormat, "', version ", kFormatVersion,
      "; got ", value.at("format").dump(), ", version ", value.at("format_version").dump());
  CheckpointIndex index;
  value.at("id").get_to(index.id);
  value.at("world_size").get_to(index.world_size);
  index.numbers = from_json_numbers(value.at("numbers"));
  for (const json& item : value.at("tensors")) index.tensors.push_back(from_json_tensor(item));
  if (value.contains("optimizer")) index.optimizer = from_json_optimizer(value.at("optimizer"));
  if (value.contains("scaler")) index.scaler = from_json_numbers(value.at("scaler"));
  return index;
}

// The position of the last element; elements fill the memory without gaps if it is numel - 1.
int64_t last_position(const TensorRecord& tensor) {
  int64_t last = 0;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim)
    last += (tensor.shape[dim] - 1) * tensor.strides[dim];
  return last;
}

void check_geometry(const TensorRecord& tensor) {
  auto is_negative = [](int64_t value) { return value < 0; };
  const bool fits = !tensor.names.empty() && tensor.shape.size() == tensor.strides.size() &&
                    std::none_of(tensor.shape.begin(), tensor.shape.end(), is_negative) &&
                    std::none_of(tensor.strides.begin(), tensor.strides.end(), is_negative);
  TORCH_CHECK_VALUE(fits && (tensor.numel() == 0 || last_position(tensor) == tensor.numel() - 1),
                    "[load_checkpoint] the shape and strides of '",
                    tensor.names.empty() ? "" : tensor.names.front(), "' don't describe a tensor");
}

void check_chunks(const TensorRecord& tensor) {
  int64_t end = 0;
  for (const ChunkRecord& chunk : tensor.chunks) {
    TORCH_CHECK_VALUE(chunk.begin == end && chunk.end > chunk.begin,
                      "[load_checkpoint] the stored '", tensor.id(),
                      "' has a gap or an overlap at element ", end);
    TORCH_CHECK_VALUE(!chunk.file.empty() && chunk.file.find('/') == std::string::npos,
                      "[load_checkpoint] '", chunk.file,
                      "' must be the name of a file beside the index");
    end = chunk.end;
  }
  TORCH_CHECK_VALUE(end == tensor.numel(), "[load_checkpoint] '", tensor.id(), "' has ",
                    tensor.numel(), " elements, but ", end, " are stored");
}

}  // namespace

int64_t TensorRecord::numel() const {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
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
  json tensors = json::array();
  for (const TensorRecord& tensor : index.tensors) tensors.push_back(to_json_tensor(tensor));
  json result = {{"format", kFormat},
                 {"format_version", kFormatVersion},
                 {"tessera_version", fmt::format("{}.{}.{}", TESSERA_VERSION_MAJOR,
                                                 TESSERA_VERSION_MINOR, TESSERA_VERSION_PATCH)},
                 {"id", index.id},
                 {"world_size", index.world_size},
                 {"numbers", to_json_numbers(index.numbers)},
                 {"tensors", std::move(tensors)}};
  if (index.optimizer) result["optimizer"] = to_json_optimizer(*index.optimizer);
  if (!index.scaler.empty()) result["scaler"] = to_json_numbers(index.scaler);
  return result.dump(1) + "\n";
}

CheckpointIndex index_from_json(const std::string& text) {
  try {
    return from_json_index(json::parse(text));
  } catch (const json::exception& error) {
    TORCH_CHECK_VALUE(false,
                      "[load_checkpoint] the index must be that of a checkpoint: ", error.what());
  }
}

void check_whole(const CheckpointIndex& index) {
  for (const TensorRecord& tensor : index.tensors) {
    check_geometry(tensor);
    check_chunks(tensor);
  }
}

void merge_into(CheckpointIndex& index, const CheckpointIndex& part) {
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < index.tensors.size(); ++i) places[index.tensors[i].id()] = i;
  for (const TensorRecord& tensor : part.tensors) {
    const auto [place, is_new] = places.emplace(tensor.id(), index.tensors.size());
    if (is_new) {
      index.tensors.push_back(tensor);
      continue;
    }
    std::vector<ChunkRecord>& chunks = index.tensors[place->second].chunks;
    chunks.insert(chunks.end(), tensor.chunks.begin(), tensor.chunks.end());
    std::sort(chunks.begin(), chunks.end(),
              [](const auto& a, const auto& b) { return a.begin < b.begin; });
  }
  if (index.optimizer && part.optimizer) {
    index.optimizer->counts.insert(part.optimizer->counts.begin(), part.optimizer->counts.end());
  }
}

}  // namespace tessera
