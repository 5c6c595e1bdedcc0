#pragma once

#include <map>
#include <string>

#include "program_run.h"

namespace tessera {

/// `tessera run OPTIONS rank_probe FLAGS`, with short periods of grace.
inline Command launched(const Command& options, const Command& flags) {
  Command command = {TESSERA_CLI, "run", "--grace", "0.3"};
  command.insert(command.end(), options.begin(), options.end());
  command.push_back(RANK_PROBE);
  command.insert(command.end(), flags.begin(), flags.end());
  return command;
}

/// A launcher's variables for a rank on this machine, for tests that start ranks themselves.
inline std::map<std::string, std::string> environment_of(int rank, int ranks, int port) {
  std::map<std::string, std::string> environment = {{"OMP_NUM_THREADS", "1"},
                                                    {"TESSERA_TIMEOUT", "30"}};
  for (const char* name : {"TESSERA_RUN", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"})
    environment[name] = "";
  environment["RANK"] = std::to_string(rank);
  environment["LOCAL_RANK"] = std::to_string(rank);
  environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = std::to_string(ranks);
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(port);
  return environment;
}

/// The last line of `text`.
inline std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tessera
