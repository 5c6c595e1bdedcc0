#include <tessera/comm/world.h>

#include <csignal>

#include "binding.h"

namespace tessera::python {
namespace {

void (*handler_of_python)(int) = nullptr;  // which only takes note of the signal

void on_signal(int number) {
  interrupt_waits();
  handler_of_python(number);
}

}  // namespace

void end_waits_at_interrupts() {
  struct sigaction action {};
  ::sigaction(SIGINT, nullptr, &action);
  // The present one may be `on_signal`, or one that calls it.
  if (handler_of_python && action.sa_handler != handler_of_python) return;
  handler_of_python = action.sa_handler;
  action.sa_handler = &on_signal;
  on_interruption([] {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  });
  ::sigaction(SIGINT, &action, nullptr);
}

// Also catches exceptions of the destructor of `warnings_`: it gives them to Python.
Waiting::~Waiting() noexcept(false) try {
  unlocked_.reset();
  if (std::uncaught_exceptions() > exceptions_) warnings_.set_in_exception();
} catch (python_error& error) {
  error.restore();
  throw py::error_already_set();
}

}  // namespace tessera::python
