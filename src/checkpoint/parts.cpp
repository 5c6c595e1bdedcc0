#include "checkpoint/parts.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// The beginning of a failed rank's message; a part is JSON.
constexpr const char* kFailed = "failed: ";

fs::path part_file(const fs::path& draft, int rank, int size) {
  return draft / (fs::path(rank_file(rank, size)).stem().string() + kPartSuffix);
}

// Writes the whole file, or none.
void put(const fs::path& path, const std::string& text) {
  const fs::path unfinished = path.parent_path() / ("rank-unfinished-" + path.filename().string());
  File::create(unfinished).write(text.data(), text.size(), 0);
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
  for (const auto& entry : fs::directory_iterator(directory)) {
    std::error_code ignored;
    const auto size = entry.file_size(ignored);
    result.first += 1;
    if (!ignored) result.second += size;
  }
  return result;
}

}  // namespace

void write_part(const fs::path& draft, int rank, const CheckpointIndex& part) {
  put(part_file(draft, rank, part.world_size), to_json(part));
}

void write_failure(const fs::path& draft, int rank, int size, const std::string& error) noexcept {
  try {
    put(part_file(draft, rank, size), kFailed + error);
  } catch (const std::exception&) {
    // Then rank 0 learns of it when the ranks meet.
  }
}

CheckpointIndex collect_parts(const fs::path& draft, int size, std::chrono::milliseconds timeout,
                              const std::atomic<bool>& stop) {
  std::vector<CheckpointIndex> parts;
  auto pause = std::chrono::milliseconds(1);
  auto seen = extent(draft);
  Clock::time_point changed = Clock::now();
  while (std::ssize(parts) < size) {
    const int rank = static_cast<int>(parts.size());
    const fs::path path = part_file(draft, rank, size);
    if (const auto text = read_text(path)) {
      TORCH_CHECK(!text->starts_with(kFailed), text->substr(std::string(kFailed).size()),
                  " (on rank ", rank, " of ", size, ")");
      parts.push_back(index_from_json(*text, path.string()));
      continue;
    }
    TORCH_CHECK(!stop, "[save_checkpoint] the save to '", draft.string(), "' was given up");
    if (const auto now = extent(draft); now != seen) seen = now, changed = Clock::now();
    TORCH_CHECK(Clock::now() - changed < timeout, "[save_checkpoint] rank ", rank, " of ", size,
                " has not finished its files in '", draft.string(), "', and nothing was written for ",
                std::chrono::duration<double>(timeout).count(), " s");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(100));
  }
  for (int rank = 0; rank < size; ++rank) fs::remove(part_file(draft, rank, size));
  return merged(std::move(parts));
}

}  // namespace tessera
