#pragma once

#include <memory>
#include <vector>

namespace tessera {

/// The backwards that are running on one model: one, and those nested in it (recomputation).
///
/// Two threads may also run one each. With one rank this works as in plain LibTorch: the gradients
/// of all are added, and the work at the end of a backward is done at the end of the last one.
/// Several ranks would not meet in the same reductions, so there it is an error, in both threads.
class OpenBackwards {
 public:
  explicit OpenBackwards(bool may_overlap) : may_overlap_(may_overlap) {}

  /// Returns true if `id`, of which a gradient has arrived, is the backward that began last; nearly
  /// always true.
  bool is_latest(int id) const;
  /// Registers backward `id`, of which a gradient has arrived. Returns true if it is new; it then
  /// counts as running until `end(id)`, or until `alive` expires, as it does when the backward
  /// fails. Throws if backwards may not overlap and `id` goes on while one that began later is
  /// running.
  bool add(int id, const std::shared_ptr<void>& alive);
  /// Removes `id`. Returns true if none is left. Throws if one that began later is not over and
  /// backwards may not overlap.
  bool end(int id);

  /// Returns true if no backward is running; those that have failed do not count.
  bool empty();
  /// Returns true if, besides, none has ended since the last one began.
  bool last_failed() { return empty() && began_; }

 private:
  struct Open {
    int id;
    std::weak_ptr<void> alive;
  };
  void drop_failed();
  void check_nested(bool nested);

  bool may_overlap_;
  bool began_ = false;       // one has, and the last one has not ended
  bool overlapped_ = false;  // until all backwards that overlapped are over
  std::vector<Open> open_;   // in the order of their first gradients
};

}  // namespace tessera
