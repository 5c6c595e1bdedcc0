#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launcher/flight_record.h"

namespace tessera::tools {

/// The folder to which ranks write their flight records: rank_0.json, rank_1.json and so on.
///
/// It is `log_dir`/flight, or a temporary folder, which is removed with the object unless a trace
/// was written to it. If there is none, `path()` is empty, and ranks write nothing.
class FlightFolder {
 public:
  /// `trace`: the name of the traces, as several nodes may have one folder.
  FlightFolder(std::string log_dir, std::string trace)
      : log_dir_(std::move(log_dir)), trace_(std::move(trace)) {}
  ~FlightFolder();
  FlightFolder(const FlightFolder&) = delete;
  FlightFolder& operator=(const FlightFolder&) = delete;

  /// Makes the folder, if that has not been done. A launcher without ranks of its own needs none
  /// before the first trace.
  void make();

  const std::string& path() const { return path_; }
  /// Returns the reason for which there is no folder; empty if there is one.
  const std::string& problem() const { return problem_; }

  /// Removes records of an earlier start.
  void remove_records(const std::vector<int>& ranks);

  /// Returns those ranks whose record is newer than at the last `read_asked()`.
  std::vector<int> new_records(const std::vector<int>& ranks) const;

  /// Reads the new records of `ranks`, which they wrote because they were asked to.
  MergedFlight read_asked(const std::vector<int>& ranks);
  /// Reads the records of `ranks` after they failed, without those that were asked for and read
  /// before.
  MergedFlight read_failed(const std::vector<int>& ranks);

  /// Writes the trace of one start, 0 the first, and returns its path. Throws `std::runtime_error`.
  std::string write_trace(const MergedFlight& flight, int attempt);

 private:
  using Version = std::tuple<ino_t, int64_t, int64_t, off_t>;  // a renamed file has another inode

  std::string record_path(int rank) const;
  void read_record(int rank, MergedFlight& flight) const;
  Version version_of(int rank) const;

  std::string log_dir_;  ///< empty: the folder is temporary
  std::string trace_;
  std::string path_;
  std::string problem_;
  bool is_kept_ = false;
  std::map<int, Version> read_;
};

/// Waits, inside an event loop, until ranks that got SIGUSR1 have written their records.
class FlightWatch {
 public:
  using Clock = std::chrono::steady_clock;

  void begin();
  bool is_on() const { return is_on_; }
  /// Returns the time of the next look at the folder.
  Clock::time_point next_look() const;
  /// Returns true if the wait is over: all `ranks` have written, or the time is up. To be called in
  /// each round.
  bool ends(const FlightFolder& folder, const std::vector<int>& ranks);

 private:
  bool is_on_ = false;
  Clock::time_point give_up_;
  Clock::time_point look_;
};

}  // namespace tessera::tools
