#include <c10/util/Exception.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/files/file.h"
#include "base/files/untrusted.h"
#include "checkpoint/safetensors.h"
#include "interop/exported_model.h"

namespace tessera {
namespace {

constexpr int64_t kUsualShardBytes = 5'000'000'000;

struct ModelShard {
  std::vector<const TensorRecord*> tensors;
  int64_t nbytes = 0;
};

// Fills one file after another, in the order of the tensors. A tensor that is larger than a file
// may be has its own.
std::vector<ModelShard> shards_of(const ExportedModel& model) {
  const int64_t most = model.options().max_shard_bytes.value_or(kUsualShardBytes);
  std::vector<ModelShard> shards(1);
  for (const TensorRecord& record : model.tensors()) {
    const int64_t nbytes = model.nbytes_of(record);
    if (!shards.back().tensors.empty() && shards.back().nbytes > most - std::min(nbytes, most))
      shards.emplace_back();
    shards.back().tensors.push_back(&record);
    shards.back().nbytes = checked_sum(shards.back().nbytes, nbytes);
  }
  return shards;
}

void write_shard(const std::filesystem::path& file, const ModelShard& shard, ExportedModel& model) {
  std::vector<TensorHeader> headers;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  for (const TensorRecord* record : shard.tensors) {
    headers.push_back({record->names.front(), model.dtype_of(*record), record->shape});
    add_other_names(*record, metadata);
  }
  SafetensorsWriter writer(File::create(file), std::move(headers), metadata);
  for (const TensorRecord* record : shard.tensors)
    writer.write(record->names.front(), model.read(*record));
}

void write_index(const std::filesystem::path& directory, const std::vector<ModelShard>& shards) {
  nlohmann::json places = nlohmann::json::object();
  int64_t nbytes = 0;
  for (size_t number = 0; number < shards.size(); ++number) {
    nbytes += shards[number].nbytes;
    const std::string name =
        model_file(static_cast<int>(number + 1), static_cast<int>(shards.size()));
    for (const TensorRecord* record : shards[number].tensors) places[record->names.front()] = name;
  }
  const nlohmann::json index = {{"metadata", {{"total_size", nbytes}}}, {"weight_map", places}};
  const std::string text = index.dump(2) + "\n";
  File file = File::create(directory / "model.safetensors.index.json");
  file.write(text.data(), text.size(), 0);
}

}  // namespace

void write_safetensors(const std::filesystem::path& file, ExportedModel& model) {
  ModelShard all;
  for (const TensorRecord& record : model.tensors()) all.tensors.push_back(&record);
  write_shard(file, all, model);
}

void write_hugging_face(const std::filesystem::path& directory, ExportedModel& model) {
  const std::vector<ModelShard> shards = shards_of(model);
  if (shards.size() == 1) return write_safetensors(directory / "model.safetensors", model);
  const int count = static_cast<int>(shards.size());
  for (int number = 1; number <= count; ++number)
    write_shard(directory / model_file(number, count), shards[static_cast<size_t>(number - 1)],
                model);
  write_index(directory, shards);
}

}  // namespace tessera
