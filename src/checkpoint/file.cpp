#include "checkpoint/file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace tessera {
namespace {

// Linux transfers at most 2 GiB at once.
constexpr size_t kMostPerCall = size_t{1} << 30;

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
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TORCH_CHECK_VALUE(fd >= 0, "[checkpoint] could not open the directory '", path.string(),
                    "': ", std::strerror(errno));
  return File(fd, path.string());
}

File File::open_file(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK_VALUE(fd >= 0, "[checkpoint] could not open '", path.string(),
                    "': ", std::strerror(errno));
  return File(fd, path.string());
}

File File::open(const std::string& name) const {
  const std::string path = path_ + "/" + name;
  const int fd = ::openat(fd_, name.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK_VALUE(fd >= 0, "[checkpoint] could not open '", path,
                    "': ", std::strerror(errno));
  return File(fd, path);
}

void File::write(const void* data, size_t nbytes, int64_t offset) {
  const char* next = static_cast<const char*>(data);
  while (nbytes > 0) {
    const ssize_t count = ::pwrite(fd_, next, std::min(nbytes, kMostPerCall), offset);
    if (count < 0 && errno == EINTR) continue;
    TORCH_CHECK(count > 0, "[checkpoint] could not write '", path_,
                "': ", std::strerror(errno));
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
    TORCH_CHECK(count > 0, "[checkpoint] could not read ", nbytes, " bytes at ", offset,
                " of '", path_, "': ", count < 0 ? std::strerror(errno) : "the file ends before");
    next += count;
    offset += count;
    nbytes -= static_cast<size_t>(count);
  }
}

int64_t File::nbytes() const {
  struct stat status {};
  TORCH_CHECK(::fstat(fd_, &status) == 0, "[checkpoint] could not look at '", path_,
              "': ", std::strerror(errno));
  return status.st_size;
}

bool File::lock() {
  while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    // File systems without locks are used without.
    return errno != EWOULDBLOCK;
  }
  return true;
}

bool File::is_there() const {
  struct stat mine {
  }, there{};
  return ::fstat(fd_, &mine) == 0 && ::stat(path_.c_str(), &there) == 0 &&
         mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

void File::start_sync(int64_t offset, size_t nbytes) const {
  // A hint: where it fails, sync() has more to do.
  ::sync_file_range(fd_, offset, static_cast<int64_t>(nbytes), SYNC_FILE_RANGE_WRITE);
}

void File::sync() const {
  TORCH_CHECK(::fsync(fd_) == 0, "[checkpoint] could not write '", path_,
              "' to the disk: ", std::strerror(errno));
}

}  // namespace tessera
