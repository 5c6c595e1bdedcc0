#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace tessera {

/// New values for a range of a shard, still to be computed: elementwise, from the range itself and
/// from tensors of as many elements beside it, which may change, too. Plain data, as it is copied
/// into shared memory: any rank of the host may compute it, by the rule of this number.
struct ShardUpdate {
  static constexpr size_t kTensors = 5, kNumbers = 7;

  int64_t begin = 0, numel = 0;  ///< elements of the flat buffer
  at::ScalarType dtype = at::kFloat;
  int rule = 0;
  /// The first is the range itself, and null until somebody computes; others that are null are not
  /// used.
  std::array<std::byte*, kTensors> tensors{};
  std::array<double, kNumbers> numbers{};  ///< what they say is the rule's matter
};

static_assert(std::is_trivially_copyable_v<ShardUpdate>);

/// Computes updates whose tensors are all given at addresses of this process.
using UpdateRule = void (*)(std::span<const ShardUpdate> updates);

/// Gives a rule its number, the same in all processes; before anything else is done with it.
void set_update_rule(int number, UpdateRule rule);
void compute(std::span<const ShardUpdate> updates);

/// Updates that the next gather of a shard is to wait for. Of one rank.
struct PendingUpdates {
  std::vector<ShardUpdate> updates;
  std::vector<at::Tensor> kept;  ///< own the memory that the updates read and write
};

}  // namespace tessera
