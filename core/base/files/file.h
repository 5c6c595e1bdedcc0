#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace tessera {

/// An open file or directory whose errors name it.
class File {
 public:
  /// Creates an empty file for writing.
  static File create(const std::filesystem::path& path);
  static File open_directory(const std::filesystem::path& path);
  /// Returns nothing if the path does not exist.
  static std::optional<File> open_directory_if_there(const std::filesystem::path& path);
  /// Opens a file for reading. Throws `c10::ValueError` for anything but a regular file, such as a
  /// named pipe, on which a read would wait.
  static File open_file(const std::filesystem::path& path);
  /// Opens a file, or a pipe whose other end need not be open yet: does not wait for it.
  static File open_any(const std::filesystem::path& path);
  /// Opens a regular file of this directory for reading, even if the directory was renamed since.
  File open(const std::string& name) const;

  ~File();
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(const void* data, size_t nbytes, int64_t offset);
  /// Reads exactly `nbytes` from `offset`.
  void read(void* data, size_t nbytes, int64_t offset) const;
  int64_t nbytes() const;
  /// Returns the whole content. Throws `c10::ValueError` if it has more than `most` bytes.
  std::string read_all(int64_t most) const;
  /// Reads until the end of the file, or until no process has the pipe open for writing. Waits at
  /// most 10 seconds for a pipe's first writer; without one, returns nothing. Throws
  /// `c10::ValueError` for more than `most` bytes.
  std::string read_to_end(int64_t most) const;
  enum class Lock : uint8_t {
    kTaken,
    kHeld,     ///< by another process, or by another open file here
    kUnknown,  ///< the file system has no locks
  };
  /// Takes the lock of the file or directory. It is held while the file is open in this process.
  Lock lock();
  /// Returns true if `path()` still leads to this file or directory.
  bool is_there() const;
  /// Starts writing these bytes to the disk, without waiting for anything.
  void start_sync(int64_t offset, size_t nbytes) const;
  /// Returns when all written bytes are on the disk.
  void sync() const;

  const std::string& path() const { return path_; }

 private:
  File(int fd, std::string path);
  static File regular(int fd, const std::string& path);

  int fd_;
  std::string path_;
};

}  // namespace tessera
