#pragma once

#include <tessera/comm/world.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace tessera::micro {

/// The options of `micro_benchmarks`, beside google/benchmark's.
struct Options {
  int64_t elements = 32'000'000;  ///< of the parameter of `optim`
  int64_t megabytes = 512;        ///< of `ckpt`, stored by all ranks together
  std::string directory = ".";    ///< of `ckpt`, on the disk to measure
};

using Numbers = std::map<std::string, double>;
/// One round: measures, in turns, all that is compared.
using Round = std::function<Numbers()>;

/// Adds a benchmark whose repetitions are rounds: google/benchmark prints the median and other
/// statistics of each number over them. `make` makes what they need, before an untimed first round;
/// it is destroyed before the next benchmark begins.
void add_rounds(const std::string& name, std::function<Round()> make);

/// Returns the world of this process. The first call makes it.
const World& world();

/// Returns the seconds that `run` takes on the slowest rank. All ranks begin together. Collective.
double slowest_seconds_of(ProcessGroup& ranks, const std::function<void()>& run);

// Each adds the benchmarks of its source.
void add_ckpt(const Options& options);
void add_comm();
void add_dispatch();
void add_optim(const Options& options);
void add_ranks();

}  // namespace tessera::micro
