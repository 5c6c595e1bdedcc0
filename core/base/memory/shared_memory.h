#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

/// Identifies a `SharedMemory` to another process of this host.
struct SharedMemoryHandle {
  int64_t pid = 0;
  int64_t fd = -1;
  uint64_t nbytes = 0;
  uint64_t id = 0;  ///< random: pids and fds are reused for other things

  std::string to_text() const;
  /// Throws `std::runtime_error` for other texts.
  static SharedMemoryHandle from_text(const std::string& text);
};

/// Pages that several processes have mapped: an unnamed file that disappears with the last of them,
/// however they end. Memory is allocated when a page is first touched.
///
/// A child that this process forks sees the pages as they are, and its own writes. Its writes reach
/// no other process; if the descriptor was closed before the fork, a write ends the child.
class SharedMemory {
 public:
  /// Throws `std::system_error` if the system refuses.
  static std::shared_ptr<SharedMemory> create(const char* name, size_t nbytes);

  /// Maps the memory that another process of this user made. In the process that made it, returns
  /// that very object: its threads then see it at one address. The maker must keep its descriptor
  /// until this returns. Throws `std::system_error`, or `std::runtime_error` if the handle names
  /// something else, or memory of another user.
  static std::shared_ptr<SharedMemory> open(const SharedMemoryHandle& handle);

  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t nbytes() const { return handle_.nbytes; }
  const SharedMemoryHandle& handle() const { return handle_; }

  /// Returns the same pages at another address, where writing to them ends the process. The first
  /// call must come while the descriptor is open.
  const std::byte* read_only();

  /// Allocates all pages now. Throws `std::system_error` if there are not enough; later, touching a
  /// page that can't be allocated would end the process.
  void reserve();

  /// Allocates the pages of bytes [begin, end) now, if the system can do that for a part. Throws as
  /// `reserve()` does.
  void reserve(size_t begin, size_t end);

  /// Returns the pages that lie in [begin, end) as a whole to the system, for all processes that
  /// have them mapped: they are zeros again. Keeps them if the system can't do that.
  void give_back(size_t begin, size_t end) noexcept;

  /// To be called after all other processes have opened it: descriptors are scarce.
  void close_descriptor();

 private:
  SharedMemory();
  std::byte* map(int protection) const;
  void keep_from_writing() const noexcept;

  int fd_ = -1;
  std::byte* data_ = nullptr;
  std::byte* read_only_ = nullptr;
  size_t mapped_ = 0;  // whole pages, and one more that holds the id
  SharedMemoryHandle handle_;
};

/// Asks the kernel to back [begin, begin + nbytes) with pages of 2 MiB, where it can, unless the
/// environment has `TESSERA_HUGE_PAGES=0`. Matrix kernels and optimizers then spend less time on
/// address translation.
void ask_for_huge_pages(void* begin, size_t nbytes);

}  // namespace tessera
