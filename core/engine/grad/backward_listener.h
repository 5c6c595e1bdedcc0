#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// A request of a rank to all ranks for the end of a backward. They carry out the highest one.
enum class Attention : uint8_t {
  kNone,
  kLearn,   ///< learn the order of use, or choose again how memory is used
  kTakeIn,  ///< adopt parameters that were given other data, and learn
  kGather,  ///< gather units for this rank, whose backward is not over; then vote again
};

/// A rank's vote at the end of a backward. All ranks receive the highest.
struct PassVote {
  Attention attention = Attention::kNone;
  /// How often units were used outside of training since the last vote. In the highest vote, only
  /// ranks with the highest attention count.
  uint8_t uses_in_evaluation = 0;

  static constexpr uint8_t kMostUses = 63;
};

/// Is notified of the ends of a model's backwards, on all ranks. At the end of a backward the calls
/// come in the order below, except for `on_settle()`.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  /// Called before this rank waits for the reductions of the previous backward outside of
  /// `settle()`.
  virtual void on_settle() = 0;
  /// Called before this rank waits for any other rank: starts the collectives that others may be
  /// waiting for.
  virtual void on_backward_end() = 0;
  /// Called before ranks agree on the parameters that were used; `in_backward`: at its end, and not
  /// in `reduce_waiting()`.
  virtual void on_agreement(bool in_backward) = 0;
  /// Returns true if some ranks have run out of data: they start no reduction before the agreement.
  virtual bool is_uneven() const = 0;
  /// Returns this rank's vote.
  virtual PassVote vote() = 0;
  /// Called in the agreement, also in one that `Reducer::ask()` begins: ranks have asked for
  /// `units`.
  virtual void on_asked(const std::vector<int>& units) = 0;
  /// Called last. `synced`: the backward was reduced. `most` is the highest of the ranks' votes;
  /// none if they have not voted.
  virtual void on_pass_end(bool synced, const PassVote& most) = 0;
};

}  // namespace tessera
