// The facts that `tessera --version` and reports of errors tell.

#include <gtest/gtest.h>
#include <tessera/comm/build_info.h>
#include <tessera/comm/process_group.h>
#include <tessera/version.h>
#include <torch/version.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "support/error_of.h"

namespace tessera::build_info_test {

bool has(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::count(names, name) == 1;
}

TEST(BuildInfo, NamesTheVersionsOfTesseraAndOfLibTorch) {
  const BuildInfo info = build_info();
  EXPECT_EQ(info.version, std::to_string(TESSERA_VERSION_MAJOR) + "." +
                              std::to_string(TESSERA_VERSION_MINOR) + "." +
                              std::to_string(TESSERA_VERSION_PATCH));
  EXPECT_EQ(info.torch_headers, TORCH_VERSION);
  EXPECT_EQ(info.torch_loaded, TORCH_VERSION);
}

TEST(BuildInfo, ListsTheBackendsThatCanBeNamed) {
  EXPECT_TRUE(has(build_info().backends, "gloo"));
  EXPECT_TRUE(has(build_info().backends, "arena"));
  EXPECT_FALSE(has(build_info().backends, "of_build_info_test"));
  register_backend("of_build_info_test", c10::DeviceType::PrivateUse1,
                   [](const auto&...) { return c10::intrusive_ptr<c10d::Backend>(); });
  EXPECT_TRUE(has(build_info().backends, "of_build_info_test"));
}

TEST(BuildInfo, SaysThatAnotherLibTorchIsLoaded) {
  BuildInfo info = build_info();
  EXPECT_EQ(describe(info).find("build it anew"), std::string::npos) << describe(info);
  info.torch_loaded = "2.99.1";
  testing::expect_contains(describe(info), {"LibTorch 2.99.1 is loaded, which is another"});
}

TEST(BuildInfo, SaysWhichBackendsAreNotBuiltIn) {
  BuildInfo info = build_info();
  EXPECT_NE(has(info.backends, "nccl"), has(info.absent_backends, "nccl"));
  const auto last_line = [&] { return describe(info).substr(describe(info).rfind('\n')); };
  info.backends = {"arena", "gloo"};
  info.absent_backends = {"nccl"};
  EXPECT_EQ(last_line(), "\nbackends: arena, gloo; not built in: nccl");
  info.backends.emplace_back("nccl");
  info.absent_backends.clear();
  EXPECT_EQ(last_line(), "\nbackends: arena, gloo, nccl");
}

}  // namespace tessera::build_info_test
