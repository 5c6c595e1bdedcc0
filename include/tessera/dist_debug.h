#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/collective.h>
#include <tessera/export.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// While it lives, an operator on DistTensors that has no rule for its call throws
/// `c10::NotImplementedError` on this thread, in place of computing on whole tensors on every rank.
/// The message names the operator, how its tensors lie, and the module that it runs in or after, if
/// `distribute_module()` placed that.
///
/// Without one, the environment variable `TESSERA_STRICT=1` asks for the same. Guards nest. A
/// backward on the CPU runs on the thread that asks for it.
class TESSERA_API StrictOperators {
 public:
  explicit StrictOperators(bool strict = true);
  ~StrictOperators();
  StrictOperators(const StrictOperators&) = delete;
  StrictOperators& operator=(const StrictOperators&) = delete;

 private:
  int before_;
};

/// Counts the collectives that this thread issues while it lives, by kind and by what they are for:
/// the operator (`aten::mm`) or `redistributed tensor`, and, of `fully_shard`, the unit.
///
/// ```cpp
/// tessera::CommDebug debug;
/// model(x).sum().backward();
/// std::cout << debug.describe();
/// ```
///
/// Scopes nest; each counts all that happens in it. Barriers are not counted.
class TESSERA_API CommDebug {
 public:
  struct Entry {
    std::string kind;     ///< all_gather, reduce_scatter, all_reduce, broadcast, all_to_all
    std::string subject;  ///< what it was for
    int64_t calls = 0;
    int64_t bytes = 0;  ///< of the whole buffer; of an all-to-all, of all that this rank sends
  };

  CommDebug();
  ~CommDebug();
  CommDebug(const CommDebug&) = delete;
  CommDebug& operator=(const CommDebug&) = delete;

  /// In the order of their first calls.
  const std::vector<Entry>& entries() const { return entries_; }
  /// All of them, those of one kind, or those of one kind and subject.
  int64_t calls(const std::string& kind = "", const std::string& subject = "") const;
  int64_t bytes(const std::string& kind = "", const std::string& subject = "") const;
  /// A table.
  std::string describe() const;
  void reset() { entries_.clear(); }

 private:
  friend void count_collective(const Collective& collective);
  void add(const char* kind, int64_t bytes, std::string_view subject);

  std::vector<Entry> entries_;
  CommDebug* const outer_;
};

}  // namespace tessera
