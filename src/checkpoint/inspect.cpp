#include <c10/util/Exception.h>
#include <tessera/checkpoint_files.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/directory.h"
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

namespace {

// Collects the errors of `read` without repetitions: a missing file is reported once.
void collect_errors(const std::function<void()>& read, std::vector<std::string>& errors) {
  try {
    read();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (std::find(errors.begin(), errors.end(), text) == errors.end()) errors.push_back(text);
  }
}

}  // namespace

std::vector<std::string> verify_checkpoint(const std::filesystem::path& path,
                                           const CheckpointProgress& progress) {
  std::vector<std::string> damage;
  std::optional<ChunkReader> reader;
  const bool has_index = std::filesystem::exists(readable_checkpoint(path) / kIndexFile);
  if (has_index) collect_errors([&] { reader.emplace(path); }, damage);
  if (!damage.empty()) return damage;
  if (!reader) reader.emplace(path);  // throws
  ProgressCount count(progress, total_nbytes(reader->index()));
  for (const TensorRecord& record : reader->index().tensors) {
    for (const ChunkRecord& chunk : record.chunks)
      collect_errors([&] { reader->verify(record, chunk); }, damage);
    count.add(record.nbytes());
  }
  return damage;
}

}  // namespace tessera
