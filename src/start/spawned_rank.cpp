#include "start/spawned_rank.h"

#include <c10/util/StringUtil.h>

#include <utility>

namespace tessera {

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
