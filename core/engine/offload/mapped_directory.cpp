#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "engine/offload/state_memory.h"

namespace tessera {

// [Note: State in files]
//
// Tensors lie in files that are mapped into memory and share their pages with the kernel's page
// cache: reading and writing the tensors is reading and writing the files, and pages that are not
// used for a while can leave memory. The files have no names from the start (O_TMPFILE), so nothing
// is left behind however the process ends. Their disk space is allocated when they are made: a full
// disk is an error then, not a signal later.
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kExtentBytes = int64_t{16} << 20;  // small tensors share a file
constexpr int64_t kAlignment = 64;

int64_t round_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// A nameless file and its mapping.
class Extent {
 public:
  Extent(const std::string& directory, int64_t nbytes) : nbytes_(nbytes) {
    fd_ = open_nameless(directory);
    const int error = fd_ < 0 ? errno : ::posix_fallocate(fd_, 0, nbytes);
    if (error == 0) {
      void* data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
      if (data != MAP_FAILED) {
        data_ = static_cast<std::byte*>(data);
        return;
      }
    }
    const int reason = error != 0 ? error : errno;
    if (fd_ >= 0) ::close(fd_);
    TORCH_CHECK(false, "[fully_shard] could not make a file of ", nbytes, " bytes in '", directory,
                "' for offloaded state: ", std::strerror(reason));
  }
  ~Extent() {
    ::munmap(data_, nbytes_);
    ::close(fd_);
  }
  Extent(const Extent&) = delete;
  Extent& operator=(const Extent&) = delete;

  std::byte* take(int64_t nbytes) {
    std::byte* place = data_ + used_;
    used_ += round_up(nbytes, kAlignment);
    return place;
  }
  int64_t room() const { return nbytes_ - used_; }
  bool holds(const void* pointer) const { return pointer >= data_ && pointer < data_ + nbytes_; }

  // The page cache keeps the pages until they are written and the system needs the memory.
  void rest() const {
    ::sync_file_range(fd_, 0, 0, SYNC_FILE_RANGE_WRITE);
    ::madvise(data_, nbytes_, MADV_DONTNEED);
  }

 private:
  static int open_nameless(const std::string& directory) {
    int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return fd;
    std::string name = directory + "/state.XXXXXX";  // a file system without O_TMPFILE
    fd = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd >= 0) ::unlink(name.c_str());
    return fd;
  }

  int64_t nbytes_;
  int64_t used_ = 0;
  int fd_ = -1;
  std::byte* data_ = nullptr;
};

class MappedDirectory : public StateMemory {
 public:
  explicit MappedDirectory(std::string directory) : directory_(std::move(directory)) {
    TORCH_CHECK_VALUE(!directory_.empty(),
                      "[fully_shard] plan.offload_directory must name a directory; got ''");
    std::error_code error;
    std::filesystem::create_directories(directory_, error);
    TORCH_CHECK_VALUE(
        !error && std::filesystem::is_directory(directory_),
        "[fully_shard] plan.offload_directory must be a directory, or one that can be made; got '",
        directory_, "': ", error ? error.message() : "not a directory");
  }

  at::Tensor empty(int64_t numel, at::ScalarType dtype) override {
    const auto nbytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    const auto options = at::TensorOptions().dtype(dtype);
    if (numel == 0) return at::empty({0}, options);
    const auto fits = [&](const auto& extent) { return extent->room() >= nbytes; };
    auto found = std::find_if(extents_.begin(), extents_.end(), fits);
    if (found == extents_.end()) {
      reserve({nbytes});
      found = extents_.end() - 1;
    }
    return at::from_blob((*found)->take(nbytes), {numel}, [extent = *found](void*) {}, options);
  }

  void reserve(const std::vector<int64_t>& nbytes) override {
    int64_t sum = 0;
    for (const int64_t tensor : nbytes) sum += round_up(tensor, kAlignment);
    if (sum == 0) return;
    const int64_t rounded = round_up(sum, kPage);
    extents_.push_back(std::make_shared<Extent>(
        directory_, std::max(rounded, std::min(kExtentBytes, 4 * rounded))));
  }

  bool holds(const at::Tensor& tensor) const override {
    const void* data = tensor.const_data_ptr();
    return tensor.numel() == 0 || std::any_of(extents_.begin(), extents_.end(),
                                              [&](const auto& e) { return e->holds(data); });
  }

  void rest() override {
    for (const auto& extent : extents_) extent->rest();
  }

 private:
  const std::string directory_;
  std::vector<std::shared_ptr<Extent>> extents_;
};

}  // namespace

std::shared_ptr<StateMemory> mapped_directory(const std::string& directory) {
  return std::make_shared<MappedDirectory>(directory);
}

}  // namespace tessera
