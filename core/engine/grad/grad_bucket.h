#pragma once

#include <cstdint>
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

/// Starts reducing the gradients that have arrived for these units, in one collective. All ranks
/// must call it.
///
/// See [Note: Layout of a bucket] in grad_bucket.cpp.
void launch_together(const std::vector<UnitGradients*>& units, std::string_view subject);

}  // namespace tessera
