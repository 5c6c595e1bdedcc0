#pragma once

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

namespace tessera::tools {

/// That of `run()`; if it throws, `failure`, after the error was printed in the name of `who`.
/// Where nobody takes the message, the status still tells.
template <class Run>
int exit_code_of(const std::string& who, Run run, int failure = 1) {
  try {
    return run();
  } catch (const c10::Error& error) {
    std::fputs(fmt::format("{}: {}\n", who, error.what_without_backtrace()).c_str(), stderr);
  } catch (const std::exception& error) {
    std::fputs(fmt::format("{}: {}\n", who, error.what()).c_str(), stderr);
  }
  return failure;
}

}  // namespace tessera::tools
