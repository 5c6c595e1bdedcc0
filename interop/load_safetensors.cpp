#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <tessera/comm/world.h>
#include <tessera/interop/load_safetensors.h>

#include <optional>

#include "comm/group/progress.h"
#include "engine/model/sharded_state.h"
#include "interop/foreign_load.h"
#include "tensor/shard_mesh.h"

namespace tessera {
namespace {

void check_same_files(const Ranks& ranks, const std::filesystem::path& path,
                      const std::string& digest) {
  for (const std::string& other : ranks.all_gather_bytes(digest, kCheckpointTag))
    TORCH_CHECK_VALUE(other == digest,
                      "[load_safetensors] all ranks must see the same files and give the same "
                      "options; the tensors in '",
                      path.string(), "' differ between ranks");
}

}  // namespace

LoadedTensors load_safetensors(const std::filesystem::path& path, ShardedModule& module,
                               const LoadSafetensorsOptions& options) {
  at::NoGradGuard no_grad;
  ShardedState& state = *module.state();
  const PhaseScope phase(state.context().progress, Phase::kLoad);
  state.check_not_exchanged("load_safetensors");
  state.take_in_replaced();
  state.thaw_trained();
  const Ranks ranks = Ranks::of(state.mesh());
  std::optional<ForeignLoad> load;
  ranks.check([&] { load.emplace(path, view_of(state, nullptr), options); }, "checkpoint");
  check_same_files(ranks, path, load->digest());
  LoadedTensors loaded;
  state.overwrite([&] { ranks.check([&] { loaded = load->load(); }, "checkpoint"); });
  return loaded;
}

LoadedTensors load_safetensors(const std::filesystem::path& path, torch::nn::Module& module,
                               const LoadSafetensorsOptions& options) {
  at::NoGradGuard no_grad;
  const ProcessGroupPtr all = default_process_group();
  const PhaseScope phase(progress_of(*all), Phase::kLoad);
  ForeignLoad load(path, view_of(module, nullptr, all->rank(), all->size()), options);
  return load.load();
}

}  // namespace tessera
