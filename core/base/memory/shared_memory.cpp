#include "base/memory/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/mount.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

// The page after the data holds this: an opened descriptor may happen to be another file.
struct Stamp {
  uint64_t mark = 0x79726f6d656d7374;  // "tsmemory", which memory of other programs has not there
  uint64_t id = 0;
};
constexpr size_t kIdPage = 4096;
// Lets huge pages, where the kernel has them, begin with the data.
constexpr size_t kHugePage = size_t{2} << 20;

size_t mapped_size(size_t nbytes) { return (nbytes + kIdPage - 1) / kIdPage * kIdPage + kIdPage; }

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

uint64_t random_id() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) ^ device();
}

// A file can't be longer than this limit; exceeding it would end the process by SIGXFSZ.
void check_file_limit(size_t nbytes) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (nbytes <= limit.rlim_cur) return;
  errno = EFBIG;
  throw_errno("the limit on the size of files (ulimit -f) is too small for shared memory");
}

bool may_use_huge_pages() {
  const char* const choice = std::getenv("TESSERA_HUGE_PAGES");
  return choice == nullptr || std::string_view(choice) != "0";
}

// Returns a file system in memory of this process' own; -1 if the process may not make one. It is
// mounted nowhere and disappears with its last file. The kernel's own, behind memfd_create(), has
// huge pages only if the administrator has enabled them for it, and few do.
int own_file_system() {
  const auto make = [] {
    const int context = static_cast<int>(::syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC));
    if (context < 0) return -1;
    const auto set = [&](const char* key, const char* value) {
      return ::syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, key, value, 0) == 0;
    };
    const bool is_set =
        set("huge", "within_size") && set("nr_blocks", "0") &&  // as much as there is memory
        ::syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, nullptr, nullptr, 0) == 0;
    const int mount =
        is_set ? static_cast<int>(::syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, 0)) : -1;
    ::close(context);
    return mount;
  };
  static const int made = may_use_huge_pages() ? make() : -1;
  return made;
}

int nameless_file(const char* name) {
  const int file_system = own_file_system();
  const int fd =
      file_system < 0 ? -1 : ::openat(file_system, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  return fd < 0 ? ::memfd_create(name, MFD_CLOEXEC) : fd;
}

// Only processes of this user can open its nameless files, so nobody else can offer one.
bool is_own_nameless_file(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 0 &&
         status.st_uid == ::geteuid();
}

// The memories that this process made, for its own threads to open.
std::mutex registry_mutex;
std::map<uint64_t, std::weak_ptr<SharedMemory>>& registry() {
  static auto* const made = new std::map<uint64_t, std::weak_ptr<SharedMemory>>();
  return *made;
}

// All memories of this process.
std::set<const SharedMemory*>& present() {
  static auto* const memories = new std::set<const SharedMemory*>();
  return *memories;
}

}  // namespace

void ask_for_huge_pages(void* begin, size_t nbytes) {
  if (may_use_huge_pages()) ::madvise(begin, nbytes, MADV_HUGEPAGE);
}

// A child has them mapped as its parent does, and would write into the tensors of all ranks.
SharedMemory::SharedMemory() {
  [[maybe_unused]] static const int registered =
      ::pthread_atfork([] { registry_mutex.lock(); }, [] { registry_mutex.unlock(); },
                       [] {
                         for (const SharedMemory* const memory : present())
                           memory->keep_from_writing();
                         registry_mutex.unlock();
                       });
  std::lock_guard lock(registry_mutex);
  present().insert(this);
}

// Called in a child: its pages become copies as it writes to them, for which the file is needed.
void SharedMemory::keep_from_writing() const noexcept {
  if (!data_) return;
  constexpr int kOwn = MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED;
  if (fd_ < 0 || ::mmap(data_, mapped_, PROT_READ | PROT_WRITE, kOwn, fd_, 0) == MAP_FAILED)
    ::mprotect(data_, mapped_, PROT_READ);
}

std::string SharedMemoryHandle::to_text() const {
  return fmt::format("{} {} {} {}", pid, fd, nbytes, id);
}

SharedMemoryHandle SharedMemoryHandle::from_text(const std::string& text) {
  SharedMemoryHandle handle;
  std::istringstream in(text);
  if (!(in >> handle.pid >> handle.fd >> handle.nbytes >> handle.id))
    throw std::runtime_error("a handle of shared memory must be four numbers; got '" + text + "'");
  return handle;
}

std::byte* SharedMemory::map(int protection) const {
  // Reserves addresses of one more huge page, to begin at a huge page's boundary.
  const size_t reserved = mapped_ + kHugePage;
  void* const range =
      ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw_errno("could not reserve addresses for shared memory");
  const auto begin = reinterpret_cast<uintptr_t>(range);
  const uintptr_t data = (begin + kHugePage - 1) / kHugePage * kHugePage;
  void* const mapped = ::mmap(reinterpret_cast<void*>(data), mapped_, protection,
                              MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd_, 0);
  if (mapped == MAP_FAILED) {
    ::munmap(range, reserved);
    throw_errno("could not map shared memory");
  }
  const uintptr_t end = data + mapped_;
  if (data > begin) ::munmap(range, data - begin);
  if (begin + reserved > end) ::munmap(reinterpret_cast<void*>(end), begin + reserved - end);
  ask_for_huge_pages(mapped, mapped_);
  return reinterpret_cast<std::byte*>(data);
}

std::shared_ptr<SharedMemory> SharedMemory::create(const char* name, size_t nbytes) {
  std::shared_ptr<SharedMemory> memory(new SharedMemory());
  memory->mapped_ = mapped_size(nbytes);
  check_file_limit(memory->mapped_);
  memory->fd_ = nameless_file(name);
  if (memory->fd_ < 0) throw_errno("could not make a file in memory (memfd_create)");
  if (::ftruncate(memory->fd_, static_cast<off_t>(memory->mapped_)) != 0)
    throw_errno(fmt::format("could not set the size of shared memory to {} bytes", nbytes));
  memory->data_ = memory->map(PROT_READ | PROT_WRITE);
  memory->handle_ = {.pid = ::getpid(), .fd = memory->fd_, .nbytes = nbytes, .id = random_id()};
  const Stamp stamp{.id = memory->handle_.id};
  std::memcpy(memory->data_ + memory->mapped_ - kIdPage, &stamp, sizeof(stamp));
  std::lock_guard lock(registry_mutex);
  registry()[memory->handle_.id] = memory;
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::open(const SharedMemoryHandle& handle) {
  {
    std::lock_guard lock(registry_mutex);
    const auto made = registry().find(handle.id);
    if (made != registry().end()) {
      if (auto memory = made->second.lock()) return memory;
    }
  }
  std::shared_ptr<SharedMemory> memory(new SharedMemory());
  memory->mapped_ = mapped_size(handle.nbytes);
  memory->handle_ = handle;
  const std::string path = fmt::format("/proc/{}/fd/{}", handle.pid, handle.fd);
  memory->fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (memory->fd_ < 0)
    throw_errno(fmt::format("could not open the shared memory of process {}", handle.pid));
  const Stamp expected{.id = handle.id};
  Stamp stamp{.mark = 0};
  const auto at = static_cast<off_t>(memory->mapped_ - kIdPage);
  if (!is_own_nameless_file(memory->fd_) ||
      ::pread(memory->fd_, &stamp, sizeof(stamp), at) != sizeof(stamp) ||
      std::memcmp(&stamp, &expected, sizeof(stamp)) != 0) {
    throw std::runtime_error(fmt::format(
        "the process with the number {} is not the one that made the shared memory: the "
        "ranks may be in different containers",
        handle.pid));
  }
  memory->data_ = memory->map(PROT_READ | PROT_WRITE);
  return memory;
}

const std::byte* SharedMemory::read_only() {
  std::lock_guard lock(registry_mutex);  // threads that are ranks share one object
  if (!read_only_) read_only_ = map(PROT_READ);
  return read_only_;
}

void SharedMemory::reserve() {
  if (::fallocate(fd_, 0, 0, static_cast<off_t>(mapped_)) != 0)
    throw_errno(fmt::format("could not reserve {} bytes of shared memory", nbytes()));
}

void SharedMemory::reserve(size_t begin, size_t end) {
  begin = begin / kIdPage * kIdPage;
  if (begin >= end || ::madvise(data_ + begin, end - begin, MADV_POPULATE_WRITE) == 0) return;
  if (errno == EINVAL) return;  // the kernel does not know it
  throw_errno(fmt::format("could not reserve {} bytes of shared memory", end - begin));
}

void SharedMemory::give_back(size_t begin, size_t end) noexcept {
  begin = (begin + kIdPage - 1) / kIdPage * kIdPage;
  end = end / kIdPage * kIdPage;
  if (begin < end) ::madvise(data_ + begin, end - begin, MADV_REMOVE);
}

void SharedMemory::close_descriptor() {
  std::lock_guard lock(registry_mutex);
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

SharedMemory::~SharedMemory() {
  {
    std::lock_guard lock(registry_mutex);
    const auto made = registry().find(handle_.id);
    if (made != registry().end() && made->second.expired()) registry().erase(made);
    present().erase(this);
  }
  for (std::byte* const data : {data_, read_only_}) {
    if (data) ::munmap(data, mapped_);
  }
  close_descriptor();
}

}  // namespace tessera
