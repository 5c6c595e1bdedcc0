#include "start/store_key.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace tessera {

bool wait_for_key(c10d::Store& store, const std::string& key, const Deadline& deadline) {
  using std::chrono::milliseconds;
  constexpr milliseconds kLongest{50};
  for (milliseconds pause{1}; !store.check({key}); pause = std::min(2 * pause, kLongest)) {
    if (deadline.has_passed()) return false;
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
  }
  return true;
}

}  // namespace tessera
