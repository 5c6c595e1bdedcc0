#include <c10/util/Exception.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/checkpoint_files.h>

#include <algorithm>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/directory.h"
#include "checkpoint/index.h"
#include "checkpoint/summary.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLevels = 16;

ListedCheckpoint listed(const fs::path& path) {
  ListedCheckpoint found{.path = path};
  try {
    std::vector<ChunkReader> readers = open_with_models(path);
    found.summary = summary_of(path, readers);
    for (ChunkReader& reader : readers)
      for (const TensorRecord& record : reader.index().tensors) reader.check(record);
  } catch (const c10::Error& error) {
    found.problem = error.what_without_backtrace();
  } catch (const std::exception& error) {
    found.problem = error.what();
  }
  found.problem = found.problem.substr(0, found.problem.find('\n'));
  return found;
}

void add_below(const fs::path& directory, int levels, std::vector<ListedCheckpoint>& found) {
  std::error_code error;
  std::vector<fs::path> inside;
  for (auto entry = fs::directory_iterator(directory, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    fs::path path = entry->path();
    if (path.extension() == ".old" && holds_checkpoint(fs::path(path).replace_extension()))
      path.replace_extension();  // a replacement was interrupted, or the new one is listed itself
    if (!is_unfinished(path) && std::ranges::count(inside, path) == 0)
      inside.push_back(std::move(path));
  }
  std::ranges::sort(inside, is_before);
  const size_t first = found.size();
  std::vector<fs::path> others;
  for (const fs::path& path : inside) {
    std::error_code ignored;
    if (holds_checkpoint(path))
      found.push_back(listed(path));
    else if (fs::is_directory(fs::symlink_status(path, ignored)))
      others.push_back(path);
  }
  try {
    const auto latest = first < found.size() ? latest_checkpoint(directory) : std::nullopt;
    for (size_t i = first; i < found.size(); ++i) found[i].is_latest = found[i].path == latest;
  } catch (const fs::filesystem_error&) {
    // A save has removed it meanwhile, or it can't be read.
  }
  for (const fs::path& path : others)
    if (levels > 1) add_below(path, levels - 1, found);
}

}  // namespace

std::vector<ListedCheckpoint> list_checkpoints(const fs::path& directory) {
  std::error_code ignored;
  TORCH_CHECK_VALUE(fs::is_directory(directory, ignored), "[list_checkpoints] '",
                    directory.string(), "' must be a directory");
  if (holds_checkpoint(directory)) return {listed(directory)};
  std::vector<ListedCheckpoint> found;
  add_below(directory, kMostLevels, found);
  return found;
}

}  // namespace tessera
