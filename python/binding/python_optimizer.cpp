#include "python_optimizer.h"

#include <ATen/ops/full.h>

#include "state_dict.h"

namespace tessera::python {
namespace {

std::vector<at::Tensor> params_of(const py::handle& group) {
  return group["params"].cast<std::vector<at::Tensor>>();
}

std::vector<std::vector<at::Tensor>> groups_of(const py::object& optimizer) {
  std::vector<std::vector<at::Tensor>> groups;
  for (const py::handle group : optimizer.attr("param_groups")) groups.push_back(params_of(group));
  return groups;
}

bool are_same(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  if (one.size() != other.size()) return false;
  for (size_t i = 0; i < one.size(); ++i)
    if (!one[i].is_same(other[i])) return false;
  return true;
}

}  // namespace

PythonOptimizer::PythonOptimizer(const py::object& optimizer)
    : ForeignOptimizer(groups_of(optimizer)), optimizer_(optimizer) {}

PythonOptimizer::~PythonOptimizer() {
  const py::gil_scoped_acquire acquire;
  optimizer_ = py::object();
  step_arguments_.release().dec_ref();
}

std::string PythonOptimizer::kind() const {
  const py::gil_scoped_acquire acquire;
  const py::type own = py::type::of(optimizer_);
  // A class derived from one of torch.optim, or from CPUAdam, has the state of its base.
  for (const py::handle type : own.attr("__mro__")) {
    const auto module = type.attr("__module__").cast<std::string>();
    if (module.starts_with("torch.optim.") || module.starts_with("tessera."))
      return type.attr("__name__").cast<std::string>();
  }
  return own.attr("__name__").cast<std::string>();
}

std::string PythonOptimizer::class_name() const {
  const py::gil_scoped_acquire acquire;
  return py::type::of(optimizer_).attr("__name__").cast<std::string>();
}

bool PythonOptimizer::elementwise() const {
  const py::gil_scoped_acquire acquire;
  return py::module_::import("tessera.optimizer")
      .attr("steps_elementwise")(optimizer_)
      .cast<bool>();
}

ForeignOptimizer::Values PythonOptimizer::read_state(const at::Tensor& param) const {
  const py::gil_scoped_acquire acquire;
  const py::object state = optimizer_.attr("state").attr("get")(param);
  return state.is_none() ? Values() : to_values(state, /*is_state=*/true);
}

void PythonOptimizer::write_state(const at::Tensor& param, const Values& values) {
  const py::gil_scoped_acquire acquire;
  const py::object states = optimizer_.attr("state"), key = py::cast(param);
  if (values.empty()) {
    states.attr("pop")(key, py::none());
    return;
  }
  const py::object earlier = states.attr("get")(key);
  py::dict state;
  for (const auto& [name, value] : values) {
    py::object before;
    if (!earlier.is_none() && earlier.contains(name)) before = earlier[name.c_str()];
    const bool is_new_count = !before && value.isInt();
    // torch.optim keeps its counts as tensors.
    state[name.c_str()] =
        is_new_count ? py::cast(at::full({}, static_cast<double>(value.toInt()), at::kFloat))
                     : to_python(value, before);
  }
  states[key] = state;
}

ForeignOptimizer::Values PythonOptimizer::read_options(size_t param_group) const {
  const py::gil_scoped_acquire acquire;
  return to_values(optimizer_.attr("param_groups")[py::int_(param_group)],
                   /*is_state=*/false);
}

void PythonOptimizer::write_options(size_t param_group, const Values& values) {
  const py::gil_scoped_acquire acquire;
  const py::object group = optimizer_.attr("param_groups")[py::int_(param_group)];
  for (const auto& [name, value] : values) {
    py::object before;
    if (group.contains(name)) before = group[name.c_str()];
    group[name.c_str()] = to_python(value, before);
  }
}

void PythonOptimizer::take_new_groups() {
  const py::gil_scoped_acquire acquire;
  const auto groups = groups_of(optimizer_);
  for (size_t i = 0; i < groups.size(); ++i) {
    if (i < param_groups().size()) {
      param_groups()[i].params() = groups[i];
    } else {
      add_param_group(torch::optim::OptimizerParamGroup(groups[i], defaults().clone()));
    }
  }
}

void PythonOptimizer::give_params() {
  const py::gil_scoped_acquire acquire;
  size_t i = 0;
  for (const py::handle group : optimizer_.attr("param_groups")) {
    const std::vector<at::Tensor>& own = param_groups().at(i++).params();
    if (!are_same(params_of(group), own)) group["params"] = py::cast(own);
  }
}

at::Tensor PythonOptimizer::step(LossClosure /*closure*/) {
  const py::gil_scoped_acquire acquire;
  give_params();
  optimizer_.attr("step")(**step_arguments_);
  return {};
}

}  // namespace tessera::python
