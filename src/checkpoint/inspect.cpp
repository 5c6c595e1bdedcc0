#include <c10/util/Exception.h>
#include <tessera/checkpoint_files.h>

#include <set>
#include <utility>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/single_process.h"

namespace tessera {

CheckpointSummary inspect_checkpoint(const std::filesystem::path& path) {
  const ChunkReader reader(path);
  const CheckpointIndex& index = reader.index();
  CheckpointSummary summary{.id = index.id, .plan = index.plan, .ranks = index.world_size};
  summary.numbers = index.numbers;
  if (index.optimizer) {
    summary.optimizer = index.optimizer->kind;
    summary.optimizer_steps = index.optimizer->steps;
  }
  summary.has_scaler = !index.scaler.empty();
  summary.schedulers = std::ssize(index.schedulers);
  std::set<std::string> files = {kIndexFile};
  for (const TensorRecord& record : index.tensors) {
    summary.tensors.push_back({record.kind, record.names, record.state, record.dtype, record.shape,
                               record.nbytes(), std::ssize(record.chunks)});
    for (const ChunkRecord& chunk : record.chunks) files.insert(chunk.file);
  }
  summary.files.assign(files.begin(), files.end());
  return summary;
}

std::vector<std::string> verify_checkpoint(const std::filesystem::path& path,
                                           const CheckpointProgress& progress) {
  ChunkReader reader(path);
  std::vector<std::string> damage;
  ProgressCount count(progress, total_nbytes(reader.index()));
  for (const TensorRecord& record : reader.index().tensors) {
    for (const ChunkRecord& chunk : record.chunks) {
      try {
        reader.verify(record, chunk);
      } catch (const c10::Error& error) {
        damage.emplace_back(error.what_without_backtrace());
      }
    }
    count.add(record.nbytes());
  }
  return damage;
}

}  // namespace tessera
