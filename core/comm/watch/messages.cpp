#include "comm/watch/messages.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

namespace tessera {
namespace {

using Json = nlohmann::json;

// A message must fit a datagram.
constexpr size_t kMaxWhy = 1000;
constexpr size_t kMaxLine = 200;
constexpr size_t kMaxGroups = 32;

std::string cut(const std::string& text, size_t longest) {
  return text.size() <= longest ? text : text.substr(0, longest) + "...";
}

Json json_of(const CollectiveId& id) { return {id.group, id.channel, id.number}; }
CollectiveId id_from(const Json& json) { return {json.at(0), json.at(1), json.at(2)}; }

Phase phase_from(const Json& json) {
  const int number = json.get<int>();
  return number >= 0 && number <= static_cast<int>(Phase::kLoad) ? static_cast<Phase>(number)
                                                                 : Phase::kUserCode;
}

void write(Json& json, const WaitCause& cause) {
  json["cause"] = {cause.rank, cut(cause.why, kMaxWhy), static_cast<int>(cause.evidence)};
  if (cause.found) {
    json["found"] = {json_of(cause.found->at), cause.found->fingerprint,
                     cut(cause.found->issued, kMaxLine)};
  }
}

WaitCause cause_from(const Json& json) {
  const Json& cause = json.at("cause");
  const int evidence = std::clamp(cause.at(2).get<int>(), 0, static_cast<int>(Evidence::kSeen));
  WaitCause known{cause.at(0), cause.at(1), static_cast<Evidence>(evidence)};
  if (const auto found = json.find("found"); found != json.end())
    known.found = {id_from(found->at(0)), found->at(1), found->at(2)};
  return known;
}

void write(Json& json, const Question& question) {
  json["kind"] = "ask";
  for (const CollectiveId& id : question.ids) json["ids"].push_back(json_of(id));
}

void write(Json& json, const Answer& answer) {
  const RankView& view = answer.view;
  json["kind"] = "answer";
  json["place"] = {static_cast<int>(view.phase), view.step, view.phase_seconds};
  json["last"] = cut(view.last, kMaxLine);
  json["blocked"] = view.is_blocked;
  if (view.wait) {
    const WaitView& wait = *view.wait;
    json["wait"] = {json_of(wait.id), cut(wait.subject, kMaxLine), wait.seconds, wait.lacking};
  }
  for (const IssuedAnswer& one : answer.issued) {
    json["issued"].push_back({json_of(one.id), one.issued,
                              one.fingerprint ? Json(*one.fingerprint) : Json(),
                              cut(one.text, kMaxLine)});
  }
}

void write(Json& json, const Failure& failure) {
  json["kind"] = "failed";
  json["id"] = json_of(failure.id);
  write(json, failure.cause);
}

void write(Json& json, const Farewell& farewell) {
  json["kind"] = "left";
  write(json, farewell.cause);
  json["place"] = {static_cast<int>(farewell.phase), farewell.step};
  json["issued"] = Json::object();
  for (const auto& [group, issued] : farewell.issued) {
    if (json["issued"].size() < kMaxGroups) json["issued"][group] = issued;
  }
}

void write(Json& json, const Receipt& /*receipt*/) { json["kind"] = "receipt"; }

std::vector<CollectiveId> ids_from(const Json& json) {
  std::vector<CollectiveId> ids;
  for (const Json& id : json.value("ids", Json::array())) ids.push_back(id_from(id));
  return ids;
}

Answer answer_from(const Json& json, int from) {
  Answer answer;
  RankView& view = answer.view;
  view.rank = from;
  view.phase = phase_from(json.at("place").at(0));
  view.step = json.at("place").at(1);
  view.phase_seconds = json.at("place").at(2);
  view.last = json.at("last");
  view.is_blocked = json.at("blocked");
  if (json.contains("wait")) {
    const Json& wait = json.at("wait");
    view.wait = WaitView{id_from(wait.at(0)), wait.at(1), wait.at(2), wait.at(3)};
  }
  for (const Json& one : json.value("issued", Json::array())) {
    IssuedAnswer& issued = answer.issued.emplace_back();
    issued.id = id_from(one.at(0));
    issued.issued = one.at(1);
    if (!one.at(2).is_null()) issued.fingerprint = one.at(2).get<uint64_t>();
    issued.text = one.at(3);
  }
  return answer;
}

Content content_from(const Json& json, int from) {
  const std::string kind = json.at("kind");
  if (kind == "ask") return Question{ids_from(json)};
  if (kind == "answer") return answer_from(json, from);
  if (kind == "failed") return Failure{id_from(json.at("id")), cause_from(json)};
  if (kind == "left") {
    return Farewell{cause_from(json), phase_from(json.at("place").at(0)), json.at("place").at(1),
                    json.at("issued")};
  }
  return Receipt{};
}

}  // namespace

std::string to_text(const Message& message) {
  Json json{{"number", message.number}, {"from", message.from}};
  std::visit([&](const auto& content) { write(json, content); }, message.content);
  // Names of units are the user's, and may not be UTF-8.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<Message> message_from(const std::string& text) noexcept {
  try {
    const Json json = Json::parse(text);
    const int from = json.at("from");
    return Message{json.at("number"), from, content_from(json, from)};
  } catch (...) {  // a stranger's
    return std::nullopt;
  }
}

}  // namespace tessera
