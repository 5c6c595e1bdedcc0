#include "checkpoint/checkpoint_writer.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <random>
#include <unordered_map>
#include <utility>

#include "checkpoint/parts.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/series.h"

namespace tessera {
namespace {

void write_index(const std::filesystem::path& path, const CheckpointIndex& index) {
  const std::string text = to_json(index);
  File file = File::create(path);
  file.write(text.data(), text.size(), 0);
  file.sync();
}

}  // namespace

void CheckpointWriter::begin() {
  directory_.prepare();
  remove_abandoned_drafts(directory_.path());
}

std::string new_save_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

CheckpointIndex CheckpointWriter::write_file(const RankContents& contents, Pace* pace) const {
  TORCH_CHECK(std::filesystem::is_directory(draft()),
              "[save_checkpoint] all ranks must see the same files; rank ", rank_,
              " does not see '", draft().string(), "', which rank 0 made");
  CheckpointIndex index = contents.index;
  if (contents.chunks.empty()) return index;
  std::vector<TensorHeader> headers;
  for (const ChunkData& chunk : contents.chunks)
    headers.push_back({chunk.key, safetensors_dtype(chunk.dtype), {chunk.numel}});
  SafetensorsWriter file(File::create(draft() / rank_file(rank_, size_)), std::move(headers),
                         {{"format", "tessera"}, {"id", id_}}, pace);
  std::unordered_map<std::string, std::vector<uint64_t>> checksums;
  for (const ChunkData& chunk : contents.chunks)
    checksums[chunk.key] = file.write(chunk.key, chunk.get());
  file.sync();
  for (TensorRecord& tensor : index.tensors) {
    for (ChunkRecord& chunk : tensor.chunks) {
      const auto it = checksums.find(chunk.key);
      if (it != checksums.end() && chunk.checksums.empty()) chunk.checksums = std::move(it->second);
    }
  }
  return index;
}

void CheckpointWriter::write(const RankContents& contents, Pace* pace) {
  try {
    write_part(draft(), rank_, write_file(contents, pace));
  } catch (const c10::Error& error) {
    write_failure(draft(), rank_, size_, error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    write_failure(draft(), rank_, size_, error.what());
    throw;
  }
}

void CheckpointWriter::commit(std::chrono::milliseconds timeout, const std::atomic<bool>& stop) {
  CheckpointIndex index = collect_parts(draft(), size_, timeout, stop);
  index.id = id_;
  if (keep_last_ > 0) index.saved_as = directory_.path().filename().string();
  check_whole(index, (draft() / kIndexFile).string());
  write_index(draft() / kIndexFile, index);
  directory_.publish();
  remove_older(directory_.path(), keep_last_);
}

}  // namespace tessera
