#include "comm/start/store_key.h"

#include <algorithm>
#include <thread>

namespace tessera {

using std::chrono::milliseconds;

milliseconds pause_between_questions(int askers) {
  constexpr int kQuestionsPerMillisecond = 4;  // of all askers: a store answers many times as many
  return milliseconds(std::max(1, askers / kQuestionsPerMillisecond));
}

bool wait_for_key(c10d::Store& store, const std::string& key, const Deadline& deadline,
                  int askers) {
  milliseconds pause = pause_between_questions(askers);
  const milliseconds longest = std::max(pause, milliseconds(50));
  for (; !store.check({key}); pause = std::min(2 * pause, longest)) {
    if (deadline.has_passed()) return false;
    std::this_thread::sleep_for(std::min(pause, deadline.left()));
  }
  return true;
}

}  // namespace tessera
