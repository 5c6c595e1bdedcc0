#include "checkpoint/pace.h"

#include <algorithm>
#include <thread>

namespace tessera {

void Pace::wait_for(size_t nbytes) {
  if (count_) count_(static_cast<int64_t>(nbytes));
  if (bytes_per_second_ <= 0) return;
  std::this_thread::sleep_until(next_);
  // Unused time is not saved up: there is no burst after a pause.
  next_ = std::max(next_, Clock::now()) +
          std::chrono::duration_cast<Clock::duration>(
              std::chrono::duration<double>(static_cast<double>(nbytes) / bytes_per_second_));
}

}  // namespace tessera
