#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "tensor/chunks.h"
#include "tensor/dist_meta.h"

namespace tessera {

/// The elements of a tensor that a rank has, as ranges of the tensor's elements in row-major order.
/// In this order they are the elements of the rank's part, one after the other: also if the part
/// consists of several blocks of a dim.
class OwnedRuns {
 public:
  /// This rank must be in the mesh of `spec`.
  OwnedRuns(const DistSpec& spec, at::IntArrayRef sizes);

  /// Returns the next range; nullopt after the last. Ranges are not empty, and in order.
  std::optional<Range> next();

 private:
  void advance();

  std::vector<std::vector<Range>> blocks_;  ///< per dim, up to the last one that is cut
  std::vector<int64_t> strides_;            ///< of these dims
  std::vector<size_t> block_;               ///< the current block of each dim
  std::vector<int64_t> index_;              ///< the current index of each dim but the last
  bool is_done_ = false;
};

}  // namespace tessera
