#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launched.h"
#include "launcher/reserved_port.h"

namespace tessera {

/// The ranks of a job without a launcher, which would end the others when one dies.
class StartedRanks {
 public:
  /// `program`: with its arguments. `before`: words to put before it.
  StartedRanks(int ranks, const Command& program,
               const std::map<std::string, std::string>& extra = {}, const Command& before = {}) {
    for (int rank = 0; rank < ranks; ++rank) {
      Command command = before;
      command.insert(command.end(), program.begin(), program.end());
      auto environment = environment_of(rank, ranks, port_.number());
      environment.insert(extra.begin(), extra.end());
      runs_.push_back(std::make_unique<ProgramRun>(
          command, ProgramRun::Options{.environment = std::move(environment)}));
    }
  }

  ProgramRun& rank(int rank) { return *runs_[rank]; }

  std::vector<ProgramEnd> wait() {
    std::vector<ProgramEnd> ends;
    for (const auto& run : runs_) ends.push_back(run->wait());
    return ends;
  }

 private:
  tools::ReservedPort port_{0};
  std::vector<std::unique_ptr<ProgramRun>> runs_;
};

}  // namespace tessera
