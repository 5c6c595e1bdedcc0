#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "comm/group/collective_watch.h"
#include "comm/watch/rank_view.h"

namespace tessera {

/// How many collectives of each channel a rank has issued in a process group.
using IssuedCounts = std::array<int64_t, 3>;

/// Asks a rank where it is, and whether it has issued the collectives for which the asker waits.
struct Question {
  std::vector<CollectiveId> ids;
};

/// The answer to one `CollectiveId`: how many collectives of its channel the rank has issued, and,
/// if it still has the record of this one, its fingerprint and text.
struct IssuedAnswer {
  CollectiveId id;
  int64_t issued = 0;
  std::optional<uint64_t> fingerprint;
  std::string text;
};

/// The answer to a question.
struct Answer {
  RankView view;  ///< of the rank that answers; `silent_seconds` is not sent
  std::vector<IssuedAnswer> issued;
};

/// A collective failed on the sender, but it goes on.
struct Failure {
  CollectiveId id;
  WaitCause cause;
};

/// The sender has left, or is about to.
struct Farewell {
  WaitCause cause = {};  ///< what made it leave, maybe itself; without `why`: it left in order
  Phase phase = Phase::kUserCode;
  int64_t step = 0;
  std::map<std::string, IssuedCounts> issued;  ///< by group
};

/// Confirms a farewell.
struct Receipt {};

using Content = std::variant<Question, Answer, Failure, Farewell, Receipt>;

struct Message {
  int64_t number = 0;  ///< of the sender's earlier messages
  int from = -1;
  Content content;
};

std::string to_text(const Message& message);
/// Returns nothing for text that is no message.
std::optional<Message> message_from(const std::string& text) noexcept;

}  // namespace tessera
