#include "python_optimizer.h"

#include <ATen/ops/full.h>

#include <utility>

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
    if (module == "torch.optim.optimizer") break;  // the base of all
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
    const bool is_new_count = !before && (value.isInt() || value.isDouble());
    // torch.optim keeps its counts as tensors.
    state[name.c_str()] = is_new_count
                              ? py::cast(at::full({}, value.toScalar().toDouble(), at::kFloat))
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

void PythonOptimizer::take_groups() {
  const py::gil_scoped_acquire acquire;
  const auto groups = groups_of(optimizer_);
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<at::Tensor> held;
    for (const at::Tensor& param : groups[i]) held.push_back(part_of(param));
    if (i < param_groups().size()) {
      param_groups()[i].params() = held;
    } else {
      add_param_group(torch::optim::OptimizerParamGroup(held, defaults().clone()));
    }
  }
}

void PythonOptimizer::note_parts() {
  const py::gil_scoped_acquire acquire;
  const auto groups = groups_of(optimizer_);
  parts_.clear();
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::vector<at::Tensor>& held = param_groups().at(i).params();
    for (size_t j = 0; j < groups[i].size(); ++j)
      if (!held.at(j).is_same(groups[i][j])) parts_[groups[i][j].unsafeGetTensorImpl()] = held[j];
  }
}

at::Tensor PythonOptimizer::part_of(const at::Tensor& param) const {
  const auto part = parts_.find(param.unsafeGetTensorImpl());
  return part == parts_.end() ? param : part->second;
}

namespace {

// While it lives, the groups have the parameters of `held`.
class LentGroups {
 public:
  LentGroups(const py::object& optimizer,
             const std::vector<torch::optim::OptimizerParamGroup>& held) {
    for (const py::handle group : optimizer.attr("param_groups")) {
      own_.emplace_back(py::reinterpret_borrow<py::object>(group), group["params"]);
      group["params"] = py::cast(held.at(own_.size() - 1).params());
    }
  }
  ~LentGroups() {
    for (const auto& [group, params] : own_) group["params"] = params;
  }
  LentGroups(const LentGroups&) = delete;
  LentGroups& operator=(const LentGroups&) = delete;

 private:
  std::vector<std::pair<py::object, py::object>> own_;
};

}  // namespace

at::Tensor PythonOptimizer::step(LossClosure /*closure*/) {
  const py::gil_scoped_acquire acquire;
  const LentGroups lent(optimizer_, param_groups());
  optimizer_.attr("step")(**step_arguments_);
  return {};
}

}  // namespace tessera::python
