// Paddle's interfaces; see `tessera.paddle`.
#include <tessera/dialects/paddle_group_sharded.h>
#include <tessera/dialects/paddle_shard_layer.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "python/binding/module_tree.h"
#include "python/binding/sharded_optimizer.h"

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
  const Waiting waiting;
  const auto tree = module_tree(parameters, buffers);
  const ShardPlan plan = paddle::detail::check_group_sharded(*tree, *inner, level, options);
  const ShardedModule model = fully_shard(named(parameters), named(buffers), plan);
  return {model, std::make_shared<ShardedPythonOptimizer>(
                     model, std::move(inner), paddle::group_sharded_optimizer_options(options))};
}

at::Tensor shard_tensor(const at::Tensor& data, const DeviceMesh& mesh,
                        const Placements& placements, std::optional<at::ScalarType> dtype,
                        std::optional<at::Device> place, std::optional<bool> stop_gradient) {
  return paddle::shard_tensor(data, mesh, placements,
                              {.dtype = dtype, .place = place, .stop_gradient = stop_gradient});
}

void bind_shard_layer(py::module_& module) {
  module.def("shard_tensor", &shard_tensor, Waits());
  module.def("dtensor_from_local_list", &paddle::dtensor_from_local_list, Waits());
  module.def("local_tensor_list_from_dtensor", &paddle::local_tensor_list_from_dtensor, Waits());

  using Placement = tessera::detail::InputPlacement;
  py::class_<Placement>(module, "InputPlacement")
      .def(py::init([](std::vector<DeviceMesh> meshes, std::vector<std::string> keys,
                       std::vector<MeshDim> dims, bool is_split, bool check_values) {
        return Placement(std::move(meshes),
                         {std::move(keys), std::move(dims), is_split, check_values});
      }))
      .def(
          "place",
          [](const Placement& self, const at::Tensor& input,
             const std::variant<std::string, size_t>& at, size_t count) {
            if (const auto* key = std::get_if<std::string>(&at))
              return self.place(input, *key, count);
            return self.place(input, std::get<size_t>(at), count);
          },
          Waits());
}

}  // namespace

void bind_paddle(py::module_& module) {
  bind_shard_layer(module);
  py::class_<paddle::GroupShardedOptions>(module, "GroupShardedOptions")
      .def(py::init(&group_sharded_options));
  module.def("group_sharded_parallel", &group_sharded_parallel);
}

}  // namespace tessera::python
