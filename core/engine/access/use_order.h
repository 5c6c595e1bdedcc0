#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

namespace tessera {

/// Unit indices in order of use; no two neighbours are equal.
using UseOrder = std::vector<int>;

/// Appends `unit` unless it is already the last one.
void append_use(UseOrder& order, int unit);

/// Merges `orders`, two at a time, into the shortest order that contains each of them as a
/// subsequence. The result depends on the argument alone, so ranks that exchanged their orders
/// agree on it.
UseOrder merge_orders(const std::vector<UseOrder>& orders);

/// The uses of one training pass.
struct PassOrder {
  UseOrder forward, backward;

  /// The whole pass.
  UseOrder joined() const;
  bool operator==(const PassOrder&) const = default;
};

/// The order assumed before any pass was recorded: registration order, then its reverse.
PassOrder registration_order(int units);

/// Inserts the units of `all` that `pass` lacks next to their neighbours in `known`, an order of
/// forward, so that a rank that uses one of them finds it where the other ranks expect it.
void insert_missing(PassOrder& pass, const std::vector<int>& all, const UseOrder& known);

/// Returns the shortest order that contains each of `orders` as a subsequence, if the n-th use of a
/// unit is one place for all of them, for each n; nothing if they contradict each other then. What
/// they leave open is as in `known`.
std::optional<UseOrder> sort_uses(const std::vector<UseOrder>& orders, const UseOrder& known);

/// The orders in which the ranks used units in the passes from which they learned last.
class OrderHistory {
 public:
  /// Adds a pass: the order of each rank. If the ranks do not differ, earlier passes are forgotten:
  /// what one rank did in them says nothing about another.
  void add(std::vector<PassOrder> ranks);
  /// Returns an order that contains that of each rank in the latest pass, and in as many passes
  /// before it as do not contradict it. What they leave open is as in `known`.
  PassOrder merged(const PassOrder& known) const;

 private:
  std::deque<std::vector<PassOrder>> passes_;  // the latest first
};

/// Returns all units, sorted by their last entry in `arrivals` of gradients: then a unit's
/// gradients are complete. Units that it lacks come last, in reverse registration.
std::vector<int> reduction_order(const UseOrder& arrivals, int units);
/// Returns the same for a backward that nobody has seen: it completes units in the reverse order of
/// their first uses in `forward`.
std::vector<int> expected_reduction_order(const UseOrder& forward, int units);

/// The actions at one position of the order: first free, then gather.
struct ResidencyStep {
  std::vector<int> free;
  std::vector<int> gather;
};

/// Plans which units are in memory at each position of an order of use.
///
/// At position p, the unit used there and those of the next `prefetch` positions are gathered.
/// Others may stay while their bytes sum to at most `resident_bytes` (-1: no limit); the unit whose
/// next use is farthest is freed first (Belady's rule: optimal for equal sizes). Only units with
/// `nbytes > 0` take part.
std::vector<ResidencyStep> plan_residency(const UseOrder& order, const std::vector<int64_t>& nbytes,
                                          int64_t resident_bytes, int prefetch);

/// Returns how many bytes are gathered at each position of such a plan.
std::vector<int64_t> gathered_bytes(const std::vector<ResidencyStep>& steps,
                                    const std::vector<int64_t>& nbytes);

}  // namespace tessera
