#include "launcher/uplink.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace tessera::tools {
namespace {

using nlohmann::json;
using Kind = UplinkMessage::Kind;

/// A message must fit in `RankStream::kLongestLine`.
constexpr size_t kMostEntriesSent = 2000;

std::string mark_of(const std::string& job) { return fmt::format("\x1e{} ", job); }

std::string dump(const json& message) {
  return message.dump(-1, ' ', false, json::error_handler_t::replace);
}

json message_of(Kind kind) { return {{"kind", static_cast<int>(kind)}}; }

json rank_to_json(const RankEnd& end) {
  return {{"rank", end.rank},
          {"status", end.status},
          {"killed", end.killed},
          {"core", end.dumped_core},
          {"after_interrupt", end.after_interrupt},
          {"by_launcher", end.by_launcher},
          {"has_last_words", end.has_last_words},
          {"last_lines", end.last_lines}};
}

RankEnd rank_from_json(const json& object) {
  return {.rank = object.at("rank").get<int>(),
          .status = object.at("status").get<int>(),
          .killed = object.at("killed").get<bool>(),
          .dumped_core = object.at("core").get<bool>(),
          .after_interrupt = object.at("after_interrupt").get<bool>(),
          .by_launcher = object.at("by_launcher").get<bool>(),
          .has_last_words = object.at("has_last_words").get<bool>(),
          .last_lines = object.at("last_lines").get<std::vector<std::string>>()};
}

UplinkMessage message_from_json(const json& object) {
  UplinkMessage message{.kind = static_cast<Kind>(object.at("kind").get<int>())};
  message.text = object.value("text", std::string());
  message.status = object.value("status", 0);
  for (const json& rank : object.value("ranks", json::array()))
    message.end.ranks.push_back(rank_from_json(rank));
  message.end.interrupted_by = object.value("interrupted_by", 0);
  message.end.immortal = object.value("immortal", std::vector<pid_t>());
  if (object.contains("flight")) message.flight.add(flight_from_json(object["flight"]));
  if (object.contains("unreadable")) message.flight.unreadable.push_back(object["unreadable"]);
  return message;
}

}  // namespace

void Uplink::on_start() { send(dump(message_of(Kind::kStart))); }

void Uplink::on_error(const std::string& text, int status) {
  json message = message_of(Kind::kError);
  message["text"] = text;
  message["status"] = status;
  send(dump(message));
}

void Uplink::on_failure(const RankEnd& end) {
  json message = message_of(Kind::kFailure);
  message["ranks"] = json::array({rank_to_json(end)});
  send(dump(message));
}

void Uplink::on_asked_flight(const MergedFlight& flight) {
  send(flight);
  send(dump(message_of(Kind::kAskedFlightEnd)));
}

int Uplink::on_end(const JobEnd& end, const MergedFlight& flight) {
  send(flight);
  json message = message_of(Kind::kEnd);
  json& ranks = message["ranks"] = json::array();
  int status = 0;
  for (const RankEnd& rank : end.ranks) {
    ranks.push_back(rank_to_json(rank));
    if (status == 0) status = rank.exit_status();
  }
  message["interrupted_by"] = end.interrupted_by;
  message["immortal"] = end.immortal;
  send(dump(message));
  return status;
}

void Uplink::send(const std::string& json) {
  terminal_.write_from(nullptr, STDERR_FILENO, mark_of(job_) + json + "\n");
}

void Uplink::send(const MergedFlight& flight) {
  for (RankFlight rank : flight.ranks) {
    auto& entries = rank.entries;
    if (entries.size() > kMostEntriesSent)
      entries.erase(entries.begin(), entries.end() - kMostEntriesSent);
    json message = message_of(Kind::kFlight);
    message["flight"] = to_json(rank);
    send(dump(message));
  }
  for (const std::string& line : flight.unreadable) {
    json message = message_of(Kind::kFlight);
    message["unreadable"] = line;
    send(dump(message));
  }
}

std::optional<UplinkMessage> parse_uplink(std::string_view line, const std::string& job) {
  const std::string mark = mark_of(job);
  if (!line.starts_with(mark)) return std::nullopt;
  try {
    return message_from_json(json::parse(line.substr(mark.size())));
  } catch (const std::exception&) {  // shown like a line of a rank
    return std::nullopt;
  }
}

}  // namespace tessera::tools
