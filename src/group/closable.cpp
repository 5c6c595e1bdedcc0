#include "group/closable.h"

#include <algorithm>
#include <exception>

namespace tessera {

std::chrono::milliseconds closing_grace(std::chrono::milliseconds timeout) {
  if (std::uncaught_exceptions() > 0) return std::chrono::milliseconds(0);
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::seconds(2));
}

void close(const ProcessGroupPtr& process_group) noexcept {
  if (const auto closable = std::dynamic_pointer_cast<Closable>(process_group)) closable->close();
}

}  // namespace tessera
