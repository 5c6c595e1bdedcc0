// Checkpoints.
#include <tessera/checkpoint/async_checkpoint.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/engine/grad_scaler.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "sharded_optimizer.h"

namespace tessera::python {
namespace {

using Path = std::filesystem::path;
using Numbers = std::map<std::string, double>;
using Texts = std::map<std::string, std::string>;
using Keep = std::tuple<int, std::optional<std::pair<std::string, bool>>>;  // last, best
using OptimizerPtr = std::shared_ptr<ShardedPythonOptimizer>;

std::optional<BestBy> best_by(const std::optional<std::pair<std::string, bool>>& by) {
  return by ? std::optional(BestBy{by->first, by->second}) : std::nullopt;
}

SaveOptions save_options(Numbers numbers, Texts texts, StateDict rank_state,
                         const std::shared_ptr<GradScaler>& scaler, bool whole_parameters,
                         bool random_state, const Keep& keep) {
  return {.numbers = std::move(numbers),
          .texts = std::move(texts),
          .whole_parameters = whole_parameters,
          .scaler = scaler.get(),
          .rank_state = std::move(rank_state),
          .random_state = random_state,
          .keep_last = std::get<0>(keep),
          .keep_best = best_by(std::get<1>(keep))};
}

// Calls `use` with the engine's optimizer, or with null.
template <class Use>
void with(const OptimizerPtr& optimizer, const Use& use) {
  if (!optimizer) return use(static_cast<ShardedOptimizer*>(nullptr));
  optimizer->use([&](ShardedOptimizer& sharded) { use(&sharded); });
}

void save(const Path& path, const ShardedModule& model, const OptimizerPtr& optimizer,
          Numbers numbers, Texts texts, StateDict rank_state,
          const std::shared_ptr<GradScaler>& scaler, bool whole_parameters, bool random_state,
          const Keep& keep) {
  const SaveOptions options =
      save_options(std::move(numbers), std::move(texts), std::move(rank_state), scaler,
                   whole_parameters, random_state, keep);
  with(optimizer,
       [&](ShardedOptimizer* sharded) { save_checkpoint(path, model, sharded, options); });
}

auto load(const Path& path, ShardedModule& model, const OptimizerPtr& optimizer,
          const std::shared_ptr<GradScaler>& scaler, bool random_state, bool allow_missing,
          bool allow_unexpected) {
  LoadedCheckpoint loaded;
  with(optimizer, [&](ShardedOptimizer* sharded) {
    loaded = load_checkpoint(path, model, sharded,
                             {.scaler = scaler.get(),
                              .random_state = random_state,
                              .allow_missing = allow_missing,
                              .allow_unexpected = allow_unexpected});
  });
  return std::make_tuple(loaded.numbers, loaded.texts, loaded.rank_state, loaded.missing,
                         loaded.unexpected);
}

void save_async(AsyncCheckpointer& checkpointer, const Path& path, const ShardedModule& model,
                const OptimizerPtr& optimizer, Numbers numbers, Texts texts, StateDict rank_state,
                const std::shared_ptr<GradScaler>& scaler, bool random_state, const Keep& keep) {
  const SaveOptions options =
      save_options(std::move(numbers), std::move(texts), std::move(rank_state), scaler,
                   /*whole_parameters=*/false, random_state, keep);
  with(optimizer,
       [&](ShardedOptimizer* sharded) { checkpointer.save(path, model, sharded, options); });
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  module.def("save_checkpoint", &save, Waits());
  module.def("load_checkpoint", &load, Waits());
  module.def("save_state_dict", &save_state_dict, Waits());
  module.def("load_state_dict",
             py::overload_cast<const Path&, const StateDict&>(&tessera::load_state_dict), Waits());
  module.def("latest_checkpoint", &latest_checkpoint, Waits());
  module.def(
      "best_checkpoint",
      [](const Path& directory, const std::string& number, bool highest) {
        return best_checkpoint(directory, {number, highest});
      },
      Waits());
  py::class_<AsyncCheckpointer, std::shared_ptr<AsyncCheckpointer>>(module, "AsyncCheckpointer")
      .def(py::init([](bool refuse_when_busy, double bytes_per_second) {
        return destroyed_unlocked(new AsyncCheckpointer(
            {.when_busy = refuse_when_busy ? WhenBusy::kRefuse : WhenBusy::kWait,
             .bytes_per_second = bytes_per_second}));
      }))
      .def("save", &save_async, Waits())
      .def("wait", &AsyncCheckpointer::wait, Waits())
      .def("is_busy", &AsyncCheckpointer::is_busy);
}

}  // namespace tessera::python
