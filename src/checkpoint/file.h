#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace tessera {

/// An open file or directory whose errors name it.
class File {
 public:
  /// Makes an empty file to write to.
  static File create(const std::filesystem::path& path);
  static File open_directory(const std::filesystem::path& path);
  /// Opens a file of this directory for reading, even if the directory has another name by now.
  File open(const std::string& name) const;

  ~File();
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(const void* data, size_t nbytes, int64_t offset);
  /// Reads exactly `nbytes` from `offset`.
  void read(void* data, size_t nbytes, int64_t offset) const;
  int64_t nbytes() const;
  /// Returns when what was written is on the disk.
  void sync() const;

  const std::string& path() const { return path_; }

 private:
  File(int fd, std::string path);

  int fd_;
  std::string path_;
};

}  // namespace tessera
