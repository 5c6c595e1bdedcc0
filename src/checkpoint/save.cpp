#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/checkpoint.h>
#include <tessera/grad_scaler.h>

#include <optional>
#include <random>
#include <utility>

#include "checkpoint/chunks.h"
#include "checkpoint/directory.h"
#include "checkpoint/optimizer_options.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/whole_model.h"

namespace tessera {
namespace {

constexpr CollectiveTag kTag{"checkpoint", Channel::kControl};

std::string new_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  File file = File::create(path);
  file.write(text.data(), text.size(), 0);
  file.sync();
}

// Writes this rank's file, if it has anything to store there, and returns its part of the index.
CheckpointIndex write_rank_file(const std::filesystem::path& draft, const ShardMesh& ranks,
                                const ModelView& view, bool with_model, const std::string& id) {
  TORCH_CHECK(std::filesystem::is_directory(draft),
              "[save_checkpoint] all ranks must see the same files; rank ", ranks.rank(),
              " does not see '", draft.string(), "', which rank 0 made");
  const RankContents contents = contents_of_rank(view, ranks.rank(), ranks.size(), with_model);
  if (contents.chunks.empty()) return contents.index;
  std::vector<TensorHeader> headers;
  for (const auto& [key, data] : contents.chunks)
    headers.push_back({key, safetensors_dtype(data.scalar_type()), data.sizes().vec()});
  SafetensorsWriter file(File::create(draft / rank_file(ranks.rank(), ranks.size())),
                         std::move(headers), {{"format", "tessera"}, {"id", id}});
  for (const auto& [key, data] : contents.chunks) file.write(key, data);
  file.sync();
  return contents.index;
}

CheckpointIndex merge(const std::vector<std::string>& parts) {
  CheckpointIndex index = index_from_json(parts.front());
  for (size_t rank = 1; rank < parts.size(); ++rank)
    merge_into(index, index_from_json(parts[rank]));
  return index;
}

// An id for this save, the same on all ranks. Throws on all if they want to store differently: then
// some would gather, and wait for the others.
std::string agree_on_id(const ShardMesh& ranks, const SaveOptions& options) {
  const std::string kind = options.whole_parameters ? "whole " : "shards ";
  const auto offers = ranks.all_gather_bytes(kind + new_id(), kTag);
  for (const std::string& offer : offers) {
    TORCH_CHECK_VALUE(offer.starts_with(offers[0].substr(0, offers[0].find(' '))),
                      "[save_checkpoint] options.whole_parameters must be the same on all ranks");
  }
  return offers[0].substr(kind.size());
}

void publish(const CheckpointDirectory& directory, CheckpointIndex index, const std::string& id,
             const SaveOptions& options) {
  index.id = id;
  index.numbers = options.numbers;
  if (options.scaler) index.scaler = options.scaler->state();
  check_whole(index);
  write_file(directory.draft() / kIndexFile, to_json(index));
  directory.publish();
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const ShardedModule& module,
                     const ShardedOptimizer* optimizer, const SaveOptions& options) {
  at::NoGradGuard no_grad;
  ShardedState& state = *module.state();
  const ShardMesh& ranks = state.mesh();
  const bool leads = ranks.rank() == 0, whole = options.whole_parameters;
  std::optional<CheckpointDirectory> directory;
  try {
    ModelView view;
    std::vector<WholeTensor> plan;
    check_on_all_ranks(
        ranks,
        [&] {
          view = view_of(state, optimizer);
          if (optimizer) optimizer_kind(optimizer->inner());
          if (whole) plan = plan_whole_model(state);
          directory.emplace(path);
          if (leads) directory->prepare();
        },
        "checkpoint");
    const std::string id = agree_on_id(ranks, options);
    std::string part;
    check_on_all_ranks(
        ranks,
        [&] {
          CheckpointIndex index = write_rank_file(directory->draft(), ranks, view, !whole, id);
          if (leads) {
            for (WholeTensor& tensor : plan) index.tensors.push_back(tensor.record);
            if (optimizer) index.optimizer->steps = optimizer->steps();
          }
          part = to_json(index);
        },
        "checkpoint");
    if (whole) write_whole_model(state, plan, directory->draft(), id);
    const auto parts = ranks.all_gather_bytes(part, kTag);
    check_on_all_ranks(
        ranks,
        [&] {
          if (leads) publish(*directory, merge(parts), id, options);
        },
        "checkpoint");
  } catch (...) {
    if (leads && directory) directory->discard();
    throw;
  }
}

}  // namespace tessera
