#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "tensor/shard_mesh.h"

namespace tessera {

/// The numbers of forwards, backwards, steps and gathers that this rank has made with one model,
/// and the calls that must be the same on all ranks; and their comparison with those of the other
/// ranks.
///
/// See [Note: Ranks that are behind] in lockstep.cpp.
class Lockstep {
 public:
  /// Bytes that a comparison adds to the agreement at the end of a backward.
  static constexpr int64_t kBytes = 10;

  /// Counts a forward with gradients. Any thread may call it.
  void begin_forward() { forwards_.fetch_add(1, std::memory_order_relaxed); }
  void end_backward() { ++backwards_; }
  void end_step();
  /// Records how many gathers this rank has begun by the end of the pass; by then all ranks must
  /// have begun the same ones.
  void end_pass(int64_t gathers) { gathers_ = gathers; }
  /// Takes note of a call, with the values that must be equal on all ranks, as an error will name
  /// it.
  void record(std::string call);

  /// Appends `kBytes` to a message of whose bytes the ranks take the highest. A rank that is `done`
  /// under `join()` makes no forwards, and leaves the comparison to the others.
  void append_to(std::vector<uint8_t>& message, bool done);
  /// Reads the highest bytes. If ranks differ, all gather their numbers; one of them warns if only
  /// their forwards differ. Called by all ranks.
  void compare(const uint8_t* highest, const ShardMesh& mesh);
  /// Throws once, on all ranks, if they had made different numbers of steps, or of gathers, at the
  /// last comparison.
  void check();
  /// Returns the error that `check()` will throw; empty if there is none.
  const std::string& error() const { return error_; }
  /// Returns true if ranks differed in their gathers: their parameters are wrong.
  bool has_lost_gathers() const { return has_lost_gathers_; }

 private:
  std::string numbers() const;
  std::string step_error(const std::vector<std::string>& all) const;
  std::string gather_error(const std::vector<std::string>& all) const;
  std::string forward_warning(const std::vector<std::string>& all) const;
  std::string call_error(const ShardMesh& mesh) const;

  int64_t steps_ = 0;
  int64_t reductions_ = 0;             // since the last step
  std::atomic<int64_t> forwards_ = 0;  // since the last reduction
  int64_t backwards_ = 0;              // since the last reduction
  int64_t gathers_ = 0;
  uint16_t calls_hash_ = 0;             // of the calls since the last comparison
  std::deque<std::string> last_calls_;  // the latest of them
  bool has_lost_gathers_ = false;
  bool is_done_ = false;
  bool was_wrong_ = false;  // at the last comparison; the same on all ranks
  bool warned_ = false;     // the same on all ranks
  std::string error_;       // the same on all ranks
};

}  // namespace tessera
