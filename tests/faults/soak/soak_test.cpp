// A long run neither gathers memory nor descriptors nor threads.
#include <gtest/gtest.h>

#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "launcher/reserved_port.h"
#include "process/launched.h"

namespace tessera::soak_test {

struct Sample {
  long step = 0, resident_kib = 0, descriptors = 0, threads = 0;
};

std::vector<Sample> samples_in(const std::string& out) {
  std::vector<Sample> samples;
  for (size_t begin = 0, end; (end = out.find('\n', begin)) != std::string::npos; begin = end + 1) {
    Sample s;
    if (std::sscanf(out.c_str() + begin, "step %ld resident %ld descriptors %ld threads %ld",
                    &s.step, &s.resident_kib, &s.descriptors, &s.threads) == 4)
      samples.push_back(s);
  }
  return samples;
}

void expect_flat(const std::vector<Sample>& samples) {
  ASSERT_FALSE(samples.empty());
  const Sample& warm = samples.front();
  for (const Sample& s : samples) {
    EXPECT_EQ(s.descriptors, warm.descriptors) << "step " << s.step;
    EXPECT_EQ(s.threads, warm.threads) << "step " << s.step;
    EXPECT_LE(s.resident_kib, warm.resident_kib * 1.02 + 4096) << "step " << s.step;
  }
}

// Two ranks; the first report is that of warm ranks.
class SoakOver {
 public:
  SoakOver(const std::string& transport, int steps, int report_every)
      : steps_(steps), report_every_(report_every) {
    for (int rank = 0; rank < 2; ++rank) {
      auto environment = environment_of(rank, 2, port_.number());
      environment["TESSERA_TRANSPORT"] = transport;
      runs_.push_back(std::make_unique<ProgramRun>(
          Command{SOAK_WORKER, std::to_string(steps), std::to_string(report_every),
                  directory_.path()},
          ProgramRun::Options{.environment = environment, .limit = std::chrono::seconds(1500)}));
    }
  }

  void expect_flat_on_all() {
    for (int step = report_every_; step <= steps_; step += report_every_) {
      const std::string text = "step " + std::to_string(step) + " ";
      for (int rank = 0; rank < 2 && runs_[rank]->wait_for_output(text); ++rank) print(rank, text);
    }
    for (const auto& run : runs_) {
      const auto end = run->wait();
      EXPECT_EQ(end.status, 0) << end.err;
      const auto samples = samples_in(end.out);
      EXPECT_EQ(samples.size(), static_cast<size_t>(steps_ / report_every_)) << end.out;
      expect_flat(samples);
    }
  }

 private:
  void print(int rank, const std::string& text) const {
    const std::string& out = runs_[rank]->output();
    const size_t begin = out.find(text);
    std::cout << "rank " << rank << ": " << out.substr(begin, out.find('\n', begin) - begin)
              << std::endl;
  }

  int steps_, report_every_;
  tools::ReservedPort port_{0};
  const TemporaryDirectory directory_;
  std::vector<std::unique_ptr<ProgramRun>> runs_;
};

class Soak : public ::testing::TestWithParam<std::string> {};
class SoakNightly : public ::testing::TestWithParam<std::string> {};

// Long enough for an evaluation, an exception and, at the end, no checkpoint.
TEST_P(Soak, StaysFlatFor300Steps) { SoakOver(GetParam(), 300, 100).expect_flat_on_all(); }

TEST_P(SoakNightly, StaysFlatFor10000Steps) {
  SoakOver(GetParam(), 10'000, 1'000).expect_flat_on_all();
}

const auto kTransports = ::testing::Values("arena", "gloo");
std::string name_of(const ::testing::TestParamInfo<std::string>& info) { return info.param; }
INSTANTIATE_TEST_SUITE_P(Over, Soak, kTransports, name_of);
INSTANTIATE_TEST_SUITE_P(Over, SoakNightly, kTransports, name_of);

}  // namespace tessera::soak_test
