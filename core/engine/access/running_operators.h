#pragma once

#include <c10/util/SmallVector.h>

#include <thread>
#include <vector>

#include "engine/unit/unit.h"

namespace tessera {

/// The operators, on all threads of this rank, that currently use parameters of one model.
///
/// See [Note: Several threads] in running_operators.cpp. Not thread-safe itself.
class RunningOperators {
 public:
  /// Registers an operator of this thread that uses `units` until `leave()`. `frees`: units are
  /// freed between uses. Throws if a running operator of another thread conflicts with it.
  void enter(const std::vector<Unit*>& units, bool writes, bool frees);
  /// Ends the operator that this thread has entered last.
  void leave();

  /// Throws if an operator of another thread uses one of the model's units.
  void check_none(const char* call) const;
  bool uses(const Unit* unit) const;

 private:
  struct Use {
    std::thread::id thread;
    int backward;  // -1: none
    bool writes;
    c10::SmallVector<const Unit*, 2> units;

    bool has(const Unit* unit) const;
  };
  bool goes_with(const Use& mine, const Use& other, bool frees) const;

  std::vector<Use> uses_;
};

}  // namespace tessera
