#include "launcher/flight_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace tessera::tools {
namespace {

using nlohmann::json;

/// A rank's records of one channel are bounded in the library; a file of another origin is not.
constexpr size_t kMostEntries = 20000;
constexpr size_t kLongestText = 2000;
constexpr int kMostRanks = 1 << 20;

std::string text_of(const json& object, const char* name) {
  std::string text = object.value(name, std::string());
  if (text.size() > kLongestText) text.resize(kLongestText);
  return text;
}

FlightEntry entry_from_json(const json& object) {
  FlightEntry entry;
  entry.group = text_of(object, "group");
  entry.channel = text_of(object, "channel");
  entry.number = object.at("number").get<int64_t>();
  entry.collective = text_of(object, "collective");
  entry.subject = text_of(object, "subject");
  entry.text = text_of(object, "text");
  entry.bytes = object.value("bytes", int64_t{0});
  entry.step = object.value("step", int64_t{0});
  entry.phase = text_of(object, "phase");
  entry.issued_us = object.at("issued_us").get<int64_t>();
  if (const auto completed = object.find("completed_us");
      completed != object.end() && !completed->is_null()) {
    entry.completed_us = completed->get<int64_t>();
  }
  return entry;
}

json entry_to_json(const FlightEntry& entry) {
  json object = {{"group", entry.group},     {"channel", entry.channel},
                 {"number", entry.number},   {"collective", entry.collective},
                 {"subject", entry.subject}, {"text", entry.text},
                 {"bytes", entry.bytes},     {"step", entry.step},
                 {"phase", entry.phase},     {"issued_us", entry.issued_us}};
  object["completed_us"] = entry.completed_us ? json(*entry.completed_us) : json(nullptr);
  return object;
}

}  // namespace

RankFlight parse_flight(const std::string& text) {
  const json object = json::parse(text, nullptr, false);
  if (object.is_discarded()) throw std::runtime_error("it is no JSON text");
  return flight_from_json(object);
}

RankFlight flight_from_json(const json& object) try {
  RankFlight flight;
  flight.rank = object.at("rank").get<int>();
  flight.size = object.at("size").get<int>();
  if (flight.size < 1 || flight.size > kMostRanks || flight.rank < 0 ||
      flight.rank >= flight.size) {
    throw std::runtime_error(fmt::format("there is no rank {} of {}", flight.rank, flight.size));
  }
  flight.host = text_of(object, "host");
  flight.pid = object.value("pid", int64_t{0});
  flight.reason = text_of(object, "reason");
  flight.culprit = object.value("culprit", -1);
  if (flight.culprit >= flight.size) flight.culprit = -1;
  flight.step = object.value("step", int64_t{0});
  flight.phase = text_of(object, "phase");
  flight.written_us = object.value("written_us", int64_t{0});
  const json& entries = object.at("records");
  if (!entries.is_array()) throw std::runtime_error("\"records\" is no list");
  const size_t skipped = entries.size() - std::min(entries.size(), kMostEntries);
  for (size_t i = skipped; i < entries.size(); ++i) {
    flight.entries.push_back(entry_from_json(entries[i]));
  }
  return flight;
} catch (const json::exception& error) {
  throw std::runtime_error(error.what());
}

json to_json(const RankFlight& flight) {
  json object = {
      {"rank", flight.rank}, {"size", flight.size},     {"host", flight.host},
      {"pid", flight.pid},   {"reason", flight.reason}, {"culprit", flight.culprit},
      {"step", flight.step}, {"phase", flight.phase},   {"written_us", flight.written_us}};
  json& entries = object["records"] = json::array();
  for (const FlightEntry& entry : flight.entries) entries.push_back(entry_to_json(entry));
  return object;
}

void MergedFlight::add(RankFlight flight) {
  const auto at =
      std::lower_bound(ranks.begin(), ranks.end(), flight.rank,
                       [](const RankFlight& present, int rank) { return present.rank < rank; });
  if (at != ranks.end() && at->rank == flight.rank) {
    *at = std::move(flight);
  } else {
    ranks.insert(at, std::move(flight));
  }
}

void move_flight(MergedFlight& from, MergedFlight& to) {
  for (RankFlight& rank : from.ranks) to.add(std::move(rank));
  for (std::string& line : from.unreadable) to.unreadable.push_back(std::move(line));
  from = {};
}

int blamed_rank(const MergedFlight& flight) {
  std::map<int, int> votes;
  int size = 1;
  for (const RankFlight& rank : flight.ranks) {
    size = rank.size;
    if (rank.culprit >= 0 && rank.culprit != rank.rank) ++votes[rank.culprit];
  }
  int blamed = -1, most = 0;
  for (const auto& [rank, count] : votes) {
    if (count == most) blamed = -1;  // no agreement
    if (count <= most) continue;
    blamed = rank;
    most = count;
  }
  return most >= std::min(2, size - 1) ? blamed : -1;
}

}  // namespace tessera::tools
