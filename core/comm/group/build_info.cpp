#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/comm/build_info.h>
#include <tessera/version.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/version.h>

#include "comm/group/registered_backends.h"

namespace tessera {
namespace {

#ifdef __clang__
constexpr auto kCompiler = "Clang " __clang_version__;
#else
constexpr auto kCompiler = "GCC " __VERSION__;
#endif

// LibTorch packs its version into the upper half: 8 bits each of major, minor and patch.
std::string loaded_torch() {
  const uint64_t packed = aoti_torch_abi_version();
  return fmt::format("{}.{}.{}", packed >> 56 & 255, packed >> 48 & 255, packed >> 40 & 255);
}

std::vector<std::string> absent_backends() {
  const std::string name = TESSERA_ABSENT_BACKEND;
  if (name.empty()) return {};
  return {name};
}

std::vector<std::string> usable_backends() {
  std::vector<std::string> names = backend_names();
  // An absent one is registered all the same, with a factory that says why.
  for (const std::string& name : absent_backends()) std::erase(names, name);
  names.insert(names.begin(), {"arena", "gloo"});
  return names;
}

}  // namespace

BuildInfo build_info() {
  return {.version = fmt::format("{}.{}.{}", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR,
                                 TESSERA_VERSION_PATCH),
          .torch_headers = fmt::format("{}.{}.{}", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR,
                                       TORCH_VERSION_PATCH),
          .torch_loaded = loaded_torch(),
          .compiler = kCompiler,
          .build_type = TESSERA_BUILD_TYPE,
          .backends = usable_backends(),
          .absent_backends = absent_backends()};
}

std::string describe(const BuildInfo& info) {
  const bool fits = info.torch_loaded == info.torch_headers;
  return fmt::format(
      "tessera {}\n"
      "LibTorch {} is loaded{}\n"
      "built with LibTorch {} by {}, build type {}\n"
      "backends: {}{}",
      info.version, info.torch_loaded,
      fits ? "" : ", which is another than Tessera was built with: build it anew",
      info.torch_headers, info.compiler, info.build_type, fmt::join(info.backends, ", "),
      info.absent_backends.empty()
          ? ""
          : fmt::format("; not built in: {}", fmt::join(info.absent_backends, ", ")));
}

}  // namespace tessera
