#pragma once

#include <gtest/gtest.h>
#include <tessera/engine/shard_plan.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>

namespace tessera::testing {

/// A directory for one test.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string name =
        std::string(test->test_suite_name()) + "." + test->name() + "." + std::to_string(getpid());
    std::replace(name.begin(), name.end(), '/', '_');
    path_ = std::filesystem::temp_directory_path() / ("tessera_" + name);
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }
  /// The `offload_directory` of a plan with this `Offload`.
  std::string path_for(Offload offload) const {
    return offload == Offload::kDirectory ? path_.string() : "";
  }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace tessera::testing
