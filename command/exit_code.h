#pragma once

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <string>

namespace tessera::tools {

/// Returns the status of `run()`; if it throws, prints the error in the name of `who` and returns
/// `failure`. If the message can't be written, the status still tells.
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
