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
  static File open_file(const std::filesystem::path& path);
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
  /// Takes the lock of the file or directory, which lasts as long as it is open, in this process.
  /// False if another process, or another open file here, has it.
  bool lock();
  /// True if `path()` still leads to it.
  bool is_there() const;
  /// Lets the disk begin with what was written there, and waits for nothing.
  void start_sync(int64_t offset, size_t nbytes) const;
  /// Returns when what was written is on the disk.
  void sync() const;

  const std::string& path() const { return path_; }

 private:
  File(int fd, std::string path);

  int fd_;
  std::string path_;
};

}  // namespace tessera
