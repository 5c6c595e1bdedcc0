#pragma once

#include <tessera/engine/optimizer_state_dict.h>

#include "binding.h"

namespace tessera::python {

/// Returns the state as `torch.optim.Optimizer.state_dict()` does. `optimizer`: Python's, for the
/// options that no file holds.
py::dict to_python(const OptimizerStateDict& dict, const py::object& optimizer);

/// Returns the state of such a dict. Throws `c10::NotImplementedError` for values that are neither
/// tensors, numbers nor text.
OptimizerStateDict to_state_dict(const py::dict& dict);

/// Between single values; a dtype is its number. The first returns nothing for values that no file
/// can hold, such as functions; the second keeps the type of `before`, the value to be replaced.
/// That may be null.
std::optional<c10::IValue> to_value(const py::handle& value);
py::object to_python(const c10::IValue& value, const py::handle& before);

/// Returns the items of a dict with names, but for `params`. Options that no file can hold are left
/// out; for such `is_state`, throws `c10::NotImplementedError`.
OptimizerStateDict::Values to_values(const py::dict& dict, bool is_state);

}  // namespace tessera::python
