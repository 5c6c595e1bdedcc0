#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <vector>

namespace tessera {

class Watch;

/// Passes the text of an exception that ends the process on to the other ranks: the runtime calls
/// std::terminate() without destroying the world.
class LastWords {
 public:
  /// Installs itself in front of the program's terminate handler, on the first call.
  static LastWords& of_process();

  void add(const std::shared_ptr<Watch>& watch);

 private:
  LastWords();
  [[noreturn]] static void on_terminate();

  std::terminate_handler next_ = nullptr;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Watch>> watches_;
};

}  // namespace tessera
