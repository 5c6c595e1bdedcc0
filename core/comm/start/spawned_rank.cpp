#include "comm/start/spawned_rank.h"

#include <c10/util/Exception.h>

#include <utility>

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

bool RankStore::check(const std::vector<std::string>& keys) {
  std::unique_lock lock(m_);
  const bool there = checkLocked(lock, keys);
  TORCH_CHECK_WITH(DistStoreError, there || failure_.empty(), "the wait ended because ", failure_);
  return there;
}

std::vector<uint8_t> RankStore::get(const std::string& key) {
  wait({key}, timeout_);
  return HashStore::get(key);
}

SpawnedRank::SpawnedRank(std::shared_ptr<SpawnedWorld> world, int rank, at::Generator generator)
    : world_(std::move(world)), rank_(rank), generator_(std::move(generator)) {}

SpawnedRank* SpawnedRank::current() {
  return dynamic_cast<SpawnedRank*>(c10::ThreadLocalDebugInfo::get(kind()));
}

RankInfo SpawnedRank::info() const {
  return {.rank = rank_, .size = world_->size, .source = "spawn"};
}

void SpawnedRank::note_closing() {
  if (failed_after_ < 0 && std::uncaught_exceptions() > 0) failed_after_ = world_->failures++;
}

void SpawnedRank::fail(std::exception_ptr failure) {
  if (failed_after_ < 0) failed_after_ = world_->failures++;
  failure_ = std::move(failure);
  world_->store->fail(c10::str("rank ", rank_, " of ", world_->size, " failed"));
}

}  // namespace tessera
