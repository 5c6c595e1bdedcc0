#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launcher/terminal.h"

namespace tessera::tools {

/// What the launcher needs of the flight record of a rank that failed.
struct FlightReport {
  int rank = 0;
  int size = 1;      ///< number of ranks
  int culprit = -1;  ///< the rank that it blames; -1: none
  /// What it issued in the group of all ranks, by channel and number.
  std::map<std::pair<std::string, int64_t>, std::string> issued = {};
  bool was_asked_for = false;  ///< by SIGUSR1
  int64_t step = 0;            ///< in which it was
};

/// Returns the rank that issued another collective than all others, of three ranks or more; else
/// the one that most of the other ranks blame: at least two of them, or the only other one. -1:
/// they blame none, or do not agree.
int blamed_rank(const std::vector<FlightReport>& reports);

/// Returns the rank that is in another step than all others, of three ranks or more. -1: none is.
int rank_in_another_step(const std::vector<FlightReport>& reports);

/// The folder to which ranks write their flight records: rank_0.json, rank_1.json and so on.
///
/// It is `log_dir`/flight, or a folder of the user's state directory (XDG_STATE_HOME, else
/// ~/.local/state; a temporary folder if it can't be written). That is removed with the object
/// unless records in it were shown; then by the first job after a week. If there is none, `path()`
/// is empty, and ranks write nothing.
class FlightFolder {
 public:
  /// `trace`: the name of the traces, as several nodes may have one folder.
  FlightFolder(const std::string& log_dir, std::string trace);
  ~FlightFolder();
  FlightFolder(const FlightFolder&) = delete;
  FlightFolder& operator=(const FlightFolder&) = delete;

  const std::string& path() const { return path_; }
  /// Returns the reason for which there is no folder; empty if there is one.
  const std::string& problem() const { return problem_; }

  /// Removes records of an earlier start.
  void remove_records(const std::vector<int>& ranks);

  /// Returns those ranks whose record is newer than at the last `take_asked()`.
  std::vector<int> new_records(const std::vector<int>& ranks) const;
  /// Returns the same of records that were asked for, and takes them as old from now on.
  std::vector<int> take_asked(const std::vector<int>& ranks);
  /// Reads the records of `ranks` after they failed, without those that were asked for and taken
  /// before.
  std::vector<FlightReport> read_failed(const std::vector<int>& ranks) const;

  /// Writes a table of the records of `ranks` to the terminal and a trace to the folder, by
  /// `tessera-flight` (flight.py) beside this program. `attempt`: the start, 0 the
  /// first.
  void show(const std::vector<int>& ranks, int attempt, Terminal& terminal);

 private:
  using Version = std::tuple<ino_t, int64_t, int64_t, off_t>;  // a renamed file has another inode

  std::string record_path(int rank) const;
  Version version_of(int rank) const;

  std::string trace_;
  std::string path_;
  std::string problem_;
  bool is_kept_;
  std::map<int, Version> taken_;
};

}  // namespace tessera::tools
