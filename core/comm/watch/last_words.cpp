#include "comm/watch/last_words.h"

#include <cstdlib>
#include <string>

#include "comm/group/collective_name.h"
#include "comm/watch/watch.h"

namespace tessera {

LastWords& LastWords::of_process() {
  static auto* const last_words = new LastWords();  // also while the process ends
  return *last_words;
}

LastWords::LastWords() { next_ = std::set_terminate(&LastWords::on_terminate); }

void LastWords::add(const std::shared_ptr<Watch>& watch) {
  const std::lock_guard lock(mutex_);
  std::erase_if(watches_, [](const auto& known) { return known.expired(); });
  watches_.push_back(watch);
}

void LastWords::on_terminate() {
  LastWords& self = of_process();
  const std::exception_ptr exception = std::current_exception();
  const std::string why = exception ? exception_text(exception) : "std::terminate() was called";
  if (const std::unique_lock lock(self.mutex_, std::try_to_lock); lock) {
    for (const auto& known : self.watches_) {
      if (const auto watch = known.lock()) watch->leave(why);
    }
  }
  if (self.next_) self.next_();
  std::abort();
}

}  // namespace tessera
