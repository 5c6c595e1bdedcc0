#include "benchmarks/disk_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "launcher/unique_fd.h"

namespace tessera::tools {
namespace {

constexpr size_t kBlock = size_t{1} << 20;

UniqueFd open_file(const std::string& file, int flags) {
  UniqueFd fd(::open(file.c_str(), flags | O_CLOEXEC, 0666));
  if (fd.get() < 0) throw std::system_error(errno, std::generic_category(), file);
  return fd;
}

// Transfers all bytes by `call`, `::write` or `::read`.
template <class Call, class Bytes>
void transfer(const std::string& file, Call call, int fd, Bytes* bytes, size_t nbytes) {
  for (size_t done = 0; done < nbytes;) {
    const ssize_t count = call(fd, bytes + done, std::min(kBlock, nbytes - done));
    if (count <= 0) throw std::system_error(errno, std::generic_category(), file);
    done += static_cast<size_t>(count);
  }
}

}  // namespace

void write_to_disk(const std::string& file, const std::vector<char>& bytes) {
  const std::string draft = file + ".new";
  const UniqueFd fd = open_file(draft, O_WRONLY | O_CREAT | O_EXCL);
  transfer(draft, ::write, fd.get(), bytes.data(), bytes.size());
  if (::fsync(fd.get()) != 0) throw std::system_error(errno, std::generic_category(), draft);
  std::filesystem::rename(draft, file);
}

void read_from_disk(const std::string& file, std::vector<char>& bytes) {
  const UniqueFd fd = open_file(file, O_RDONLY);
  transfer(file, ::read, fd.get(), bytes.data(), bytes.size());
}

void drop_from_cache(const std::string& directory) {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    const UniqueFd fd = open_file(entry.path().string(), O_RDONLY);
    ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

}  // namespace tessera::tools
