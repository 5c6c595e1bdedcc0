// Sharded optimizers and gradient scalers.
#include <tessera/engine/grad_scaler.h>
#include <tessera/engine/optimizer_state_dict.h>
#include <tessera/engine/sharded_optimizer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "make_scaler.h"
#include "python_optimizer.h"
#include "sharded_optimizer.h"
#include "state_dict.h"

namespace tessera::python {
namespace {

std::shared_ptr<ShardedPythonOptimizer> make(const ShardedModule& model,
                                             const py::object& optimizer, double max_grad_norm) {
  auto inner = std::make_unique<PythonOptimizer>(optimizer);
  const Waiting waiting;
  return std::make_shared<ShardedPythonOptimizer>(
      model, std::move(inner), ShardedOptimizerOptions{.max_grad_norm = max_grad_norm});
}

}  // namespace

void bind_optimizer(py::module_& module) {
  using Optimizer = ShardedPythonOptimizer;
  py::class_<Optimizer, std::shared_ptr<Optimizer>>(module, "Optimizer")
      .def(py::init(&make), py::arg("model"), py::arg("optimizer"), py::arg("max_grad_norm"))
      .def(
          "step", [](Optimizer& self) { self.use([](auto& it) { it.step(); }); }, Waits())
      .def(
          "zero_grad",
          [](Optimizer& self, bool set_to_none) {
            self.use([&](auto& it) { it.zero_grad(set_to_none); });
          },
          Waits())
      .def(
          "unwrap", [](Optimizer& self) { self.use([](auto& it) { it.unwrap(); }); }, Waits())
      .def(
          "keep_on_device",
          [](Optimizer& self, int64_t nbytes) {
            return self.use([&](auto& it) { return it.keep_on_device(nbytes); });
          },
          Waits())
      .def("part_of",
           [](Optimizer& self, const at::Tensor& param) { return self.inner().part_of(param); })
      .def(
          "full_state_dict",
          [](Optimizer& self, int recipient) {
            OptimizerStateDict dict;
            {
              const Waiting waiting;
              dict = self.use([&](auto& it) { return full_state_dict(it, recipient); });
            }
            return to_python(dict, self.inner().optimizer());
          },
          py::arg("recipient"))
      .def(
          "load_full_state_dict",
          [](Optimizer& self, const py::dict& state) {
            const OptimizerStateDict dict = to_state_dict(state);
            const Waiting waiting;
            self.use([&](auto& it) { load_full_state_dict(it, dict); });
          },
          py::arg("state"))
      .def(
          "memory",
          [](Optimizer& self) { return to_dict(self.use([](auto& it) { return it.memory(); })); },
          Waits())
      .def_property_readonly("steps_since_average",
                             [](Optimizer& self) {
                               return self.use([](auto& it) { return it.steps_since_average(); });
                             })
      .def_property(
          "steps", [](Optimizer& self) { return self.use([](auto& it) { return it.steps(); }); },
          [](Optimizer& self, int64_t steps) { self.use([&](auto& it) { it.set_steps(steps); }); });

  py::class_<GradScaler, std::shared_ptr<GradScaler>>(module, "GradScaler")
      .def(py::init(&make_scaler<GradScaler>))
      .def("scale", py::overload_cast<const at::Tensor&>(&GradScaler::scale, py::const_))
      .def(
          "unscale_",
          [](GradScaler& scaler, Optimizer& optimizer) {
            optimizer.use([&](auto& it) { scaler.unscale_(it); });
          },
          Waits())
      .def(
          "step",
          [](GradScaler& scaler, Optimizer& optimizer) {
            return optimizer.use([&](auto& it) { return scaler.step(it); });
          },
          Waits())
      .def("update", py::overload_cast<std::optional<double>>(&GradScaler::update), Waits())
      .def("get_scale", &GradScaler::get_scale)
      .def("is_enabled", &GradScaler::is_enabled)
      .def("state", &GradScaler::state)
      .def("load_state", &GradScaler::load_state);
}

}  // namespace tessera::python
