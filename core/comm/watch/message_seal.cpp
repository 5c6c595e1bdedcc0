#include "comm/watch/message_seal.h"

#include "comm/group/authentication.h"

namespace tessera {

bool MessageWindow::take(int64_t number) {
  if (number > newest_) {
    const int64_t steps = number - newest_;
    seen_ = (steps < 64 ? seen_ << steps : 0) | 1;
    newest_ = number;
    return true;
  }
  const int64_t back = newest_ - number;
  if (number < 0 || back >= 64 || (seen_ >> back & 1) != 0) return false;
  seen_ |= uint64_t{1} << back;
  return true;
}

std::string MessageSeal::bytes_of(const Content& content) {
  return authenticated(key_, "", to_text({sent_.fetch_add(1), rank_, content}));
}

std::optional<Message> MessageSeal::message_in(const std::string& bytes) {
  const auto text = authentic_text(key_, "", bytes);
  auto message = text ? message_from(*text) : std::nullopt;
  const bool is_new = message && message->from >= 0 && message->from < std::ssize(windows_) &&
                      message->from != rank_ && windows_[message->from].take(message->number);
  if (!is_new) dropped_.fetch_add(1);
  return is_new ? std::move(message) : std::nullopt;
}

}  // namespace tessera
