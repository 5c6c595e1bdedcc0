#include "checkpoint/series.h"

#include <tessera/checkpoint.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/directory.h"
#include "checkpoint/index.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// The end of the name of a checkpoint that is being removed.
constexpr const char* kRemoved = ".removed";

struct Numbered {
  std::string prefix;
  std::string digits;  // without leading zeros
  fs::path path;

  // Compares numbers of any length.
  bool operator<(const Numbered& other) const {
    return std::pair(digits.size(), digits) < std::pair(other.digits.size(), other.digits);
  }
};

std::optional<Numbered> numbered(const fs::path& path) {
  const std::string name = path.filename().string();
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  const auto digits = std::find_if_not(name.rbegin(), name.rend(), is_digit).base();
  if (digits == name.end()) return std::nullopt;
  std::string number(digits, name.end());
  number.erase(0, std::min(number.find_first_not_of('0'), number.size() - 1));
  return Numbered{{name.begin(), digits}, std::move(number), path};
}

// Lists the directories in `directory` whose names, without `suffix` at the end, end with a number.
std::vector<Numbered> list(const fs::path& directory, const std::string& suffix) {
  std::vector<Numbered> found;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(suffix) || !fs::is_directory(entry.path())) continue;
    if (const auto item = numbered(directory / name.substr(0, name.size() - suffix.size())))
      found.push_back(*item);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Lists checkpoints whose names end with a number; one whose replacement was interrupted is listed
// under its own name.
std::vector<Numbered> list_checkpoints(const fs::path& directory) {
  std::vector<Numbered> found = list(directory, "");
  for (Numbered& item : list(directory, ".old"))
    if (checkpoint_or_old(item.path) != item.path) found.push_back(std::move(item));
  std::erase_if(found, [](const Numbered& item) {
    return !fs::exists(checkpoint_or_old(item.path) / kIndexFile);
  });
  std::sort(found.begin(), found.end());
  return found;
}

// Returns whether the checkpoint in `directory` was saved under this name, as one of a series.
bool was_saved_as(const fs::path& directory, const std::string& name) {
  try {
    return read_index(File::open_directory(directory)).saved_as == name;
  } catch (const std::exception&) {
    return false;
  }
}

// Removes abandoned directories named as `path` except for the number, followed by `suffix`.
void remove_abandoned(const fs::path& path, const std::string& suffix) {
  const auto own = numbered(path);
  if (!own) return;
  for (const Numbered& item : list(path.parent_path(), suffix))
    if (item.prefix == own->prefix && item.path != path)
      remove_abandoned_draft(item.path.string() + suffix);
}

// Renamed first, it is no checkpoint to any reader, even if the removal is interrupted.
void remove_renamed(const fs::path& path) noexcept {
  fs::path removed = path;
  removed += kRemoved;
  std::error_code error;
  fs::rename(checkpoint_or_old(path), removed, error);
  if (!error) remove_checkpoint(removed);
}

}  // namespace

void remove_older(const fs::path& path, int keep) noexcept {
  try {
    const fs::path newest = fs::absolute(path).lexically_normal();
    const auto last = numbered(newest);
    if (keep <= 0 || !last) return;
    const fs::path directory = newest.parent_path();
    remove_abandoned(newest, kRemoved);
    std::vector<Numbered> older = list_checkpoints(directory);
    std::erase_if(older, [&](const Numbered& item) {
      return item.prefix != last->prefix || !(item < *last) || fs::is_symlink(item.path) ||
             !was_saved_as(checkpoint_or_old(item.path), item.path.filename());
    });
    for (int64_t item = std::ssize(older) - keep; item >= 0; --item)
      remove_renamed(older[static_cast<size_t>(item)].path);
  } catch (const std::exception&) {
    // The new checkpoint exists: failing to remove an old one is no reason to fail.
  }
}

void remove_abandoned_drafts(const fs::path& path) noexcept {
  try {
    remove_abandoned(path, ".tmp");
  } catch (const std::exception&) {
    // A draft that stays takes space, and does no harm.
  }
}

std::optional<fs::path> latest_checkpoint(const fs::path& directory) {
  if (!fs::is_directory(directory)) return std::nullopt;
  const auto found = list_checkpoints(directory);
  if (found.empty()) return std::nullopt;
  return found.back().path;
}

}  // namespace tessera
