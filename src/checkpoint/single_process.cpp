#include "checkpoint/single_process.h"

#include <atomic>
#include <memory>
#include <random>
#include <utility>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/pace.h"

namespace tessera {

ProgressCount::ProgressCount(const CheckpointProgress& progress, int64_t total)
    : progress_(progress), total_(total) {
  add(0);
}

void ProgressCount::add(int64_t nbytes) {
  done_ += nbytes;
  if (progress_) progress_(done_, total_);
}

void write_for_all(const std::filesystem::path& path, std::vector<RankContents> ranks,
                   const CheckpointProgress& progress) {
  const int size = static_cast<int>(ranks.size());
  int64_t total = 0;
  for (const RankContents& rank : ranks)
    for (const ChunkData& chunk : rank.chunks) total += chunk.nbytes();
  ProgressCount count(progress, total);
  Pace pace(0, [&](int64_t nbytes) { count.add(nbytes); });
  const std::string id = new_save_id();
  CheckpointWriter first(path, 0, size);
  first.set_id(id);
  first.begin();
  for (int rank = 0; rank < size; ++rank) {
    CheckpointWriter writer(path, rank, size);
    writer.set_id(id);
    writer.write(ranks[rank], &pace);
  }
  const std::atomic<bool> never = false;
  first.commit(std::chrono::minutes(1), never);
}

}  // namespace tessera
