#include "comm/start/job_secret.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "comm/group/environment.h"
#include "comm/start/authentic_store.h"
#include "comm/start/store_key.h"

namespace tessera {
namespace {

const char* const kKey = "secret";
const char* const kGiven = "given";
const char* const kNone = "none";
const char* const kMemory = "tessera secret";

using Secret = std::array<char, 32>;

// Memory of rank 0 with a secret. Other processes of its user, and nobody else but root, can open
// it through /proc.
struct SecretMemory {
  Secret secret{};
  int fd = ::memfd_create(kMemory, MFD_CLOEXEC);

  SecretMemory() {
    const bool is_made =
        ::getrandom(secret.data(), secret.size(), 0) == static_cast<ssize_t>(secret.size()) &&
        ::pwrite(fd, secret.data(), secret.size(), 0) == static_cast<ssize_t>(secret.size());
    TORCH_CHECK(is_made,
                "[init] rank 0 could not make a secret for its job: ", std::strerror(errno));
  }
  ~SecretMemory() { ::close(fd); }
  SecretMemory(const SecretMemory&) = delete;
  SecretMemory& operator=(const SecretMemory&) = delete;

  std::string path() const { return fmt::format("/proc/{}/fd/{}", ::getpid(), fd); }
};

// Returns the secret in the memory at `path`; empty if that is none, or not this user's.
std::string secret_at(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return "";
  struct stat status {};
  std::error_code error;
  const auto target = std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", fd), error);
  Secret secret{};
  const bool is_own = ::fstat(fd, &status) == 0 && status.st_uid == ::geteuid() &&
                      target.string().starts_with(fmt::format("/memfd:{}", kMemory)) &&
                      ::pread(fd, secret.data(), secret.size(), 0) == std::ssize(secret);
  ::close(fd);
  return is_own ? std::string(secret.begin(), secret.end()) : "";
}

[[noreturn]] void refuse(const RankInfo& info, const std::string& why) {
  C10_THROW_ERROR(
      DistNetworkError,
      fmt::format("[init] the ranks of a job must have one secret; {} (rank {} of {}). Set "
                  "TESSERA_SECRET to one text on all ranks, or on none",
                  why, info.rank, info.size));
}

}  // namespace

c10::intrusive_ptr<c10d::Store> with_secret(c10::intrusive_ptr<c10d::Store> store,
                                            const RankInfo& info, const Deadline& deadline) {
  std::string secret = environment("TESSERA_SECRET").value_or("");
  const bool is_given = !secret.empty(), is_local = info.local_size == info.size;
  std::shared_ptr<const SecretMemory> made;
  if (info.rank == 0) {
    if (!is_given && is_local) made = std::make_shared<const SecretMemory>();
    if (made) secret.assign(made->secret.begin(), made->secret.end());
    store->set(kKey, is_given ? kGiven : made ? made->path() : kNone);
  } else {
    TORCH_CHECK_WITH(DistNetworkError, wait_for_key(*store, kKey, deadline, info.size),
                     "rank 0 has not said how the job's secret is passed on");
    const std::string way = store->get_to_str(kKey);
    if (is_given != (way == kGiven))
      refuse(info, is_given ? "this rank has TESSERA_SECRET, and rank 0 has none"
                            : "rank 0 has TESSERA_SECRET, and this rank has none");
    // By hand, some ranks may not know that all are here.
    if (way == kNone && is_local && info.source != "environment")
      refuse(info, "rank 0 has none, though all ranks are on this host");
    if (!is_given && way != kNone) {
      secret = secret_at(way);
      if (secret.empty()) refuse(info, "this rank could not read rank 0's at '" + way + "'");
    }
  }
  if (secret.empty()) return store;
  return c10::make_intrusive<AuthenticStore>(std::move(store), std::move(secret), std::move(made));
}

}  // namespace tessera
