#pragma once

#include <memory>
#include <vector>

namespace tessera {

/// The backwards that are running on one model: one, and those that run inside it (recomputation).
///
/// Two threads may also run one each. With one rank that is as in plain LibTorch: the gradients of
/// all are added, and what happens at the end of backward happens at the end of the last. Several
/// ranks would not meet in the same reductions, so there it is an error, in both threads.
class OpenBackwards {
 public:
  explicit OpenBackwards(bool may_overlap) : may_overlap_(may_overlap) {}

  /// True if `id`, which has a gradient, is the latest that has begun; nearly always.
  bool is_latest(int id) const;
  /// A gradient of another one came. True if it is new, and then counts as running until `end(id)`,
  /// or until `alive` is gone, as it is when a backward fails. Throws if it is neither inside the
  /// latest nor around it and may not overlap.
  bool add(int id, const std::shared_ptr<void>& alive);
  /// True if none is left. Throws if one that began later is not over and may not overlap.
  bool end(int id);

  /// True if none is running, of which some may have failed.
  bool empty();

 private:
  struct Open {
    int id;
    std::weak_ptr<void> alive;
  };
  void drop_failed();
  void check_nested(bool nested);

  bool may_overlap_;
  bool overlapped_ = false;  // until all that were running then are over
  std::vector<Open> open_;   // in the order of their first gradients
};

}  // namespace tessera
