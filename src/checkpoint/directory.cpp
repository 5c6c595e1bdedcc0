#include "checkpoint/directory.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <future>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/mount_point.h"
#include "checkpoint/parts.h"

namespace tessera {
namespace fs = std::filesystem;

// [Note: Replacing a checkpoint]
//
// A new checkpoint is written to `<path>.tmp`, the index last, and everything is synced to disk.
// Then the two directories exchange their names in one step of the file system, and the old one,
// which now has the draft's name, is removed. Where the file system can't exchange, the old one is
// renamed to `<path>.old` before the draft gets its name; if that is interrupted in between, the
// next load or save takes `<path>.old` for the checkpoint. A save that is interrupted earlier
// leaves a draft, which is removed by the next save to the same path, or by the next one of the
// same series (`step-100`, `step-200`). Two saves at once would mix their files, so the draft is
// locked; the lock ends with the process that holds it.
//
// A mount point can't be renamed, and a directory beside it is on another file system. So a
// checkpoint that is saved to a mount point is put into its subdirectory `checkpoint`, where
// readers find it.
//
// Only files with a checkpoint's names are ever removed.
namespace {

constexpr const char* kInMountPoint = "checkpoint";

fs::path with_suffix(const fs::path& path, const char* suffix) { return path.string() + suffix; }

bool is_checkpoint_file(const fs::path& file) {
  const std::string name = file.filename().string();
  return name == kIndexFile || ((name.starts_with("rank-") || name.starts_with("model-")) &&
                                (name.ends_with(".safetensors") || name.ends_with(kPartSuffix)));
}

// Throws unless `path` may be removed.
void check_removable(const fs::path& path) {
  if (!fs::exists(fs::symlink_status(path))) return;
  TORCH_CHECK_VALUE(fs::is_directory(path), "[save_checkpoint] '", path.string(),
                    "' must be a new path or a checkpoint's directory; got a file");
  for (const auto& entry : fs::directory_iterator(path)) {
    TORCH_CHECK_VALUE(is_checkpoint_file(entry.path()), "[save_checkpoint] '", path.string(),
                      "' must be a new path or hold nothing but a checkpoint, because it will be "
                      "replaced; it has '",
                      entry.path().filename().string(), "'");
  }
}

// Removes the index first: the rest of an interrupted removal is then no checkpoint.
void remove_files(const fs::path& path) noexcept {
  std::error_code ignored;
  fs::remove(path / kIndexFile, ignored);
  std::vector<fs::path> files;
  for (auto entry = fs::directory_iterator(path, ignored);
       !ignored && entry != fs::directory_iterator(); entry.increment(ignored)) {
    if (is_checkpoint_file(entry->path())) files.push_back(entry->path());
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

// Returns `path` as an absolute one without a trailing slash; an empty one stays empty.
fs::path normal(const fs::path& path) {
  if (path.empty()) return path;
  const fs::path result = fs::absolute(path).lexically_normal();
  return result.has_filename() ? result : result.parent_path();
}

bool cannot_exchange(int error) {
  return error == EINVAL || error == ENOSYS || error == ENOTSUP || error == EPERM;
}

}  // namespace

void remove_checkpoint(const fs::path& path) noexcept {
  remove_files(path);
  std::error_code ignored;
  fs::remove(path, ignored);  // only if it is empty
}

CheckpointDirectory::CheckpointDirectory(const fs::path& path) : path_(normal(path)) {
  TORCH_CHECK_VALUE(path_.has_filename(), "[save_checkpoint] path must name a directory; got '",
                    path.string(), "'");
  if (fs::is_symlink(path_)) path_ = fs::canonical(path_);
  if (is_mount_point(path_)) {
    mount_point_ = path_;
    path_ /= kInMountPoint;
  }
  draft_ = with_suffix(path_, ".tmp");
}

// Readers would find a checkpoint in the mount point itself first.
void CheckpointDirectory::check_mount_point() const {
  TORCH_CHECK_VALUE(mount_point_.empty() || !fs::exists(mount_point_ / kIndexFile),
                    "[save_checkpoint] '", mount_point_.string(), "' is a mount point, which can't be "
                    "replaced, and has the files of a checkpoint: move them to '", path_.string(), "'");
}

void CheckpointDirectory::prepare() {
  check_mount_point();
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
  // Another save may publish or remove the draft between two steps here: then make a new one.
  while (!held_) {
    fs::create_directories(draft_);
    File draft = File::open_directory(draft_);
    TORCH_CHECK(draft.lock() != File::Lock::kHeld, "[save_checkpoint] another save to '", path_.string(),
                "' is under way, of this job or another one; give each job a path of its own");
    if (draft.is_there()) held_.emplace(std::move(draft));
  }
}

void CheckpointDirectory::publish() {
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
  // If the names were not exchanged, a draft that exists by now belongs to another save.
  if (exchanged) remove_checkpoint(draft_);
  remove_checkpoint(with_suffix(path_, ".old"));
  held_.reset();
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

void remove_abandoned_draft(const fs::path& draft) noexcept {
  try {
    check_removable(draft);
    File directory = File::open_directory(draft);
    if (directory.lock() == File::Lock::kTaken && directory.is_there()) remove_checkpoint(draft);
  } catch (const std::exception&) {
    // It belongs to another save, or no longer exists.
  }
}

fs::path checkpoint_or_old(const fs::path& path) {
  const fs::path old = with_suffix(path, ".old");
  return !fs::exists(path) && fs::exists(old / kIndexFile) ? old : path;
}

fs::path readable_checkpoint(const fs::path& path) {
  for (const fs::path& place : {path, path / kInMountPoint}) {
    const fs::path readable = checkpoint_or_old(place);
    if (fs::exists(readable / kIndexFile)) return readable;
  }
  return path;
}

}  // namespace tessera
