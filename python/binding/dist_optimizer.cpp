// Optimizers on DistTensors.
#include <tessera/dist_optimizer.h>
#include <tessera/grad_scaler.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "binding.h"
#include "plan.h"
#include "python_optimizer.h"

namespace tessera::python {
namespace {

// Steps an optimizer of Python.
class PythonDistOptimizer {
 public:
  PythonDistOptimizer(std::unique_ptr<PythonOptimizer> inner, DistOptimizerOptions options)
      : inner_(std::move(inner)), own_(*inner_, std::move(options)) {
    inner_->give_params();
  }

  template <class Use>
  auto use(const Use& use) {
    if constexpr (std::is_void_v<decltype(use(own_))>) {
      use(own_);
      inner_->give_params();
    } else {
      auto result = use(own_);
      inner_->give_params();
      return result;
    }
  }

 private:
  std::unique_ptr<PythonOptimizer> inner_;
  DistOptimizer own_;
};

std::shared_ptr<PythonDistOptimizer> make_dist(const py::object& optimizer,
                                               const std::string& level,
                                               std::optional<int64_t> mesh_dim,
                                               const std::optional<py::function>& place_state,
                                               std::optional<at::ScalarType> master_dtype) {
  DistOptimizerOptions options{
      .level = level_of(level), .mesh_dim = mesh_dim, .master_dtype = master_dtype};
  if (place_state) {
    // The function ends with the interpreter's lock, whoever lets go of it last.
    const std::shared_ptr<py::function> place(new py::function(*place_state), [](auto* function) {
      const py::gil_scoped_acquire acquire;
      delete function;
    });
    options.place_state = [place](const std::string& name, const at::Tensor& param,
                                  const at::Tensor& state) {
      const py::gil_scoped_acquire acquire;
      return (*place)(name, param, state).cast<at::Tensor>();
    };
  }
  auto inner = std::make_unique<PythonOptimizer>(optimizer);
  const Waiting waiting;
  return std::make_shared<PythonDistOptimizer>(std::move(inner), std::move(options));
}

}  // namespace

void bind_dist_optimizer(py::module_& module) {
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
