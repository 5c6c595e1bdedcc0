#pragma once

#include <tessera/export.h>

#include <string>
#include <vector>

namespace tessera {

/// Which Tessera this is: what it was built with, and the LibTorch that it runs with.
struct BuildInfo {
  std::string version;        ///< Tessera's: "0.1.0"
  std::string torch_headers;  ///< the LibTorch that Tessera was built with: "2.13.0"
  /// The LibTorch that this process has loaded: "2.13.0". Programs are undefined where it differs
  /// from `torch_headers`, since classes then have another layout in memory.
  std::string torch_loaded;
  std::string compiler;    ///< "GCC 12.2.0", "Clang 16.0.6"
  std::string build_type;  ///< CMake's: "Release"; "none" where it was empty; sanitizers follow
  /// `arena` and `gloo` always, then the names that `WorldOptions::backend` takes for devices:
  /// `nccl` if it was built in, and those of `register_backend()`.
  std::vector<std::string> backends;
  std::vector<std::string> absent_backends;  ///< `nccl` if it was not built in
};

/// Returns the facts of this process. Local: any rank may call it, at any time, in any thread.
TESSERA_API BuildInfo build_info();

/// Lines of text for people, such as a report of an error; `tessera --version` prints them. Each
/// ends with a line break, except for the last.
TESSERA_API std::string describe(const BuildInfo& info);

}  // namespace tessera
