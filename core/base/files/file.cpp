#include "base/files/file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

namespace tessera {
namespace {

// Linux transfers at most 2 GiB per call.
constexpr size_t kMostPerCall = size_t{1} << 30;

// Most milliseconds to wait for the first bytes of a pipe.
constexpr int kWaitForWriter = 10'000;

// Opening a pipe does not wait for its other end to be opened.
constexpr int kReadOnly = O_RDONLY | O_CLOEXEC | O_NONBLOCK;

int check_open(int fd, const std::string& path) {
  TORCH_CHECK_VALUE(fd >= 0, "[checkpoint] could not open '", path, "': ", std::strerror(errno));
  return fd;
}

struct stat status_of(int fd, const std::string& path) {
  struct stat status {};
  TORCH_CHECK(::fstat(fd, &status) == 0, "[checkpoint] could not get the status of '", path,
              "': ", std::strerror(errno));
  return status;
}

const char* kind_of(mode_t mode) {
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

File::File(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}
File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

File File::create(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  TORCH_CHECK(fd >= 0, "[checkpoint] could not create '", path.string(),
              "': ", std::strerror(errno));
  return File(fd, path.string());
}

File File::open_directory(const std::filesystem::path& path) {
  std::optional<File> directory = open_directory_if_there(path);
  TORCH_CHECK_VALUE(directory, "[checkpoint] could not open the directory '", path.string(),
                    "': ", std::strerror(ENOENT));
  return std::move(*directory);
}

std::optional<File> File::open_directory_if_there(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT) return std::nullopt;
  TORCH_CHECK_VALUE(fd >= 0, "[checkpoint] could not open the directory '", path.string(),
                    "': ", std::strerror(errno));
  return File(fd, path.string());
}

File File::open_file(const std::filesystem::path& path) {
  return regular(::open(path.c_str(), kReadOnly), path.string());
}

File File::open(const std::string& name) const {
  return regular(::openat(fd_, name.c_str(), kReadOnly), path_ + "/" + name);
}

File File::regular(int fd, const std::string& path) {
  File file(check_open(fd, path), path);
  const mode_t mode = status_of(fd, file.path_).st_mode;
  TORCH_CHECK_VALUE(S_ISREG(mode), "[checkpoint] '", file.path_, "' must be a file; it is ",
                    kind_of(mode));
  return file;
}

void File::write(const void* data, size_t nbytes, int64_t offset) {
  const char* next = static_cast<const char*>(data);
  while (nbytes > 0) {
    const ssize_t count = ::pwrite(fd_, next, std::min(nbytes, kMostPerCall), offset);
    if (count < 0 && errno == EINTR) continue;
    TORCH_CHECK(count > 0, "[checkpoint] could not write '", path_, "': ", std::strerror(errno));
    next += count;
    offset += count;
    nbytes -= static_cast<size_t>(count);
  }
}

void File::read(void* data, size_t nbytes, int64_t offset) const {
  char* next = static_cast<char*>(data);
  while (nbytes > 0) {
    const ssize_t count = ::pread(fd_, next, std::min(nbytes, kMostPerCall), offset);
    if (count < 0 && errno == EINTR) continue;
    TORCH_CHECK(count > 0, "[checkpoint] could not read ", nbytes, " bytes at ", offset, " of '",
                path_, "': ", count < 0 ? std::strerror(errno) : "the file ends before");
    next += count;
    offset += count;
    nbytes -= static_cast<size_t>(count);
  }
}

int64_t File::nbytes() const { return status_of(fd_, path_).st_size; }

std::string File::read_all(int64_t most) const {
  const int64_t size = nbytes();
  TORCH_CHECK_VALUE(size <= most, "[checkpoint] '", path_, "' must have at most ", most,
                    " bytes; it has ", size);
  std::string text(static_cast<size_t>(size), '\0');
  read(text.data(), text.size(), 0);
  return text;
}

File File::open_any(const std::filesystem::path& path) {
  return File(check_open(::open(path.c_str(), kReadOnly), path.string()), path.string());
}

std::string File::read_to_end(int64_t most) const {
  std::string text;
  std::vector<char> some(size_t{1} << 16);
  pollfd first{fd_, POLLIN, 0};
  ::poll(&first, 1, kWaitForWriter);
  while (true) {
    const ssize_t count = ::read(fd_, some.data(), some.size());
    if (count == 0) return text;
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
      pollfd wanted{fd_, POLLIN, 0};
      ::poll(&wanted, 1, -1);
      continue;
    }
    TORCH_CHECK_VALUE(count > 0, "[checkpoint] could not read '", path_,
                      "': ", std::strerror(errno));
    text.append(some.data(), static_cast<size_t>(count));
    TORCH_CHECK_VALUE(std::ssize(text) <= most, "[checkpoint] '", path_, "' must have at most ",
                      most, " bytes");
  }
}

File::Lock File::lock() {
  while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    return errno == EWOULDBLOCK ? Lock::kHeld : Lock::kUnknown;
  }
  return Lock::kTaken;
}

bool File::is_there() const {
  struct stat mine {
  }, there{};
  return ::fstat(fd_, &mine) == 0 && ::stat(path_.c_str(), &there) == 0 &&
         mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

void File::start_sync(int64_t offset, size_t nbytes) const {
  // A hint: if it fails, sync() has more to write.
  ::sync_file_range(fd_, offset, static_cast<int64_t>(nbytes), SYNC_FILE_RANGE_WRITE);
}

void File::sync() const {
  TORCH_CHECK(::fsync(fd_) == 0, "[checkpoint] could not write '", path_,
              "' to the disk: ", std::strerror(errno));
}

}  // namespace tessera
