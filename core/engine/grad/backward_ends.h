#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace tessera {

/// The ends of the backwards of all models that one run of autograd's engine gives gradients to.
///
/// Each end waits for the other ranks, and the engine calls the models' callbacks in the order in
/// which it has met the models, that of this rank's graph. So the last callback carries out all
/// ends, in an order that ranks share.
class BackwardEnds {
 public:
  /// Returns the ends of the run that the calling thread works for.
  static std::shared_ptr<BackwardEnds> of_current_run();

  /// Announces an `end()`.
  void add();
  /// Called by each model's callback. `model`: its number in an order that ranks share. An
  /// exception of one of the ends keeps those behind it from being carried out.
  void end(int64_t model, std::function<void()> end);

 private:
  std::mutex mutex_;
  int expected_ = 0;
  std::map<int64_t, std::function<void()>> ends_;
};

}  // namespace tessera
