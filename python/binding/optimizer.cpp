// Sharded optimizers and gradient scalers.
#include <tessera/grad_scaler.h>
#include <tessera/optimizer_state_dict.h>
#include <tessera/sharded_optimizer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "python_optimizer.h"
#include "sharded_optimizer.h"
#include "state_dict.h"

namespace tessera::python {
namespace {

std::shared_ptr<ShardedPythonOptimizer> make(const ShardedModule& model,
                                             const py::object& optimizer, double max_grad_norm) {
  auto inner = std::make_unique<PythonOptimizer>(optimizer);
  const py::gil_scoped_release release;
  return std::make_shared<ShardedPythonOptimizer>(
      model, std::move(inner), ShardedOptimizerOptions{.max_grad_norm = max_grad_norm});
}

std::shared_ptr<GradScaler> make_scaler(double init_scale, double growth_factor,
                                        double backoff_factor, int64_t growth_interval,
                                        bool enabled, int64_t hysteresis, double min_scale,
                                        double max_scale, ProcessGroupPtr group) {
  return std::make_shared<GradScaler>(GradScalerOptions{.init_scale = init_scale,
                                                        .growth_factor = growth_factor,
                                                        .backoff_factor = backoff_factor,
                                                        .growth_interval = growth_interval,
                                                        .hysteresis = hysteresis,
                                                        .min_scale = min_scale,
                                                        .max_scale = max_scale,
                                                        .process_group = std::move(group),
                                                        .enabled = enabled});
}

}  // namespace

void bind_optimizer(py::module_& module) {
  using Optimizer = ShardedPythonOptimizer;
  py::class_<Optimizer, std::shared_ptr<Optimizer>>(module, "Optimizer")
      .def(py::init(&make), py::arg("model"), py::arg("optimizer"), py::arg("max_grad_norm"))
      .def(
          "step", [](Optimizer& self) { self.use([](ShardedOptimizer& it) { it.step(); }); },
          Waits())
      .def(
          "zero_grad",
          [](Optimizer& self) { self.use([](ShardedOptimizer& it) { it.zero_grad(); }); }, Waits())
      .def(
          "unwrap", [](Optimizer& self) { self.use([](ShardedOptimizer& it) { it.unwrap(); }); },
          Waits())
      .def(
          "keep_on_device",
          [](Optimizer& self, int64_t nbytes) {
            int64_t moved = 0;
            self.use([&](ShardedOptimizer& it) { moved = it.keep_on_device(nbytes); });
            return moved;
          },
          Waits())
      .def(
          "full_state_dict",
          [](Optimizer& self, int recipient) {
            OptimizerStateDict dict;
            {
              const py::gil_scoped_release release;
              self.use([&](ShardedOptimizer& it) { dict = full_state_dict(it, recipient); });
            }
            return to_python(dict, self.inner().optimizer());
          },
          py::arg("recipient"))
      .def(
          "load_full_state_dict",
          [](Optimizer& self, const py::dict& state) {
            const OptimizerStateDict dict = to_state_dict(state);
            const py::gil_scoped_release release;
            self.use([&](ShardedOptimizer& it) { load_full_state_dict(it, dict); });
          },
          py::arg("state"))
      .def(
          "state_nbytes",
          [](Optimizer& self) {
            int64_t nbytes = 0;
            self.use([&](ShardedOptimizer& it) { nbytes = it.memory().optimizer_state; });
            return nbytes;
          },
          Waits())
      .def(
          "offloaded_nbytes",
          [](Optimizer& self) {
            int64_t nbytes = 0;
            self.use([&](ShardedOptimizer& it) { nbytes = it.memory().offloaded; });
            return nbytes;
          },
          Waits())
      .def_property(
          "steps",
          [](Optimizer& self) {
            int64_t steps = 0;
            self.use([&](ShardedOptimizer& it) { steps = it.steps(); });
            return steps;
          },
          [](Optimizer& self, int64_t steps) {
            self.use([&](ShardedOptimizer& it) { it.set_steps(steps); });
          });

  py::class_<GradScaler, std::shared_ptr<GradScaler>>(module, "GradScaler")
      .def(py::init(&make_scaler))
      .def("scale", py::overload_cast<const at::Tensor&>(&GradScaler::scale, py::const_))
      .def(
          "unscale_",
          [](GradScaler& scaler, Optimizer& optimizer) {
            optimizer.use([&](ShardedOptimizer& it) { scaler.unscale_(it); });
          },
          Waits())
      .def(
          "step",
          [](GradScaler& scaler, Optimizer& optimizer) {
            bool stepped = false;
            optimizer.use([&](ShardedOptimizer& it) { stepped = scaler.step(it); });
            return stepped;
          },
          Waits())
      .def("update", py::overload_cast<std::optional<double>>(&GradScaler::update), Waits())
      .def("get_scale", &GradScaler::get_scale)
      .def("is_enabled", &GradScaler::is_enabled)
      .def("state", &GradScaler::state)
      .def("load_state", &GradScaler::load_state);
}

}  // namespace tessera::python
