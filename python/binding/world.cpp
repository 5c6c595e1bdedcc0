// Worlds and process groups.
#include <tessera/base/page_heap.h>
#include <tessera/comm/world.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "binding.h"

namespace tessera::python {
namespace {

Transport transport_of(const std::string& name) {
  if (name == "auto") return Transport::kAuto;
  if (name == "gloo") return Transport::kGloo;
  if (name == "arena") return Transport::kArena;
  throw py::value_error("[init] transport must be 'auto', 'gloo' or 'arena'; got '" + name + "'");
}

ReduceOp reduce_op_of(const std::string& name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "max") return ReduceOp::kMax;
  throw py::value_error("[all_reduce] op must be 'sum' or 'max'; got '" + name + "'");
}

WorldOptions options_of(std::optional<double> timeout, const std::string& backend,
                        const std::string& transport) {
  WorldOptions options;
  if (timeout) {
    if (!(*timeout > 0) || !std::isfinite(*timeout))
      throw py::value_error("[init] timeout must be a positive number of seconds");
    options.timeout = std::chrono::milliseconds(static_cast<int64_t>(std::ceil(*timeout * 1000)));
  }
  options.backend = backend;
  options.transport = transport_of(transport);
  options.accepts_clients = true;
  return options;
}

std::shared_ptr<World> join(std::optional<double> timeout, const std::string& backend,
                            const std::string& transport) {
  return destroyed_unlocked(new World(init(options_of(timeout, backend, transport))));
}

std::shared_ptr<World> join_store(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                  std::optional<double> timeout, const std::string& backend,
                                  const std::string& transport) {
  return destroyed_unlocked(
      new World(init(store, rank, size, options_of(timeout, backend, transport))));
}

}  // namespace

void bind_world(py::module_& module) {
  py::class_<ProcessGroup, std::shared_ptr<ProcessGroup>>(
      module, "ProcessGroup", "Ranks that communicate. Made by `init()` and `new_group()`.")
      .def_property_readonly("rank", &ProcessGroup::rank, "This process's number among the ranks.")
      .def_property_readonly("size", &ProcessGroup::size, "The number of ranks.")
      .def(
          "all_reduce",
          [](ProcessGroup& group, const at::Tensor& tensor, const std::string& op) {
            const ReduceOp reduce = reduce_op_of(op);
            const Waiting waiting;
            const WorkPtr work = group.all_reduce(tensor, reduce, {"all_reduce"});
            work->wait();
            work->wait_inputs();
          },
          py::arg("tensor"), py::arg("op") = "sum",
          "Replaces a tensor by the sum (or the `max`) over the ranks. Collective.")
      .def(
          "broadcast",
          [](ProcessGroup& group, const at::Tensor& tensor, int root) {
            const WorkPtr work = group.broadcast(tensor, root, {"broadcast"});
            work->wait();
            work->wait_inputs();
          },
          py::arg("tensor"), py::arg("root") = 0, Waits(),
          "Replaces a tensor by that of rank `root`. Collective.");

  py::class_<World, std::shared_ptr<World>>(module, "World")
      .def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly("group", &World::process_group)
      // In a forked child: its destructor would wait for threads that the child does not have.
      .def("abandon",
           [](const std::shared_ptr<World>& world) { new std::shared_ptr<World>(world); })
      .def("new_group", &World::new_process_group, py::arg("ranks"), Waits());

  module.def("join", &join, py::arg("timeout"), py::arg("backend"), py::arg("transport"), Waits());
  module.def("join_store", &join_store, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("timeout"), py::arg("backend"), py::arg("transport"), Waits());
  module.def("end_waits_at_interrupts", &end_waits_at_interrupts);
  module.def("single_group", &single_process_group);
  module.def("use_page_heap", &use_page_heap);
}

}  // namespace tessera::python
