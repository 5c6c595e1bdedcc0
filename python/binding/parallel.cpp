// What computes on DistTensors: factories, local_map, rules of operators, context parallelism.
#include <tessera/parallel/context_parallel.h>
#include <tessera/tensor/dist_factories.h>
#include <tessera/tensor/local_map.h>
#include <tessera/tensor/operator_rules.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "binding.h"
#include "entered.h"

namespace tessera::python {
namespace {

at::TensorOptions options_of(std::optional<at::ScalarType> dtype, std::optional<at::Device> device,
                             bool requires_grad) {
  return at::TensorOptions().dtype(dtype).device(device).requires_grad(requires_grad);
}

using Make = at::Tensor (*)(at::IntArrayRef, const DeviceMesh&, Placements, at::TensorOptions);
using MakeRandom = at::Tensor (*)(at::IntArrayRef, const DeviceMesh&, Placements, at::TensorOptions,
                                  std::optional<at::Generator>);

void bind_factories(py::module_& module) {
  using Sizes = std::vector<int64_t>;
  using Dtype = std::optional<at::ScalarType>;
  using Device = std::optional<at::Device>;
  const auto bind = [&](const char* name, Make make) {
    module.def(
        name,
        [make](const Sizes& sizes, const DeviceMesh& mesh, Placements placements, Dtype dtype,
               Device device, bool requires_grad) {
          return make(sizes, mesh, std::move(placements), options_of(dtype, device, requires_grad));
        },
        Waits());
  };
  bind("dist_zeros", &dist_zeros);
  bind("dist_ones", &dist_ones);
  bind("dist_empty", &dist_empty);
  module.def(
      "dist_full",
      [](const Sizes& sizes, const std::variant<bool, int64_t, double>& value,
         const DeviceMesh& mesh, Placements placements, Dtype dtype, Device device,
         bool requires_grad) {
        const auto scalar = std::visit([](auto number) { return at::Scalar(number); }, value);
        return dist_full(sizes, scalar, mesh, std::move(placements),
                         options_of(dtype, device, requires_grad));
      },
      Waits());
  const auto bind_random = [&](const char* name, MakeRandom make) {
    module.def(
        name,
        [make](const Sizes& sizes, const DeviceMesh& mesh, Placements placements, Dtype dtype,
               Device device, bool requires_grad, std::optional<at::Generator> generator) {
          return make(sizes, mesh, std::move(placements), options_of(dtype, device, requires_grad),
                      std::move(generator));
        },
        Waits());
  };
  bind_random("dist_rand", &dist_rand);
  bind_random("dist_randn", &dist_randn);
}

// One call of a function of Python on local parts. Values that are not tensors are none.
class LocalCall {
 public:
  using Values = std::vector<std::optional<at::Tensor>>;
  LocalCall(PlacementsList out, PlacementsList in, PlacementsList in_grad,
            std::optional<DeviceMesh> mesh, bool redistribute)
      : out_(std::move(out)),
        options_{std::move(in), std::move(in_grad), std::move(mesh), redistribute},
        call_(out_, options_) {}
  LocalCall(const LocalCall&) = delete;
  LocalCall& operator=(const LocalCall&) = delete;

  Values to_local(Values arguments) {
    for (auto& argument : arguments) call_.add_argument(argument ? &*argument : nullptr);
    call_.check_arguments();
    return arguments;
  }
  Values to_dist(Values results) {
    for (auto& result : results) call_.add_result(result ? &*result : nullptr);
    call_.finish();
    return results;
  }

 private:
  PlacementsList out_;
  LocalMapOptions options_;
  detail::LocalCall call_;
};

py::object argument_value(const c10::IValue& value) {
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isIntList()) return py::cast(value.toIntVector());
  if (value.isDoubleList()) return py::cast(value.toDoubleVector());
  return py::none();
}

// Functions of Python by the operators whose rules they are. Never freed: the interpreter may have
// ended before.
std::map<std::string, py::function>& rules() {
  static auto& rules = *new std::map<std::string, py::function>;
  return rules;
}

Strategies ask_python(const OpCall& call) {
  const py::gil_scoped_acquire acquire;
  std::string name = call.schema.name();
  if (!call.schema.overload_name().empty()) name += "." + call.schema.overload_name();
  py::dict arguments;
  for (size_t i = 0; i < call.values.size(); ++i)
    arguments[call.schema.arguments()[i].name().c_str()] = argument_value(call.values[i]);
  py::list inputs, outputs;
  for (const TensorInfo& input : call.inputs) inputs.append(py::cast(input.sizes));
  for (const TensorInfo& output : call.outputs) outputs.append(py::cast(output.sizes));
  Strategies strategies;
  for (const py::handle item : rules().at(name)(inputs, outputs, arguments, call.ranks)) {
    auto [in, out] = item.cast<std::pair<Placements, Placements>>();
    strategies.push_back({std::move(in), std::move(out)});
  }
  return strategies;
}

void bind_rules(py::module_& module) {
  module.def("register_rule", [](const std::string& name, const py::function& rule,
                                 const std::string& size_argument, bool splits) {
    register_rule(name, &ask_python, {.size_argument = size_argument, .splits = splits});
    rules()[name] = rule;
  });
}

void bind_context_parallel(py::module_& module) {
  using Scope = Entered<ContextParallel>;
  py::class_<Scope>(module, "ContextParallel")
      .def(py::init())
      .def("enter",
           [](Scope& scope, const DeviceMesh& mesh, const MeshDim& mesh_dim, bool load_balance,
              bool all_gather) {
             scope.enter(mesh, ContextParallelOptions{
                                   mesh_dim, load_balance,
                                   all_gather ? RotateMethod::kAllGather : RotateMethod::kRing});
           })
      .def("exit", &Scope::exit);
  module.def("balance_sequence", &balance_sequence, Waits());
  module.def("unbalance_sequence", &unbalance_sequence, Waits());
}

}  // namespace

void bind_parallel(py::module_& module) {
  bind_factories(module);
  py::class_<LocalCall>(module, "LocalCall")
      .def(py::init<PlacementsList, PlacementsList, PlacementsList, std::optional<DeviceMesh>,
                    bool>())
      .def("to_local", &LocalCall::to_local, Waits())
      .def("to_dist", &LocalCall::to_dist, Waits());
  bind_rules(module);
  bind_context_parallel(module);
}

}  // namespace tessera::python
