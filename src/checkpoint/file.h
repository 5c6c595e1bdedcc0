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
  /// Opens a file for reading. Throws `c10::ValueError` for what is no regular file, such as a
  /// named pipe, which would be waited for.
  static File open_file(const std::filesystem::path& path);
  /// Opens a file, or a pipe, whose other end nobody may have opened yet: nobody is waited for.
  static File open_any(const std::filesystem::path& path);
  /// The same of a file of this directory, even if the directory has another name by now.
  File open(const std::string& name) const;

  ~File();
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void write(const void* data, size_t nbytes, int64_t offset);
  /// Reads exactly `nbytes` from `offset`.
  void read(void* data, size_t nbytes, int64_t offset) const;
  int64_t nbytes() const;
  /// All of it. Throws `c10::ValueError` if that is more than `most` bytes.
  std::string read_all(int64_t most) const;
  /// What comes until the end of the file, or until nobody has the pipe open to write to any more.
  /// It must begin within 10 seconds. Throws `c10::ValueError` if that is more than `most` bytes.
  std::string read_to_end(int64_t most) const;
  enum class Lock : uint8_t {
    kTaken,
    kHeld,     ///< by another process, or another open file here
    kUnknown,  ///< the file system has no locks
  };
  /// Takes the lock of the file or directory, which lasts as long as it is open, in this process.
  Lock lock();
  /// True if `path()` still leads to it.
  bool is_there() const;
  /// Lets the disk begin with what was written there, and waits for nothing.
  void start_sync(int64_t offset, size_t nbytes) const;
  /// Returns when what was written is on the disk.
  void sync() const;

  const std::string& path() const { return path_; }

 private:
  File(int fd, std::string path);
  static File regular(int fd, std::string path);

  int fd_;
  std::string path_;
};

}  // namespace tessera
