#pragma once

// With the casters of LibTorch's tensors, devices and dtypes.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <tessera/engine/fully_shard.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace tessera::python {

namespace py = pybind11;

/// Lets other threads of Python run during a call that may wait, and turns the warnings of the
/// engine into Python's.
class Waiting {
 public:
  Waiting() : exceptions_(std::uncaught_exceptions()), unlocked_(std::in_place) {}
  /// Throws `py::error_already_set` if a warning is an error.
  ~Waiting() noexcept(false);
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  const int exceptions_;  // on their way when the call began
  torch::PyWarningHandler warnings_;
  std::optional<py::gil_scoped_release> unlocked_;
};
using Waits = py::call_guard<Waiting>;

/// Returns the owner of an object that waits, in its destructor, for threads: they may be releasing
/// tensors of Python, for which they need the interpreter's lock.
template <class T>
std::shared_ptr<T> destroyed_unlocked(T* object) {
  return {object, [](T* it) {
            const py::gil_scoped_release unlocked;
            delete it;
          }};
}

/// Lets SIGINT end a wait of the main thread for other ranks by the exception of Python's handler.
void end_waits_at_interrupts();

/// By the names of the fields.
std::map<std::string, int64_t> to_dict(const ShardMemory& memory);

// Each adds its classes and functions to the module `tessera._C`.
void bind_world(py::module_& module);
void bind_model(py::module_& module);
void bind_deferred_init(py::module_& module);
void bind_plan_report(py::module_& module);
void bind_optimizer(py::module_& module);
void bind_cpu_adam(py::module_& module);
void bind_dist_tensor(py::module_& module);
void bind_parallel(py::module_& module);
void bind_pipeline(py::module_& module);
void bind_dist_optimizer(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_exchange(py::module_& module);
void bind_fairscale(py::module_& module);
void bind_paddle(py::module_& module);
void bind_colossalai(py::module_& module);

}  // namespace tessera::python
