#include "comm/start/job_secret.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/memory/shared_memory.h"
#include "comm/group/environment.h"
#include "comm/start/authentic_store.h"
#include "comm/start/store_key.h"

namespace tessera {
namespace {

const char* const kKey = "secret";
const char* const kGiven = "given";
const char* const kNone = "none";
constexpr size_t kBytes = 32;

// Returns memory with a new secret. Other processes of this user, and nobody else but root, can
// open it.
std::shared_ptr<SharedMemory> new_secret() {
  auto memory = SharedMemory::create("tessera secret", kBytes);
  const bool is_made = ::getrandom(memory->data(), kBytes, 0) == ssize_t{kBytes};
  TORCH_CHECK(is_made, "[init] rank 0 could not make a secret for its job: ", std::strerror(errno));
  return memory;
}

std::string secret_in(const SharedMemory& memory) {
  return {reinterpret_cast<const char*>(memory.data()), kBytes};
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
  std::shared_ptr<SharedMemory> made;
  if (info.rank == 0) {
    if (!is_given && is_local) made = new_secret();
    if (made) secret = secret_in(*made);
    store->set(kKey, is_given ? kGiven : made ? made->handle().to_text() : kNone);
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
      try {
        const auto handle = SharedMemoryHandle::from_text(way);
        if (handle.nbytes == kBytes) secret = secret_in(*SharedMemory::open(handle));
      } catch (const std::exception& error) {
        refuse(info, std::string("this rank could not read rank 0's: ") + error.what());
      }
      if (secret.empty()) refuse(info, "this rank could not read rank 0's");
    }
  }
  if (secret.empty()) return store;
  return c10::make_intrusive<AuthenticStore>(std::move(store), std::move(secret), std::move(made));
}

}  // namespace tessera
