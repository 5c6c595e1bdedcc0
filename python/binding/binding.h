#pragma once

// With the casters of LibTorch's tensors, devices and dtypes.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <tessera/fully_shard.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <map>
#include <string>

namespace tessera::python {

namespace py = pybind11;

/// Lets other threads of Python run during a call that may wait.
using Waits = py::call_guard<py::gil_scoped_release>;

/// By the names of the fields.
std::map<std::string, int64_t> to_dict(const ShardMemory& memory);

// Each adds its classes and functions to the module `tessera._C`.
void bind_world(py::module_& module);
void bind_model(py::module_& module);
void bind_optimizer(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_fairscale(py::module_& module);
void bind_paddle(py::module_& module);

}  // namespace tessera::python
