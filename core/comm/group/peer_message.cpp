#include "comm/group/peer_message.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cstring>

namespace tessera {
namespace {

std::string text_of(const MessageForm& form) {
  return form.numel == 0 ? "nothing"
                         : fmt::format("{} elements of {}", form.numel,
                                       c10::toString(static_cast<at::ScalarType>(form.dtype)));
}

}  // namespace

MessageForm message_form_of(const at::Tensor& message) {
  const int64_t numel = message_numel(message);
  return {numel, numel > 0 ? static_cast<int64_t>(message.scalar_type()) : 0};
}

std::string disagreement(int size, const std::function<MessageForm(int, int)>& sent,
                         const std::function<MessageForm(int, int)>& expected) {
  for (int sender = 0; sender < size; ++sender) {
    for (int receiver = 0; receiver < size; ++receiver) {
      const MessageForm was = sent(sender, receiver), should_be = expected(sender, receiver);
      if (was == should_be) continue;
      return fmt::format("rank {} sends {} to rank {}, which expects {}", sender, text_of(was),
                         receiver, text_of(should_be));
    }
  }
  return "";
}

void take_own_message(const at::Tensor& from, const at::Tensor& to) {
  if (message_numel(to) == 0 || from.const_data_ptr() == to.const_data_ptr()) return;
  if (from.device().is_cpu() && to.device().is_cpu()) {
    std::memcpy(from.mutable_data_ptr(), to.const_data_ptr(), to.nbytes());
  } else {
    at::NoGradGuard no_grad;
    from.copy_(to);
  }
}

}  // namespace tessera
