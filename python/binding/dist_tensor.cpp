// Meshes, placements and DistTensors.
#include <tessera/comm/comm_debug.h>
#include <tessera/comm/world.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/tensor/dist_debug.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "binding.h"
#include "entered.h"
#include "module_tree.h"

namespace tessera::python {
namespace {

const std::map<std::string, PartialOp> kPartialOps = {
    {"sum", PartialOp::kSum}, {"avg", PartialOp::kAvg},   {"max", PartialOp::kMax},
    {"min", PartialOp::kMin}, {"prod", PartialOp::kProd}, {"any", PartialOp::kAny},
    {"all", PartialOp::kAll}, {"norm", PartialOp::kNorm}};

Partial make_partial(const std::string& op) {
  const auto it = kPartialOps.find(op);
  if (it != kPartialOps.end()) return {it->second};
  std::string text = "Partial's op must be one of";
  for (const auto& [name, value] : kPartialOps) text += " '" + name + "'";
  throw py::value_error(text + "; got '" + op + "'");
}

std::string name_of(PartialOp op) {
  for (const auto& [name, value] : kPartialOps)
    if (value == op) return name;
  return {};
}

// Their text, comparison and hash, as values of Python have them.
template <class Class>
void add_value_methods(py::class_<Class>& bound) {
  const auto text = [](const Class& self) { return to_string(Placement(self)); };
  bound.def("__repr__", text)
      .def("__eq__", [](const Class& self, const Class& other) { return self == other; })
      .def("__eq__", [](const Class&, const py::object&) { return false; })
      .def("__hash__", [=](const Class& self) { return py::hash(py::str(text(self))); });
}

void bind_placements(py::module_& module) {
  py::class_<Replicate> replicate(module, "Replicate",
                                  "Every rank of the mesh dim has the same values.");
  replicate.def(py::init());
  add_value_methods(replicate);

  py::class_<Shard> shard(
      module, "Shard",
      "The tensor is cut along `dim` over the ranks of the mesh dim, as `torch.chunk` cuts. With a "
      "`split_factor`, the dim is first cut into so many blocks, and each over the ranks.");
  shard
      .def(py::init([](int64_t dim, int64_t split_factor) {
             return Shard{dim, split_factor};
           }),
           py::arg("dim"), py::arg("split_factor") = 1)
      .def_readonly("dim", &Shard::dim)
      .def_readonly("split_factor", &Shard::split_factor);
  add_value_methods(shard);

  py::class_<Partial> partial(module, "Partial",
                              "Each rank of the mesh dim has one term of a pending reduction: "
                              "'sum', 'avg', 'max', 'min', 'prod', 'any', 'all' or 'norm'.");
  partial.def(py::init(&make_partial), py::arg("op") = "sum")
      .def_property_readonly("op", [](const Partial& self) { return name_of(self.op); });
  add_value_methods(partial);
}

void bind_mesh(py::module_& module) {
  py::class_<DeviceMesh>(module, "DeviceMesh")
      .def(py::init([](const World& world, std::vector<int64_t> shape, std::vector<int> ranks,
                       std::vector<std::string> names) {
        return DeviceMesh(world, std::move(shape), std::move(ranks), std::move(names));
      }))
      .def_property_readonly("ndim", &DeviceMesh::ndim)
      .def_property_readonly("shape", &DeviceMesh::shape)
      .def_property_readonly("ranks", &DeviceMesh::ranks)
      .def_property_readonly("dim_names", &DeviceMesh::dim_names)
      .def_property_readonly("coordinate", &DeviceMesh::coordinate)
      .def("size", py::overload_cast<>(&DeviceMesh::size, py::const_))
      .def("size", py::overload_cast<int64_t>(&DeviceMesh::size, py::const_))
      .def("dim", &DeviceMesh::dim)
      .def("contains", &DeviceMesh::contains)
      .def("is_member", &DeviceMesh::is_member)
      .def("select", &DeviceMesh::select)
      .def("sub_mesh", [](const DeviceMesh& mesh,
                          const std::vector<std::string>& names) { return mesh.sub_mesh(names); })
      .def("with_first", &DeviceMesh::with_first, py::arg("dim_name"),
           py::arg("index") = std::nullopt)
      .def(
          "process_group",
          [](const DeviceMesh& mesh, std::optional<int64_t> dim) {
            return dim ? mesh.process_group(*dim) : mesh.process_group();
          },
          Waits())
      .def("__eq__", [](const DeviceMesh& self, const DeviceMesh& other) { return self == other; })
      .def("__repr__", &DeviceMesh::to_string);
}

// Calls `partition(name, mesh)` for each module of the model, whose names are `modules`.
void distribute(const NamedTensors& parameters, const NamedTensors& buffers,
                const std::vector<std::string>& modules, const DeviceMesh& mesh,
                const std::optional<py::function>& partition, bool check_values) {
  const auto tree = module_tree(parameters, buffers, modules);
  PartitionFn place;
  if (partition)
    place = [&](const std::string& name, torch::nn::Module&, const DeviceMesh& own) {
      const py::gil_scoped_acquire acquire;
      (*partition)(name, own);
    };
  const Waiting waiting;
  distribute_module(*tree, mesh, place, {.check_values = check_values});
}

void bind_functions(py::module_& module) {
  using Sizes = std::optional<std::vector<int64_t>>;
  module.def("is_dist", &is_dist, "True for a DistTensor.");
  module.def(
      "distribute",
      py::overload_cast<const at::Tensor&, const DeviceMesh&, Placements>(&tessera::distribute),
      Waits());
  module.def("distribute_", &distribute_, Waits());
  module.def("from_local", &from_local, py::arg("local"), py::arg("mesh"), py::arg("placements"),
             py::arg("sizes") = Sizes(), Waits());
  module.def(
      "to_local",
      [](const at::Tensor& tensor, std::optional<Placements> gradient) {
        return gradient ? to_local(tensor, std::move(*gradient)) : to_local(tensor);
      },
      py::arg("tensor"), py::arg("grad_placements") = std::nullopt, Waits());
  module.def(
      "redistribute",
      [](const at::Tensor& tensor, const DeviceMesh& mesh, Placements placements) {
        return redistribute(tensor, mesh, std::move(placements));
      },
      Waits());
  module.def("full_tensor", &full_tensor, Waits());
  module.def("mesh_of", &mesh_of, py::return_value_policy::copy);
  module.def("placements_of", &placements_of, py::return_value_policy::copy);
  module.def("describe", &tessera::describe);
  module.def("as_input", &tessera::detail::as_input);
  module.def("distribute_module", &distribute);
  module.def(
      "unwrap_distributed",
      [](const NamedTensors& parameters, const NamedTensors& buffers) {
        unwrap(*module_tree(parameters, buffers));
      },
      Waits());
}

void bind_debug(py::module_& module) {
  using Strict = Entered<StrictOperators>;
  py::class_<Strict>(module, "StrictOperators")
      .def(py::init())
      .def("enter", [](Strict& scope, bool strict) { scope.enter(strict); })
      .def("exit", &Strict::exit);

  module.def("operator_digest", &operator_digest);

  using Debug = Entered<CommDebug>;
  py::class_<Debug>(module, "CommDebug")
      .def(py::init())
      .def("enter", [](Debug& scope) { scope.enter(); })
      .def("exit", &Debug::exit)
      .def("entries", [](const Debug& scope) {
        py::list entries;
        for (const auto& entry : scope->entries())
          entries.append(
              py::make_tuple(entry.kind, entry.subject, entry.calls, entry.bytes, entry.module));
        return entries;
      });
}

}  // namespace

void bind_dist_tensor(py::module_& module) {
  bind_placements(module);
  bind_mesh(module);
  bind_functions(module);
  bind_debug(module);
}

}  // namespace tessera::python
