#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

/// Elements and bytes of what one rank sends another in an all-to-all. An undefined tensor is
/// nothing.
inline int64_t message_numel(const at::Tensor& message) {
  return message.defined() ? message.numel() : 0;
}
inline int64_t message_bytes(const at::Tensor& message) {
  // Not nbytes(), which throws for tensors that the checks have yet to refuse.
  return message_numel(message) * (message.defined() ? message.element_size() : 0);
}

/// What sender and receiver of a message must agree on.
struct MessageForm {
  int64_t numel = 0;
  int64_t dtype = 0;  ///< 0 if there are no elements

  bool operator==(const MessageForm&) const = default;
};

MessageForm message_form_of(const at::Tensor& message);

/// Names the first two ranks of `size` that disagree on what one sends the other; empty if there
/// are none. `sent` and `expected`: the form of the message from `sender` to `receiver`, as the one
/// and the other say.
std::string disagreement(int size, const std::function<MessageForm(int sender, int receiver)>& sent,
                         const std::function<MessageForm(int sender, int receiver)>& expected);

/// Copies what a rank sends to itself, unless it is in place already.
void take_own_message(const at::Tensor& from, const at::Tensor& to);

}  // namespace tessera
