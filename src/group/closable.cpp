#include "group/closable.h"

#include <algorithm>
#include <exception>

#include "group/capability.h"

namespace tessera {

std::chrono::milliseconds closing_grace(std::chrono::milliseconds timeout) {
  if (std::uncaught_exceptions() > 0) return std::chrono::milliseconds(0);
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::seconds(2));
}

void close(const ProcessGroupPtr& process_group) noexcept {
  if (auto* const closable = capability<Closable>(*process_group)) closable->close();
}

}  // namespace tessera
