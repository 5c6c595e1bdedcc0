#include "checkpoint/checkpoint_writer.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <thread>
#include <unordered_map>
#include <utility>

#include "comm/group/collective_name.h"
#include "comm/group/interruption.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// The beginning of a failed rank's message; a part is JSON.
constexpr const char* kFailed = "failed: ";

File write_text(const fs::path& path, const std::string& text) {
  File file = File::create(path);
  file.write(text.data(), text.size(), 0);
  return file;
}

// Writes the whole file, or none.
void put(const fs::path& path, const std::string& text) {
  const fs::path unfinished = path.parent_path() / ("rank-unfinished-" + path.filename().string());
  write_text(unfinished, text);
  fs::rename(unfinished, path);
}

std::optional<std::string> read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return std::string{std::istreambuf_iterator<char>(file), {}};
}

// Changes while a rank writes into the directory.
std::pair<size_t, uintmax_t> extent(const fs::path& directory) {
  std::pair<size_t, uintmax_t> result;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    std::error_code ignored;
    const auto size = entry.file_size(ignored);
    result.first += 1;
    if (!ignored) result.second += size;
  }
  return result;
}

}  // namespace

std::string new_save_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

void CheckpointWriter::begin(std::vector<std::string> models) {
  directory_.prepare();
  remove_abandoned_drafts(directory_.path());
  models_ = std::move(models);
  for (const std::string& model : models_) fs::create_directory(draft() / model);
}

// `model`: the name of one of several, or empty.
fs::path CheckpointWriter::part_file(const std::string& model, int rank) const {
  return draft() / model / (fs::path(rank_file(rank, size_)).stem().string() + kPartSuffix);
}

CheckpointIndex CheckpointWriter::write_file(const RankContents& contents,
                                             const BeforeWrite& before_write) const {
  TORCH_CHECK(std::filesystem::is_directory(draft()),
              "[save_checkpoint] all ranks must see the same files; rank ", rank_,
              " does not see '", draft().string(), "', which rank 0 made");
  CheckpointIndex index = contents.index;
  if (contents.chunks.empty()) return index;
  std::vector<TensorHeader> headers;
  for (const ChunkData& chunk : contents.chunks)
    headers.push_back({chunk.key, safetensors_dtype(chunk.dtype), {chunk.numel}});
  SafetensorsWriter file(File::create(draft() / contents.name / rank_file(rank_, size_)),
                         std::move(headers), {{"format", "tessera"}, {"id", id_}}, before_write);
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

void CheckpointWriter::write(const RankContents& contents, const BeforeWrite& before_write) {
  try {
    // The one that a failure is reported in comes last.
    for (const RankContents& model : contents.models)
      put(part_file(model.name, rank_), to_json(write_file(model, before_write)));
    put(part_file("", rank_), to_json(write_file(contents, before_write)));
  } catch (...) {
    report_failure(exception_text(std::current_exception()));
    throw;
  }
}

void CheckpointWriter::report_failure(const std::string& error) const noexcept {
  try {
    put(part_file("", rank_), kFailed + error);
  } catch (const std::exception&) {
    // Then rank 0 learns of it when the ranks meet.
  }
}

CheckpointIndex CheckpointWriter::collect_parts(const std::string& model,
                                                std::chrono::milliseconds timeout,
                                                const std::atomic<bool>* stop) const {
  std::vector<CheckpointIndex> parts;
  auto pause = std::chrono::milliseconds(1);
  auto seen = extent(draft());
  Clock::time_point changed = Clock::now();
  while (std::ssize(parts) < size_) {
    const int rank = static_cast<int>(parts.size());
    const fs::path path = part_file(model, rank);
    if (const auto text = read_text(path)) {
      TORCH_CHECK(!text->starts_with(kFailed), text->substr(std::string(kFailed).size()),
                  " (on rank ", rank, " of ", size_, ")");
      parts.push_back(index_from_json(*text, path.string()));
      continue;
    }
    TORCH_CHECK(!stop || !*stop, "[save_checkpoint] the save to '", draft().string(),
                "' was stopped, because a rank failed");
    if (const auto now = extent(draft()); now != seen) seen = now, changed = Clock::now();
    TORCH_CHECK(Clock::now() - changed < timeout, "[save_checkpoint] rank ", rank, " of ", size_,
                " has not finished its files in '", draft().string(),
                "', and nothing was written for ", std::chrono::duration<double>(timeout).count(),
                " s");
    raise_interruption();
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(100));
  }
  for (int rank = 0; rank < size_; ++rank) fs::remove(part_file(model, rank));
  return merged(std::move(parts));
}

void CheckpointWriter::commit(std::chrono::milliseconds timeout, const std::atomic<bool>* stop) {
  CheckpointIndex index = collect_parts("", timeout, stop);  // the last that each rank writes
  for (const std::string& model : models_) {
    write_index(collect_parts(model, timeout, stop), model);
    File::open_directory(draft() / model).sync();
  }
  index.models = models_;
  if (keep_.last > 0) index.saved_as = directory_.path().filename().string();
  write_index(std::move(index), "");
  directory_.publish(keep_);
}

void CheckpointWriter::write_index(CheckpointIndex index, const std::string& model) const {
  const fs::path path = draft() / model / kIndexFile;
  index.id = id_;
  check_whole(index, path.string());
  write_text(path, to_json(index)).sync();
}

void write_for_all(const fs::path& path, const std::vector<RankContents>& ranks,
                   const CheckpointProgress& progress) {
  const int size = static_cast<int>(ranks.size());
  int64_t total = 0;
  for (const RankContents& rank : ranks)
    for (const ChunkData& chunk : rank.chunks) total += chunk.nbytes();
  ProgressCount count(progress, total);
  const std::string id = new_save_id();
  CheckpointWriter first(path, 0, size, id);
  first.begin();
  for (int rank = 0; rank < size; ++rank) {
    CheckpointWriter(path, rank, size, id).write(ranks[rank], [&](size_t nbytes) {
      count.add(static_cast<int64_t>(nbytes));
    });
  }
  first.commit(std::chrono::minutes(1));
}

}  // namespace tessera
