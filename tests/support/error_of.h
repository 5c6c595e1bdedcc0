#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <string>

#include "support/expect_contains.h"

namespace tessera::testing {

/// Returns the message of the `Error` that `f` throws, without its backtrace, or "no error".
template <class Error = c10::ValueError>
std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace tessera::testing
