#pragma once

#include <tessera/base/memory_sample.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace tessera {

/// Receives the events that change the memory of a model.
class MemoryListener {
 public:
  virtual ~MemoryListener() = default;
  /// Called before memory is allocated, freed, or moved from one kind to another.
  virtual void before_change() = 0;
  /// Called afterwards. `unit`: its name, or empty.
  virtual void on_memory(MemoryEvent event, const std::string& unit) = 0;
};

/// The listeners to the memory of one model on this rank. Without any, an event costs one test.
class MemoryWatch {
 public:
  bool is_active() const { return !listeners_.empty(); }

  void before_change() const {
    for (MemoryListener* const listener : listeners_) listener->before_change();
  }
  void tell(MemoryEvent event, const std::string& unit = {}) const {
    for (MemoryListener* const listener : listeners_) listener->on_memory(event, unit);
  }

  void add(MemoryListener& listener) { listeners_.push_back(&listener); }
  /// Does nothing for a listener that was not added.
  void remove(const MemoryListener& listener) { std::erase(listeners_, &listener); }

  /// Adds an optimizer of the model; `state_nbytes` returns the bytes of its state. `optimizer`
  /// identifies it.
  void add_optimizer(const void* optimizer, std::function<int64_t()> state_nbytes);
  void forget_optimizer(const void* optimizer) { optimizers_.erase(optimizer); }
  bool has_optimizers() const { return !optimizers_.empty(); }
  /// Counts the state of all optimizers.
  void count_optimizer_state();
  /// Returns the result of the last count.
  int64_t optimizer_state() const { return optimizer_state_; }

 private:
  std::vector<MemoryListener*> listeners_;
  std::map<const void*, std::function<int64_t()>> optimizers_;
  int64_t optimizer_state_ = 0;
};

}  // namespace tessera
