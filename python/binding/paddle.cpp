// Paddle's group_sharded interface; see `tessera.paddle`.
#include <tessera/dialects/paddle_group_sharded.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "module_tree.h"
#include "sharded_optimizer.h"

namespace tessera::python {
namespace {

paddle::GroupShardedOptions group_sharded_options(
    const std::shared_ptr<GradScaler>& scaler, ProcessGroupPtr group,
    const std::variant<bool, std::string>& offload, bool sync_buffers, int64_t buffer_max_size,
    int64_t segment_size, bool sync_comm, ProcessGroupPtr dp_group,
    const std::vector<std::string>& exclude_layer, std::optional<double> clip_norm,
    const std::vector<std::string>& no_clip) {
  paddle::GroupShardedOptions options;
  options.scaler = scaler.get();
  options.group = std::move(group);
  options.offload = offload;
  options.sync_buffers = sync_buffers;
  options.buffer_max_size = buffer_max_size;
  options.segment_size = segment_size;
  options.sync_comm = sync_comm;
  options.dp_group = std::move(dp_group);
  options.exclude_layer.assign(exclude_layer.begin(), exclude_layer.end());
  if (clip_norm) options.grad_clip = paddle::ClipGradByGlobalNorm{*clip_norm, no_clip};
  return options;
}

// Returns the sharded model and its optimizer.
std::pair<ShardedModule, std::shared_ptr<ShardedPythonOptimizer>> group_sharded_parallel(
    const NamedTensors& parameters, const NamedTensors& buffers, const py::object& optimizer,
    const std::string& level, const paddle::GroupShardedOptions& options) {
  auto inner = std::make_unique<PythonOptimizer>(optimizer);
  const py::gil_scoped_release release;
  const auto tree = module_tree(parameters, buffers);
  const ShardPlan plan = paddle::detail::check_group_sharded(*tree, *inner, level, options);
  const ShardedModule model = fully_shard(named(parameters), named(buffers), plan);
  return {model, std::make_shared<ShardedPythonOptimizer>(
                     model, std::move(inner), paddle::group_sharded_optimizer_options(options))};
}

}  // namespace

void bind_paddle(py::module_& module) {
  py::class_<paddle::GroupShardedOptions>(module, "GroupShardedOptions")
      .def(py::init(&group_sharded_options));
  module.def("group_sharded_parallel", &group_sharded_parallel);
}

}  // namespace tessera::python
