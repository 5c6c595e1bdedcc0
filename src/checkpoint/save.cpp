#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/checkpoint.h>

#include <random>

#include "checkpoint/chunks.h"
#include "checkpoint/directory.h"
#include "checkpoint/fail_together.h"
#include "checkpoint/optimizer_options.h"
#include "checkpoint/safetensors.h"

namespace tessera {
namespace {

constexpr CollectiveTag kTag{"checkpoint", Channel::kControl};

std::string new_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

void check_arguments(const ShardedState& state, const ShardedOptimizer* optimizer) {
  for (const auto& unit : state.units()) unit->check_views();
  if (!optimizer) return;
  TORCH_CHECK_VALUE(
      optimizer->module().state().get() == &state,
      "[save_checkpoint] the optimizer must be that of the module; it was made for another one");
  optimizer_kind(optimizer->inner());
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  File file = File::create(path);
  file.write(text.data(), text.size());
  file.sync();
}

// Writes this rank's file and returns its part of the index.
std::string write_rank_file(const std::filesystem::path& draft, const ShardedState& state,
                            const ShardedOptimizer* optimizer, const std::string& id) {
  const ProcessGroup& process_group = state.process_group();
  TORCH_CHECK(std::filesystem::is_directory(draft),
              "[save_checkpoint] all ranks must see the same files; rank ", process_group.rank(),
              " does not see '", draft.string(), "', which rank 0 made");
  RankContents contents = contents_of_rank(state, optimizer);
  File file = File::create(draft / rank_file(process_group.rank(), process_group.size()));
  write_safetensors(file, std::move(contents.chunks), {{"format", "tessera"}, {"id", id}});
  file.sync();
  return to_json(contents.index);
}

CheckpointIndex merge(const std::vector<std::string>& parts) {
  CheckpointIndex index = index_from_json(parts.front());
  for (size_t rank = 1; rank < parts.size(); ++rank)
    merge_into(index, index_from_json(parts[rank]));
  return index;
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const ShardedModule& module,
                     const ShardedOptimizer* optimizer,
                     const std::map<std::string, double>& numbers) {
  at::NoGradGuard no_grad;
  const ShardedState& state = *module.state();
  const bool leads = state.mesh().rank() == 0;
  std::optional<CheckpointDirectory> directory;
  try {
    fail_together(state.mesh(), [&] {
      check_arguments(state, optimizer);
      directory.emplace(path);
      if (leads) directory->prepare();
    });
    const std::string id = state.mesh().all_gather_bytes(leads ? new_id() : "", kTag).front();
    std::string part;
    fail_together(state.mesh(),
                  [&] { part = write_rank_file(directory->draft(), state, optimizer, id); });
    const auto parts = state.mesh().all_gather_bytes(part, kTag);
    fail_together(state.mesh(), [&] {
      if (!leads) return;
      CheckpointIndex index = merge(parts);
      index.id = id;
      index.numbers = numbers;
      check_whole(index);
      write_file(directory->draft() / kIndexFile, to_json(index));
      directory->publish();
    });
  } catch (...) {
    if (leads && directory) directory->discard();
    throw;
  }
}

}  // namespace tessera
