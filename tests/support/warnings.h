#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <string>
#include <vector>

namespace tessera::testing {

/// The warnings that LibTorch gives on this thread while `f` runs.
inline std::vector<std::string> warnings_of(const std::function<void()>& f) {
  struct Warnings final : c10::WarningHandler {
    void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
    std::vector<std::string> texts;
  } warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  f();
  return warnings.texts;
}

}  // namespace tessera::testing
