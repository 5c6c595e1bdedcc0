#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/group/flight_record.h"

namespace tessera {

/// The file in which a rank leaves its last collectives, for `tessera run` and for people.
struct FlightFile {
  int rank = 0;
  int size = 1;
  std::string reason;  ///< text of an error, or "SIGUSR1"
  int culprit = -1;    ///< the rank that caused it, if known
  Progress::State progress;
  int64_t dropped_messages = 0;  ///< that came to the watch, and that no rank had sent
  std::vector<std::pair<std::string, FlightEntry>> records;  ///< with the process group's label
};

/// Writes `FOLDER/rank_N.json`, through a temporary name. Throws `std::system_error` or
/// `std::ios_base::failure`.
void write_flight_file(const std::string& folder, const FlightFile& file);

/// Returns TESSERA_FLIGHT_DIR (`tessera run` sets it); empty without it.
std::string flight_folder();

/// Makes SIGUSR1, unless the program handles it, count in `flight_requests()` from now on.
void count_flight_requests();
int flight_requests();

}  // namespace tessera
