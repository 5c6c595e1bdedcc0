#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Unit indices in order of use; no two neighbours are equal.
using UseOrder = std::vector<int>;

/// Appends `unit` unless it is the last already.
void append_use(UseOrder& order, int unit);

/// The shortest order that contains each of `orders` as a subsequence, merged two at a time; a
/// deterministic function of its argument, so ranks that exchanged their orders agree on the
/// result.
UseOrder merge_orders(const std::vector<UseOrder>& orders);

/// The uses of one training pass.
struct PassOrder {
  UseOrder forward, backward;

  /// The whole pass.
  UseOrder joined() const;
  bool operator==(const PassOrder&) const = default;
};

/// The order assumed before anything is known: registration order, and back.
PassOrder registration_order(int units);

/// Inserts the units of `all` that `pass` lacks beside their neighbours in registration order, so
/// that a rank that uses one of them for the first time finds it where the other ranks expect it.
void insert_missing(PassOrder& pass, const std::vector<int>& all);

/// Units by their last use in backward; those that it does not use come last, in reverse
/// registration.
std::vector<int> reduction_order(const UseOrder& backward, int units);

/// What to do when use reaches a position of the order: first free, then gather.
struct ResidencyStep {
  std::vector<int> free;
  std::vector<int> gather;
};

/// Decides which units are in memory at each position of an order of use.
///
/// At position p, the unit used there and the next `prefetch` others are gathered. Others may stay
/// while their bytes sum to at most `resident_bytes` (-1: no limit); the one whose next use is
/// farthest goes first (Belady's rule, which is optimal for equal sizes). Only units with `nbytes >
/// 0` take part.
std::vector<ResidencyStep> plan_residency(const UseOrder& order, const std::vector<int64_t>& nbytes,
                                          int64_t resident_bytes, int prefetch);

/// How many bytes are gathered at each position of such a plan.
std::vector<int64_t> gathered_bytes(const std::vector<ResidencyStep>& steps,
                                    const std::vector<int64_t>& nbytes);

}  // namespace tessera
