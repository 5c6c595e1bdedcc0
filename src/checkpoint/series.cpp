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

struct Numbered {
  std::string prefix;
  std::string digits;  // without leading zeros
  fs::path path;

  // Of any length.
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

// The directories of `directory` whose names end with a number; a checkpoint whose replacement was
// cut off under its own name.
std::vector<Numbered> list(const fs::path& directory) {
  std::vector<Numbered> found;
  for (const auto& entry : fs::directory_iterator(directory)) {
    fs::path path = entry.path();
    if (path.extension() == ".old") path.replace_extension();
    const auto item = numbered(path);
    if (item && fs::is_directory(readable_checkpoint(path))) found.push_back(*item);
  }
  std::sort(found.begin(), found.end());
  return found;
}

bool is_checkpoint(const fs::path& path) {
  return fs::exists(readable_checkpoint(path) / kIndexFile);
}

}  // namespace

void remove_older(const fs::path& path, int keep) noexcept {
  try {
    const fs::path newest = fs::absolute(path).lexically_normal();
    const auto last = numbered(newest);
    if (keep <= 0 || !last) return;
    std::vector<Numbered> older;
    for (Numbered& item : list(newest.parent_path()))
      if (item.prefix == last->prefix && item < *last) older.push_back(std::move(item));
    int kept = 1;
    for (auto item = older.rbegin(); item != older.rend(); ++item) {
      // What has no index is what a removal that was cut off has left.
      if (is_checkpoint(item->path) && kept++ < keep) continue;
      remove_checkpoint(item->path);
    }
  } catch (const std::exception&) {
    // The new checkpoint is there: that an old one is, too, is no reason to fail.
  }
}

std::optional<fs::path> latest_checkpoint(const fs::path& directory) {
  if (!fs::is_directory(directory)) return std::nullopt;
  const auto found = list(directory);
  const auto latest = std::find_if(found.rbegin(), found.rend(),
                                   [](const Numbered& item) { return is_checkpoint(item.path); });
  if (latest == found.rend()) return std::nullopt;
  return latest->path;
}

}  // namespace tessera
