#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/grad/unit_gradients.h"

namespace tessera {

/// Units whose gradients are reduced in one collective.
struct GradBucket {
  std::vector<size_t> units;  ///< indices
  std::string name;           ///< for messages
};

/// Cuts an order of units into buckets of at most `nbytes` bytes of gradients as they are sent; 0:
/// each unit by itself. The units of a bucket follow one another in the order, and agree in dtypes
/// and device. A unit that was frozen when it was sharded, or that is each rank's own, is a bucket
/// by itself.
std::vector<GradBucket> cut_buckets(const std::vector<const UnitLayout*>& units,
                                    const std::vector<int>& order, int64_t nbytes);

/// The order in which a model's units are reduced, in buckets, and how far a backward has come.
class BucketOrder {
 public:
  /// `order`: a permutation of the units.
  void set(std::vector<int> order, const AllGradients& gradients, int64_t bucket_bytes);
  const std::vector<int>& units() const { return units_; }
  /// Bytes of the largest bucket.
  int64_t largest() const { return largest_; }

  /// Returns the first bucket that was not passed yet; null after the last one.
  const GradBucket* next() const { return next_ < buckets_.size() ? &buckets_[next_] : nullptr; }
  void pass() { ++next_; }
  void restart() { next_ = 0; }

  /// Returns a copy of a bucket's name that lives as long as this, for collectives in flight.
  std::string_view lasting(const std::string& name) { return *names_.insert(name).first; }

 private:
  std::vector<int> units_;
  std::vector<GradBucket> buckets_;  // runs of that order
  int64_t largest_ = 0;
  size_t next_ = 0;
  std::set<std::string> names_;
};

/// Starts reducing the gradients that have arrived for these units, in one collective. All ranks
/// must call it.
///
/// See [Note: Layout of a bucket] in grad_bucket.cpp.
void launch_together(const std::vector<UnitGradients*>& units, std::string_view subject);

}  // namespace tessera
