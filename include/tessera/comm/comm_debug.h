#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <tessera/comm/collective.h>
#include <tessera/export.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Counts the collectives that this thread issues while an instance lives, and those of a backward
/// that it runs, by kind, module and purpose:
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
    /// For operators on DistTensors: the module whose parameter was used last before, in forward
    /// and in backward, if `distribute_module()` placed it; else empty.
    std::string module;
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
  /// Returns the entries as a table, by module if there are any.
  std::string describe() const;
  void reset() { entries_.clear(); }

 private:
  friend class ProcessGroup;
  // Counts a collective in all scopes around the call: under the subject up to " (", as the shapes
  // and placements after that serve only the comparison between ranks.
  static void count(const Collective& collective);
  void add(const char* kind, int64_t bytes, std::string_view subject, const std::string& module);

  std::vector<Entry> entries_;
  CommDebug* const outer_;
  c10::DebugInfoGuard scope_;
};

}  // namespace tessera
