// Files that are damaged or crafted to do harm: none makes the library crash, take over 10 seconds
// or 1 GiB, or give an error that does not name a file. See fuzz_probe.cpp for the inputs.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>

#include "launched.h"

namespace tessera::fuzz_test {

namespace fs = std::filesystem;

constexpr int kMostFailures = 5;

/// Where the inputs are written: in memory, if the system has such a place.
std::string fast_directory(const std::string& name) {
  const fs::path place = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : fs::temp_directory_path();
  return place / ("tessera_fuzz_" + name + "." + std::to_string(::getpid()));
}

/// Keeps the input at which the probe ended. Returns its number.
long save_failure(const std::string& format, const std::string& directory, const ProgramEnd& end) {
  const long number = std::stol(read_file(directory + "/number"));
  const fs::path kept = fs::absolute("fuzz-failures") / (format + "-" + std::to_string(number));
  fs::remove_all(kept);
  fs::create_directories(kept);
  fs::copy(directory + "/input", kept, fs::copy_options::recursive);
  const bool is_late = end.status == 128 + SIGALRM || end.status == 128 + SIGPROF;
  const std::string how = is_late ? "took over 10 seconds"
                          : end.status > 128
                              ? "crashed by signal " + std::to_string(end.status - 128)
                              : "ended with status " + std::to_string(end.status);
  ADD_FAILURE() << format << ": the reader of input " << number << " " << how << "; it is kept in "
                << kept << "\n"
                << end.err.substr(0, 2000);
  return number;
}

void expect_no_harm(const std::string& format, long inputs) {
  const std::string directory = fast_directory(format);
  long first = 0, done = 0, accepted = 0, refused = 0;
  for (int failures = 0; first < inputs && failures < kMostFailures; ++failures) {
    const auto end = run_program(
        {FUZZ_PROBE, format, std::to_string(first), std::to_string(inputs), directory},
        {.environment = {{"OMP_NUM_THREADS", "1"}}, .limit = std::chrono::seconds(3000)});
    if (end.status != 0) {
      first = save_failure(format, directory, end) + 1;
      continue;
    }
    const auto number = [&](const char* key) { return numbers_after(end.out, key).at(0); };
    done = first + number("inputs");
    accepted = number("accepted");
    refused = number("refused");
    break;
  }
  fs::remove_all(directory);
  std::cout << format << ": " << done << " inputs; of reads, " << accepted << " accepted and "
            << refused << " refused" << std::endl;
  EXPECT_EQ(done, inputs);
  // The inputs are neither all broken nor all whole.
  EXPECT_GT(accepted, inputs / 50);
  EXPECT_GT(refused, inputs / 10);
}

class Fuzz : public ::testing::TestWithParam<const char*> {};
class FuzzNightly : public ::testing::TestWithParam<const char*> {};

TEST_P(Fuzz, NoneOf200InputsDoesHarm) { expect_no_harm(GetParam(), 200); }
TEST_P(FuzzNightly, NoneOf10000InputsDoesHarm) { expect_no_harm(GetParam(), 10'000); }

constexpr const char* kFormats[] = {"index", "safetensors", "model", "torch", "sizes"};
std::string name_of(const ::testing::TestParamInfo<const char*>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(Of, Fuzz, ::testing::ValuesIn(kFormats), name_of);
INSTANTIATE_TEST_SUITE_P(Of, FuzzNightly, ::testing::ValuesIn(kFormats), name_of);

}  // namespace tessera::fuzz_test
