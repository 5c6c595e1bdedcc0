#include "checkpoint/directory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <tessera/checkpoint/checkpoint.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/index.h"

namespace tessera {
namespace fs = std::filesystem;

// [Note: Replacing a checkpoint]
//
// A new checkpoint is written to `<path>.tmp`, the index last, and everything is synced to disk.
// Then the two directories exchange their names in one step of the file system, and the old one,
// now under the draft's name, is removed. Where the file system can't exchange, the old one is
// renamed to `<path>.old` before the draft gets its name; if that is interrupted in between, the
// next load or save takes `<path>.old` for the checkpoint. A save that is interrupted earlier
// leaves a draft. The next save to the same path removes it, or the next one of the same series
// (`step-100`, `step-200`). Two saves at once would mix their files, so the draft is locked; the
// lock ends with the process that holds it.
//
// A mount point can't be renamed, and a directory beside it is on another file system. So a
// checkpoint that is saved to a mount point is put into its subdirectory `checkpoint`, where
// readers find it.
//
// A checkpoint of several models has a subdirectory for each, with a checkpoint's files.
//
// Only files with a checkpoint's names are ever removed.
namespace {

constexpr const char* kInMountPoint = "checkpoint";

// The ends of the names of a draft, and of a checkpoint that is being removed.
constexpr const char* kDraft = ".tmp";
constexpr const char* kRemoved = ".removed";

// For how long a save tries to lock its draft.
constexpr std::chrono::milliseconds kWaitForDraft(100);

fs::path with_suffix(const fs::path& path, const char* suffix) { return path.string() + suffix; }

bool is_checkpoint_file(const fs::path& file) {
  const std::string name = file.filename().string();
  return name == kIndexFile || ((name.starts_with("rank-") || name.starts_with("model-")) &&
                                (name.ends_with(".safetensors") || name.ends_with(kPartSuffix)));
}

// Returns true for the directory of one of several models, in a checkpoint or a draft of it.
bool is_model_directory(const fs::path& path) {
  std::error_code error;
  if (!fs::is_directory(fs::symlink_status(path, error)) ||
      !is_model_name(path.filename().string()))
    return false;
  auto entry = fs::directory_iterator(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    if (!is_checkpoint_file(entry->path()) || fs::is_directory(entry->path())) return false;
  return !error;
}

// Throws unless `path` may be removed.
void check_removable(const fs::path& path) {
  if (!fs::exists(fs::symlink_status(path))) return;
  std::error_code error;
  auto entry = fs::directory_iterator(path, error);
  if (error == std::errc::no_such_file_or_directory) return;  // another save has removed it
  TORCH_CHECK_VALUE(!error, "[save_checkpoint] '", path.string(),
                    "' must be a new path or a checkpoint's directory; got ",
                    error == std::errc::not_a_directory ? "a file" : error.message());
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    TORCH_CHECK_VALUE(is_checkpoint_file(entry->path()) || is_model_directory(entry->path()),
                      "[save_checkpoint] '", path.string(),
                      "' must be a new path or hold nothing but a checkpoint, because it will be "
                      "replaced; it has '",
                      entry->path().filename().string(), "'");
  }
}

// Removes the index first: the rest of an interrupted removal is then no checkpoint.
void remove_files(const fs::path& path) noexcept {
  std::error_code ignored;
  fs::remove(path / kIndexFile, ignored);
  std::vector<fs::path> files, directories;
  for (auto entry = fs::directory_iterator(path, ignored);
       !ignored && entry != fs::directory_iterator(); entry.increment(ignored)) {
    if (is_checkpoint_file(entry->path())) {
      files.push_back(entry->path());
    } else if (is_model_directory(entry->path())) {
      directories.push_back(entry->path());
    }
  }
  for (const fs::path& directory : directories) {
    remove_files(directory);
    fs::remove(directory, ignored);
  }
  // Removing a large file takes a file system as long as writing part of it: use several threads.
  std::atomic<size_t> next = 0;
  const auto remove_some = [&] {
    for (size_t i = next++; i < files.size(); i = next++) {
      std::error_code error;
      fs::remove(files[i], error);
    }
  };
  std::vector<std::future<void>> helpers;
  for (size_t i = 1; i < std::min<size_t>(files.size(), 4); ++i)
    helpers.push_back(std::async(std::launch::async, remove_some));
  remove_some();
}

// Removes a checkpoint's files, the index first, and then the directory if nothing else is in it;
// as far as possible.
void remove_checkpoint(const fs::path& path) noexcept {
  remove_files(path);
  std::error_code ignored;
  fs::remove(path, ignored);  // only if it is empty
}

// Removes a checkpoint under another name: renamed first, it is no checkpoint to any reader, even
// if the removal is interrupted. Returns false if it could not be renamed.
bool remove_renamed(const fs::path& path, const fs::path& removed) noexcept {
  std::error_code error;
  fs::rename(path, removed, error);
  if (!error) remove_checkpoint(removed);
  return !error;
}

// Removes a draft that a save left behind, for example one that was killed: a draft that is not
// locked and contains only a checkpoint's files. Where locks are not supported, removes none.
// It is renamed to `removed` first, because a save may want a draft of this name meanwhile.
void remove_abandoned_draft(const fs::path& draft, const fs::path& removed) noexcept {
  try {
    check_removable(draft);
    File directory = File::open_directory(draft);
    if (directory.lock() != File::Lock::kTaken || !directory.is_there()) return;
    if (!remove_renamed(draft, removed)) remove_checkpoint(draft);
  } catch (const std::exception&) {
    // It belongs to another save, or no longer exists.
  }
}

// False for what can't be looked at, too.
bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// Returns `path`, or the old checkpoint if its replacement was interrupted.
fs::path checkpoint_or_old(const fs::path& path) {
  const fs::path old = with_suffix(path, ".old");
  return !is_there(path) && is_there(old / kIndexFile) ? old : path;
}

// Returns `path` as an absolute one without a trailing slash; an empty one stays empty.
fs::path normal(const fs::path& path) {
  if (path.empty()) return path;
  const fs::path result = fs::absolute(path).lexically_normal();
  return result.has_filename() ? result : result.parent_path();
}

// Returns true if a file system, or a part of one, is mounted at this directory: it can't be
// renamed or replaced then, and its parent is on another file system. False if it does not exist.
bool is_mount_point(const std::filesystem::path& path) {
#ifdef STATX_ATTR_MOUNT_ROOT  // Linux 5.8; also detects mounts from the same file system
  struct statx status {};
  if (::statx(AT_FDCWD, path.c_str(), 0, STATX_BASIC_STATS, &status) != 0) return false;
  if ((status.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
    return (status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
#endif
  struct stat own {
  }, parent{};
  return ::stat(path.c_str(), &own) == 0 && ::stat(path.parent_path().c_str(), &parent) == 0 &&
         own.st_dev != parent.st_dev;
}

bool cannot_exchange(int error) {
  return error == EINVAL || error == ENOSYS || error == ENOTSUP || error == EPERM;
}

// A series is the checkpoints in one directory whose names differ only in the number at their end.

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

// Lists, in any order, the directories in `directory` whose names, without `suffix` at the end, end
// with a number; not links that lead nowhere, and what else can't be looked at.
std::vector<Numbered> list(const fs::path& directory, const std::string& suffix) {
  std::vector<Numbered> found;
  for (const auto& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    std::error_code ignored;
    if (!name.ends_with(suffix) || !fs::is_directory(entry.path(), ignored)) continue;
    if (const auto item = numbered(directory / name.substr(0, name.size() - suffix.size())))
      found.push_back(*item);
  }
  return found;
}

// Lists checkpoints whose names end with a number, by that number; one whose replacement was
// interrupted is listed under its own name.
std::vector<Numbered> numbered_checkpoints(const fs::path& directory) {
  std::vector<Numbered> found = list(directory, "");
  for (Numbered& item : list(directory, ".old"))
    if (checkpoint_or_old(item.path) != item.path) found.push_back(std::move(item));
  std::erase_if(found, [](const Numbered& item) {
    return !is_there(checkpoint_or_old(item.path) / kIndexFile);
  });
  std::sort(found.begin(), found.end());
  return found;
}

// Returns the index of the checkpoint in `directory`; none if it can't be read.
std::optional<CheckpointIndex> index_of(const fs::path& directory) {
  try {
    return read_index(File::open_directory(directory));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// Remembers the best of the checkpoints that it is shown.
class Best {
 public:
  explicit Best(std::optional<BestBy> by) : by_(std::move(by)) {}

  void offer(const fs::path& path, const CheckpointIndex& index) {
    if (!by_) return;
    const auto it = index.numbers.find(by_->number);
    if (it == index.numbers.end() || std::isnan(it->second)) return;
    if (path_ && (by_->highest ? it->second <= value_ : it->second >= value_)) return;
    path_ = path;
    value_ = it->second;
  }
  const std::optional<fs::path>& path() const { return path_; }

 private:
  std::optional<BestBy> by_;
  std::optional<fs::path> path_;
  double value_ = 0;
};

// Removes abandoned directories named as `path` except for the number, followed by `suffix`.
void remove_abandoned(const fs::path& path, const std::string& suffix) {
  const auto own = numbered(path);
  if (!own) return;
  for (const Numbered& item : list(path.parent_path(), suffix))
    if (item.prefix == own->prefix && item.path != path)
      remove_abandoned_draft(with_suffix(item.path, suffix.c_str()),
                             with_suffix(item.path, kRemoved));
}

// Removes the oldest checkpoints of the series of `path`, if that ends with a number, so that those
// to keep are left. Counts only checkpoints that were saved to be removed in this way, and still
// have the name they were saved under.
void remove_older(const fs::path& path, const KeptCheckpoints& keep) noexcept {
  try {
    const auto last = numbered(path);
    if (keep.last <= 0 || !last) return;
    Best best(keep.best);
    std::vector<Numbered> older = numbered_checkpoints(path.parent_path());
    std::erase_if(older, [&](const Numbered& item) {
      if (item.prefix != last->prefix || !(item < *last) || fs::is_symlink(item.path)) return true;
      const auto index = index_of(checkpoint_or_old(item.path));
      if (!index || index->saved_as != item.path.filename()) return true;
      best.offer(item.path, *index);
      return false;
    });
    if (const auto index = index_of(path)) best.offer(path, *index);
    for (int64_t item = std::ssize(older) - keep.last; item >= 0; --item) {
      const fs::path& path_of_item = older[static_cast<size_t>(item)].path;
      if (path_of_item == best.path()) continue;
      remove_renamed(checkpoint_or_old(path_of_item), with_suffix(path_of_item, kRemoved));
    }
  } catch (const std::exception&) {
    // The new checkpoint exists: failing to remove an old one is no reason to fail.
  }
}

}  // namespace

CheckpointDirectory::CheckpointDirectory(const fs::path& path) : path_(normal(path)) {
  TORCH_CHECK_VALUE(path_.has_filename(), "[save_checkpoint] path must name a directory; got '",
                    path.string(), "'");
  if (fs::is_symlink(path_)) path_ = fs::canonical(path_);
  if (is_mount_point(path_)) {
    mount_point_ = path_;
    path_ /= kInMountPoint;
  }
  draft_ = with_suffix(path_, kDraft);
}

void CheckpointDirectory::prepare() {
  // Readers would find a checkpoint in the mount point itself first.
  TORCH_CHECK_VALUE(mount_point_.empty() || !fs::exists(mount_point_ / kIndexFile),
                    "[save_checkpoint] '", mount_point_.string(),
                    "' is a mount point, which can't be replaced, and has the files of a "
                    "checkpoint: move them to '",
                    path_.string(), "'");
  check_removable(draft_);
  take_draft();
  const fs::path old = with_suffix(path_, ".old");
  if (!fs::exists(path_) && fs::exists(old / kIndexFile)) fs::rename(old, path_);
  check_removable(path_);
  // Other tools give model files the same names, but have no such index.
  TORCH_CHECK_VALUE(!fs::exists(path_) || fs::is_empty(path_) || fs::exists(path_ / kIndexFile),
                    "[save_checkpoint] '", path_.string(),
                    "' must be a new path or a checkpoint's directory, because it will be "
                    "replaced; it has files, but no ",
                    kIndexFile);
  remove_files(draft_);
}

void CheckpointDirectory::take_draft() {
  using Clock = std::chrono::steady_clock;
  // Another save may publish or remove the draft between two steps here: then make a new one. A
  // save of the same series locks it for a moment, to find out whether it is abandoned.
  const Clock::time_point end = Clock::now() + kWaitForDraft;
  std::error_code error;
  for (fs::path above = draft_.parent_path(); !is_there(above) && above.has_relative_path();
       above = above.parent_path())
    created_in_.push_back(above.parent_path());
  fs::create_directories(draft_.parent_path(), error);
  TORCH_CHECK_VALUE(!error, "[save_checkpoint] could not create the directory of '",
                    draft_.string(), "': ", error.message());
  for (; !held_; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    TORCH_CHECK(Clock::now() < end, "[save_checkpoint] another save to '", path_.string(),
                "' is under way, of this job or another one; give each job a path of its own");
    TORCH_CHECK_VALUE(::mkdir(draft_.c_str(), 0777) == 0 || errno == EEXIST,
                      "[save_checkpoint] could not create '", draft_.string(),
                      "': ", std::strerror(errno));
    std::optional<File> draft = File::open_directory_if_there(draft_);
    if (draft && draft->lock() != File::Lock::kHeld && draft->is_there())
      held_.emplace(std::move(*draft));
  }
}

void CheckpointDirectory::publish(const KeptCheckpoints& keep) {
  File::open_directory(draft_).sync();
  const fs::path parent = path_.parent_path();
  // Locked, so that no other save takes the old checkpoint for a draft while it is removed.
  std::optional<File> old;
  if (fs::exists(path_)) old.emplace(File::open_directory(path_)).lock();
  bool exchanged = false;
  if (::rename(draft_.c_str(), path_.c_str()) != 0) {  // works if there was no checkpoint
    exchanged =
        ::renameat2(AT_FDCWD, draft_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) == 0;
    TORCH_CHECK(exchanged || cannot_exchange(errno), "[save_checkpoint] could not replace '",
                path_.string(), "': ", std::strerror(errno));
    if (!exchanged) replace_by_renames();
  }
  File::open_directory(parent).sync();
  for (const fs::path& above : created_in_) File::open_directory(above).sync();
  // If the names were not exchanged, a draft that exists by now belongs to another save.
  if (exchanged) remove_checkpoint(draft_);
  remove_checkpoint(with_suffix(path_, ".old"));
  held_.reset();
  remove_older(path_, keep);
}

void CheckpointDirectory::replace_by_renames() const {
  const fs::path old = with_suffix(path_, ".old");
  check_removable(old);
  remove_checkpoint(old);
  fs::rename(path_, old);
  std::error_code error;
  fs::rename(draft_, path_, error);
  if (!error) return;
  fs::rename(old, path_);
  TORCH_CHECK(false, "[save_checkpoint] could not replace '", path_.string(),
              "': ", error.message());
}

void CheckpointDirectory::discard() noexcept {
  if (!held_) return;
  remove_checkpoint(draft_);
  held_.reset();
}

fs::path readable_checkpoint(const fs::path& path) {
  for (const fs::path& place : {path, path / kInMountPoint}) {
    const fs::path readable = checkpoint_or_old(place);
    if (is_there(readable / kIndexFile)) return readable;
  }
  return path;
}

bool holds_checkpoint(const fs::path& path) {
  return is_there(readable_checkpoint(path) / kIndexFile);
}

bool is_unfinished(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.ends_with(kDraft) || name.ends_with(kRemoved);
}

bool is_before(const fs::path& a, const fs::path& b) {
  const auto one = numbered(a).value_or(Numbered{a.filename().string(), "", a}),
             other = numbered(b).value_or(Numbered{b.filename().string(), "", b});
  return one.prefix == other.prefix ? one < other : one.prefix < other.prefix;
}

void remove_abandoned_drafts(const fs::path& path) noexcept {
  try {
    remove_abandoned(path, kDraft);
    remove_abandoned(path, kRemoved);
  } catch (const std::exception&) {
    // A draft that stays takes space, and does no harm.
  }
}

std::optional<fs::path> best_checkpoint(const fs::path& directory, const BestBy& by) {
  Best best(by);
  if (!fs::is_directory(directory)) return std::nullopt;
  for (const Numbered& item : numbered_checkpoints(directory))
    if (const auto index = index_of(checkpoint_or_old(item.path))) best.offer(item.path, *index);
  return best.path();
}

std::optional<fs::path> latest_checkpoint(const fs::path& directory) {
  if (!fs::is_directory(directory)) return std::nullopt;
  const auto found = numbered_checkpoints(directory);
  if (found.empty()) return std::nullopt;
  return found.back().path;
}

}  // namespace tessera
