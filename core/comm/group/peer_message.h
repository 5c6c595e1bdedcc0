#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace tessera {

/// Return the elements and the bytes of a message from one rank to another in an all-to-all. An
/// undefined tensor is an empty message.
inline int64_t message_numel(const at::Tensor& message) {
  return message.defined() ? message.numel() : 0;
}
inline int64_t message_bytes(const at::Tensor& message) {
  // Not nbytes(): it throws for tensors that the argument checks have not rejected yet.
  return message_numel(message) * (message.defined() ? message.element_size() : 0);
}

/// The properties of a message on which its sender and receiver must agree.
struct MessageForm {
  int64_t numel = 0;
  int64_t dtype = 0;  ///< 0 if there are no elements

  bool operator==(const MessageForm&) const = default;
};

MessageForm message_form_of(const at::Tensor& message);

/// Returns a text that names the first two of `size` ranks that disagree on a message; empty if
/// there are none. `sent` and `expected` return the form of the message from `sender` to `receiver`
/// as the sender and the receiver state it.
std::string disagreement(int size, const std::function<MessageForm(int sender, int receiver)>& sent,
                         const std::function<MessageForm(int sender, int receiver)>& expected);

/// Copies a rank's message to itself from `to` into `from`, unless both are the same memory.
void take_own_message(const at::Tensor& from, const at::Tensor& to);

}  // namespace tessera
