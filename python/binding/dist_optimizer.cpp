// Optimizers on DistTensors.
#include <tessera/dialects/paddle_shard_layer.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/parallel/dist_optimizer.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "binding.h"
#include "plan.h"
#include "python_optimizer.h"

namespace tessera::python {
namespace {

// Steps an optimizer of Python.
class PythonDistOptimizer {
 public:
  /// `make`: returns the engine's optimizer around the given one.
  template <class Make>
  PythonDistOptimizer(std::unique_ptr<PythonOptimizer> inner, const Make& make)
      : inner_(std::move(inner)), own_(make(*inner_)) {
    inner_->note_parts();
  }

  template <class Use>
  auto use(const Use& use) {
    return inner_->lend(own_, use);
  }

 private:
  std::unique_ptr<PythonOptimizer> inner_;
  DistOptimizer own_;
};

template <class Make>
std::shared_ptr<PythonDistOptimizer> around(const py::object& optimizer, const Make& make) {
  auto inner = std::make_unique<PythonOptimizer>(optimizer);
  const Waiting waiting;
  return std::make_shared<PythonDistOptimizer>(std::move(inner), make);
}

StatePlacementFn state_placement(const py::function& place_state) {
  // The function ends with the interpreter's lock, whoever lets go of it last.
  const std::shared_ptr<py::function> place(new py::function(place_state), [](auto* function) {
    const py::gil_scoped_acquire acquire;
    delete function;
  });
  return [place](const std::string& name, const at::Tensor& param, const at::Tensor& state) {
    const py::gil_scoped_acquire acquire;
    return (*place)(name, param, state).cast<at::Tensor>();
  };
}

auto make_dist(const py::object& optimizer, const std::string& level,
               std::optional<int64_t> mesh_dim, const std::optional<py::function>& place_state,
               std::optional<at::ScalarType> master_dtype) {
  DistOptimizerOptions options{
      .level = level_of(level), .mesh_dim = mesh_dim, .master_dtype = master_dtype};
  if (place_state) options.place_state = state_placement(*place_state);
  return around(optimizer, [&](auto& inner) { return DistOptimizer(inner, options); });
}

// Paddle's; `shard_fn`: none, a function that places accumulators, or a stage.
auto shard_optimizer(
    const py::object& optimizer,
    const std::variant<std::monostate, paddle::ShardingStage, py::function>& shard_fn,
    bool multi_precision) {
  paddle::ShardOptimizerFn fn;
  if (const auto* stage = std::get_if<paddle::ShardingStage>(&shard_fn)) fn = *stage;
  if (const auto* place = std::get_if<py::function>(&shard_fn)) fn = state_placement(*place);
  return around(optimizer, [&](auto& inner) {
    return paddle::shard_optimizer(inner, fn, {.multi_precision = multi_precision});
  });
}

paddle::ShardingStage make_stage(const std::string& level, MeshDim dim,
                                 std::optional<DeviceMesh> mesh) {
  return {level_of(level), std::move(dim), std::move(mesh)};
}

}  // namespace

void bind_dist_optimizer(py::module_& module) {
  py::class_<paddle::ShardingStage>(module, "ShardingStage").def(py::init(&make_stage));
  module.def("shard_optimizer", &shard_optimizer);
  using Optimizer = PythonDistOptimizer;
  py::class_<Optimizer, std::shared_ptr<Optimizer>>(module, "DistOptimizer")
      .def(py::init(&make_dist))
      .def(
          "step", [](Optimizer& self) { self.use([](auto& it) { it.step(); }); }, Waits())
      .def(
          "step_scaled",
          [](Optimizer& self, GradScaler& scaler) {
            return self.use([&](auto& it) { return it.step(scaler); });
          },
          Waits())
      .def(
          "unscale_",
          [](Optimizer& self, GradScaler& scaler) {
            self.use([&](auto& it) { it.unscale_(scaler); });
          },
          Waits())
      .def(
          "zero_grad", [](Optimizer& self) { self.use([](auto& it) { it.zero_grad(); }); }, Waits())
      .def(
          "clip_grad_norm_",
          [](Optimizer& self, double max_norm, double norm_type) {
            return self.use([&](auto& it) { return it.clip_grad_norm_(max_norm, norm_type); });
          },
          Waits())
      .def(
          "state_dict",
          [](Optimizer& self) { return self.use([](auto& it) { return it.state_dict(); }); },
          Waits())
      .def(
          "load_state_dict",
          [](Optimizer& self, const std::map<std::string, at::Tensor>& state) {
            self.use([&](auto& it) { it.load_state_dict(state); });
          },
          Waits());
}

}  // namespace tessera::python
