#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/group/collective_name.h"
#include "comm/watch/watch.h"

namespace tessera {

// One process group's collectives on this rank.
struct Watch::GroupState {
  GroupState(std::string label, std::vector<int> ranks, bool is_inner)
      : label(std::move(label)), ranks(std::move(ranks)), is_inner(is_inner) {}

  const std::string label;
  const std::vector<int> ranks;  // of the world
  const bool is_inner;
  FlightRecord record{256};
  std::array<std::atomic<int64_t>, std::tuple_size_v<IssuedCounts>> issued{};
};

struct Watch::Wait {
  CollectiveId id;
  std::shared_ptr<GroupState> group;
  CollectiveName name;
  Clock::time_point since;
  Clock::time_point next_report;
  pid_t thread = 0;
  bool is_aborted = false;
  std::mutex calling;  // of `abort`
  CollectiveWatch::Abort abort;
};

// Another rank, as last heard.
struct Watch::Peer {
  std::optional<Clock::time_point> asked;  // first question since the last answer
  std::optional<Clock::time_point> answered;
  std::optional<Clock::time_point> refused;  // first time since the last answer
  Answer answer;
  std::optional<Failure> failure;
  std::optional<Farewell> farewell;
  Clock::time_point told;    // when either came
  bool has_receipt = false;  // of this rank's farewell
};

}  // namespace tessera
