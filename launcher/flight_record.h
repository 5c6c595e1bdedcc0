#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera::tools {

/// A collective in the flight record of a rank. Times are microseconds of the Unix clock.
struct FlightEntry {
  std::string group;    ///< process group
  std::string channel;  ///< its collectives are numbered from 0 in each channel
  int64_t number = 0;
  std::string collective;  ///< "all_gather"
  std::string subject;     ///< the unit, say
  std::string text;        ///< all that ranks must agree on
  int64_t bytes = 0;
  int64_t step = 0;
  std::string phase;
  int64_t issued_us = 0;
  std::optional<int64_t> completed_us;
};

/// The last collectives of a rank, as it wrote them on a timeout, an error or SIGUSR1.
struct RankFlight {
  int rank = 0;
  int size = 1;  ///< number of ranks
  std::string host;
  int64_t pid = 0;
  std::string reason;  ///< text of the error, or `kAskedFor`
  int culprit = -1;    ///< the rank that the error blames
  int64_t step = 0;
  std::string phase;
  int64_t written_us = 0;
  std::vector<FlightEntry> entries;
};

/// The reason of a record that a rank wrote because of SIGUSR1.
constexpr const char* kAskedFor = "SIGUSR1";

/// Reads a flight record. Throws `std::runtime_error` with the reason if it is none.
RankFlight parse_flight(const std::string& text);
RankFlight flight_from_json(const nlohmann::json& json);
nlohmann::json to_json(const RankFlight& flight);

/// Flight records of some ranks, in the order of ranks.
struct MergedFlight {
  std::vector<RankFlight> ranks;
  std::vector<std::string> unreadable;  ///< a line for each file that could not be read

  void add(RankFlight flight);
  bool empty() const { return ranks.empty() && unreadable.empty(); }
};

/// Moves all records of `from` to `to`.
void move_flight(MergedFlight& from, MergedFlight& to);

/// Returns the rank that most of the other ranks blame in their records: at least two of them, or
/// the only other one. -1: they blame none, or do not agree.
int blamed_rank(const MergedFlight& flight);

}  // namespace tessera::tools
