#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/region.h"
#include "mesh/dist_meta.h"
#include "unit/least_loaded.h"

namespace tessera {

/// Returns this rank's part of a DistTensor of these global sizes, in the order of its local part;
/// an empty region without a box if it has none. Throws `c10::NotImplementedError`, naming `name`,
/// for placements that are `Partial`: the terms are not the tensor's values.
Region part_of(const DistSpec& spec, at::IntArrayRef global_sizes, const std::string& name);

/// Lets ranks that have the same values take turns in storing them, to balance the bytes that each
/// stores. All ranks must ask for the same tensors in the same order.
class ReplicaTurns {
 public:
  /// Returns the one of `replicas` equal ranks that stores the next `nbytes`.
  int64_t next(int64_t replicas, int64_t nbytes);

 private:
  std::map<int64_t, LeastLoaded> stored_;  // bytes, by the number of replicas
};

/// The index of this rank among the ranks with equal parts, and their number, along the mesh dims
/// in which a DistTensor is replicated.
struct Replica {
  int64_t index = 0, count = 1;
};
Replica replica_of(const DistSpec& spec);

}  // namespace tessera
