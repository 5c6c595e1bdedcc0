#include "binding.h"

namespace tessera::python {

Waiting::~Waiting() noexcept(false) {
  unlocked_.reset();
  if (std::uncaught_exceptions() > exceptions_) warnings_->set_in_exception();
  try {
    warnings_.reset();  // gives them to Python
  } catch (python_error& error) {
    error.restore();
    throw py::error_already_set();
  }
}

}  // namespace tessera::python
