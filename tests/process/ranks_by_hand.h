#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "launched.h"
#include "launcher/reserved_port.h"

namespace tessera {

/// Loading LibTorch takes its time on a busy machine. Far below the timeout that is used without
/// TESSERA_TIMEOUT, ten minutes, for which no rank may wait.
constexpr std::chrono::seconds kLimit{100};

using Environment = std::map<std::string, std::string>;

/// Removes variables that a launcher around the tests may have set; then sets `variables`.
inline Environment clean_environment(const Environment& variables = {}) {
  Environment environment;
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "TESSERA_RUN", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID",
        "SLURM_NTASKS", "TESSERA_JOB", "TESSERA_SECRET", "TESSERA_REPORT_AFTER"}) {
    environment[name] = "";
  }
  environment["OMP_NUM_THREADS"] = "1";
  for (const auto& [name, value] : variables) environment[name] = value;
  return environment;
}

/// Ranks of this machine without a launcher, whose environments may differ.
class RanksByHand {
 public:
  explicit RanksByHand(int size, Environment all = {}) : size_(size), all_(std::move(all)) {
    all_.emplace("TESSERA_TIMEOUT", "3");
  }

  ProgramRun& start(int rank, const Environment& own = {}, const Command& arguments = {},
                    bool on_terminal = false) {
    Environment environment = clean_environment(environment_of(rank, size_, port_.number()));
    environment["TESSERA_TRANSPORT"] = "";
    for (const Environment* more : {&std::as_const(all_), &own})
      for (const auto& [name, value] : *more) environment[name] = value;
    runs_.push_back(std::make_unique<ProgramRun>(
        with({WORLD_PROBE}, arguments),
        ProgramRun::Options{
            .environment = std::move(environment), .on_terminal = on_terminal, .limit = kLimit}));
    return *runs_.back();
  }

  std::vector<ProgramEnd> wait() {
    std::vector<ProgramEnd> ends;
    for (const auto& run : runs_) ends.push_back(run->wait());
    return ends;
  }

  int port() const { return port_.number(); }

 private:
  const int size_;
  Environment all_;
  const tools::ReservedPort port_{0};
  std::vector<std::unique_ptr<ProgramRun>> runs_;
};

inline void expect_error(const ProgramEnd& end, const std::vector<std::string>& parts) {
  EXPECT_EQ(end.status, 1) << end.out << end.err;
  for (const std::string& part : parts)
    EXPECT_TRUE(contains(end.err, part)) << part << " is missing in " << end.err;
}

}  // namespace tessera
