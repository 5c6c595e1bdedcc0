#include "binding.h"

namespace tessera::python {

// Also catches exceptions of the destructor of `warnings_`: it gives them to Python.
Waiting::~Waiting() noexcept(false) try {
  unlocked_.reset();
  if (std::uncaught_exceptions() > exceptions_) warnings_.set_in_exception();
} catch (python_error& error) {
  error.restore();
  throw py::error_already_set();
}

}  // namespace tessera::python
