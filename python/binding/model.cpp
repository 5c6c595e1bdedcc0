// Sharded models.
#include <tessera/engine/fully_shard.h>
#include <tessera/trace/memory_tracer.h>

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "module_tree.h"
#include "plan.h"

namespace tessera::python {
namespace {

// Makes a guard of a module a context manager.
template <class Guard, Guard (ShardedModule::*kEnter)()>
class Scope {
 public:
  explicit Scope(ShardedModule module) : module_(std::move(module)) {}
  void enter() {
    TORCH_CHECK(!guard_, "[tessera] a context manager can't be entered again before it was left");
    guard_.reset(new Guard((module_.*kEnter)()));
  }
  void exit(const py::args& /*exception*/) {
    const Waiting waiting;
    guard_.reset();
  }

 private:
  ShardedModule module_;
  std::unique_ptr<Guard> guard_;
};

using NoSyncScope = Scope<ShardedModule::NoSync, &ShardedModule::no_sync>;
using KeepUnshardedScope = Scope<ShardedModule::KeepUnsharded, &ShardedModule::keep_unsharded>;

template <class ScopeClass>
void bind_scope(py::module_& module, const char* name) {
  py::class_<ScopeClass>(module, name)
      .def("__enter__", &ScopeClass::enter, Waits())
      .def("__exit__", &ScopeClass::exit);
}

ShardedModule shard(const NamedTensors& parameters, const NamedTensors& buffers,
                    const py::dict& arguments, const std::set<std::string>& not_saved) {
  const ShardPlan plan = plan_of(arguments);
  const Waiting waiting;
  ShardedModule model = fully_shard(named(parameters), named(buffers), plan);
  if (!not_saved.empty()) model.leave_out_of_checkpoints(not_saved);
  return model;
}

double clip_model(ShardedModule& module, double max_norm, double norm_type, double epsilon,
                  std::vector<std::string> exclude) {
  return module.clip_grad_norm_(
      max_norm, {.norm_type = norm_type, .epsilon = epsilon, .exclude = std::move(exclude)});
}

}  // namespace

std::map<std::string, int64_t> to_dict(const ShardMemory& memory) {
  return {{"parameters", memory.parameters},
          {"gradients", memory.gradients},
          {"optimizer_state", memory.optimizer_state},
          {"master_weights", memory.master_weights},
          {"offloaded", memory.offloaded},
          {"peak_unsharded", memory.peak_unsharded},
          {"peak_in_flight", memory.peak_in_flight}};
}

void bind_model(py::module_& module) {
  bind_scope<NoSyncScope>(module, "NoSync");
  bind_scope<KeepUnshardedScope>(module, "KeepUnsharded");

  py::class_<ShardedModule>(module, "Model")
      .def("no_sync", [](const ShardedModule& model) { return NoSyncScope(model); })
      .def("keep_unsharded", [](const ShardedModule& model) { return KeepUnshardedScope(model); })
      .def("set_resident_bytes", &ShardedModule::set_resident_bytes)
      .def("begin_forward", &ShardedModule::begin_forward, Waits())
      .def("end_forward", &ShardedModule::end_forward)
      .def("sync_buffers", &ShardedModule::sync_buffers, py::arg("blocking") = true, Waits())
      .def("reduce", &ShardedModule::reduce, Waits())
      // An undefined tensor is None.
      .def("full_grad", py::overload_cast<const at::Tensor&>(&ShardedModule::full_grad), Waits())
      .def("local_grad", py::overload_cast<const at::Tensor&>(&ShardedModule::local_grad), Waits())
      .def("has_grad", &ShardedModule::has_grad, Waits())
      .def("has_reduced_grad", &ShardedModule::has_reduced_grad, Waits())
      .def("full_value", &ShardedModule::full_value, Waits())
      .def("gather", &ShardedModule::gather, Waits())
      .def("cut", &ShardedModule::cut, Waits())
      .def("grad_dtype", &ShardedModule::grad_dtype)
      .def("set_full_grad", &ShardedModule::set_full_grad, Waits())
      .def("any_rank", &ShardedModule::any_rank, Waits())
      .def("zero_grad", py::overload_cast<bool>(&ShardedModule::zero_grad),
           py::arg("set_to_none") = true, Waits())
      .def("zero_grad", py::overload_cast<const at::Tensor&, bool>(&ShardedModule::zero_grad),
           py::arg("parameter"), py::arg("set_to_none") = true, Waits())
      .def("clip_grad_norm_", &clip_model, Waits())
      .def(
          "full_state",
          [](ShardedModule& model) {
            NamedTensors pairs;
            for (auto& item : model.full_state()) pairs.emplace_back(item.name, item.tensor);
            return pairs;
          },
          Waits())
      .def(
          "load_full_state",
          [](ShardedModule& model, const NamedTensors& state, bool strict) {
            model.load_full_state(named(state), strict);
          },
          Waits())
      .def("unwrap", &ShardedModule::unwrap, Waits())
      .def("memory", [](const ShardedModule& model) { return to_dict(model.memory()); })
      .def("describe", &ShardedModule::describe);

  module.def("fully_shard", &shard);
  module.def("is_sharded", &is_sharded, "True for a parameter of a sharded model.");
  module.def("keeps_grad_elsewhere", &keeps_grad_elsewhere,
             "True if PyTorch's own .grad of a parameter can't be read now.");

  py::class_<MemoryTracer>(module, "MemoryTracer")
      .def(py::init([](const ShardedModule& model, bool pss, int64_t steps) {
             return MemoryTracer(model, {.pss = pss, .steps = steps});
           }),
           py::arg("model"), py::arg("pss"), py::arg("steps"))
      .def("start_step", &MemoryTracer::start_step)
      .def("peak_model_bytes", &MemoryTracer::peak_model_bytes)
      .def("peak_other_bytes", &MemoryTracer::peak_other_bytes)
      .def("samples", [](const MemoryTracer& tracer) { return tracer.samples().size(); })
      .def("write_chrome_trace", &MemoryTracer::write_chrome_trace, Waits())
      .def("write_merged_chrome_trace", &MemoryTracer::write_merged_chrome_trace, Waits())
      .def("write_svg", &MemoryTracer::write_svg, Waits())
      .def("dump_memory_stats", &MemoryTracer::dump_memory_stats, Waits());
}

}  // namespace tessera::python
