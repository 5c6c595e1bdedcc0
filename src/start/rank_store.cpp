#include "start/rank_store.h"

#include <c10/util/Exception.h>

namespace tessera {

void RankStore::fail(const std::string& reason) {
  const std::lock_guard lock(m_);
  if (failure_.empty()) failure_ = reason;
  cv_.notify_all();
}

void RankStore::wait(const std::vector<std::string>& keys,
                     const std::chrono::milliseconds& timeout) {
  std::unique_lock lock(m_);
  const auto there = [&] { return checkLocked(lock, keys); };
  const auto ended = [&] { return there() || !failure_.empty(); };
  timeout == kNoTimeout ? cv_.wait(lock, ended) : void(cv_.wait_for(lock, timeout, ended));
  if (there()) return;
  C10_THROW_ERROR(DistStoreError,
                  failure_.empty() ? "Wait timeout" : "the wait ended because " + failure_);
}

std::vector<uint8_t> RankStore::get(const std::string& key) {
  wait({key}, timeout_);
  return HashStore::get(key);
}

}  // namespace tessera
