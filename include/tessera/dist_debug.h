#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <tessera/collective.h>
#include <tessera/export.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// While an instance lives, an operator on DistTensors that has no rule for its call throws
/// `c10::NotImplementedError` on this thread, and in a backward that it runs, instead of computing
/// on whole tensors on every rank. The message names the operator, the placements of its tensors,
/// and, if `distribute_module()` placed it, the module in or after which the operator runs.
///
/// Outside of such a guard, the environment variable `TESSERA_STRICT=1` has the same effect. Guards
/// nest.
class TESSERA_API StrictOperators {
 public:
  explicit StrictOperators(bool strict = true);
  ~StrictOperators();
  StrictOperators(const StrictOperators&) = delete;
  StrictOperators& operator=(const StrictOperators&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

/// Counts the collectives that this thread issues while an instance lives, and those of a backward
/// that it runs, by kind and by purpose:
/// the operator (`aten::mm`) or `redistributed tensor`, and, for `fully_shard`, the unit.
///
/// ```cpp
/// tessera::CommDebug debug;
/// model(x).sum().backward();
/// std::cout << debug.describe();
/// ```
///
/// Scopes nest; each counts all collectives issued in it. Barriers are not counted.
class TESSERA_API CommDebug {
 public:
  struct Entry {
    std::string kind;     ///< all_gather, reduce_scatter, all_reduce, broadcast, all_to_all
    std::string subject;  ///< its purpose: the operator, the unit, ...
    int64_t calls = 0;
    int64_t bytes = 0;  ///< of the whole buffer; for an all-to-all, of all that this rank sends
  };

  CommDebug();
  ~CommDebug();
  CommDebug(const CommDebug&) = delete;
  CommDebug& operator=(const CommDebug&) = delete;

  /// The entries in the order of their first calls.
  const std::vector<Entry>& entries() const { return entries_; }
  /// Totals over all entries, over those of one kind, or over those of one kind and subject.
  int64_t calls(const std::string& kind = "", const std::string& subject = "") const;
  int64_t bytes(const std::string& kind = "", const std::string& subject = "") const;
  /// Returns the entries as a table.
  std::string describe() const;
  void reset() { entries_.clear(); }

 private:
  friend class ProcessGroup;
  // Counts a collective in all scopes around the call: under the subject up to " (", as the shapes
  // and placements after that serve only the comparison between ranks.
  static void count(const Collective& collective);
  void add(const char* kind, int64_t bytes, std::string_view subject);

  std::vector<Entry> entries_;
  CommDebug* const outer_;
  c10::DebugInfoGuard scope_;
};

}  // namespace tessera
