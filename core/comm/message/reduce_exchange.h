#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "comm/group/local_sum.h"
#include "comm/message/block_pool.h"
#include "comm/message/exchange.h"

namespace tessera {

/// The part of the flat buffer that one rank reduces.
struct FlatRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// The task of a reduction.
struct ReduceTask {
  std::vector<Piece> pieces;
  std::vector<FlatRange> ranges;  ///< per rank
  at::Tensor out;                 ///< receives this rank's range
  LocalReduction reduction;
  int tag = 0;
  Encoding encoding = Encoding::kPlain;         ///< of the messages
  std::shared_ptr<at::Tensor> error = nullptr;  ///< see `ReduceScatterOptions::error`
  /// The tag of a second part: each rank sends its reduced range to all others. `out` then has room
  /// for all ranges.
  std::optional<int> gather_tag = std::nullopt;
};

/// Starts a reduction: each rank sends every other rank its data in that rank's range, and reduces
/// its own range. Posts the first receives and all sends; `run()` of the result does the rest.
///
/// Messages are short, and a few from each peer are received at once, into blocks of the pool. So
/// summing overlaps with receiving, reads data that is still in the cache, and needs little memory,
/// however large the tensors are. Encoded messages are decoded where they are summed, a few blocks
/// at a time.
std::shared_ptr<Exchange> start_reduction(CollectiveName name, std::chrono::milliseconds timeout,
                                          std::shared_ptr<BlockPool> pool, const Mailbox& mailbox,
                                          ReduceTask task);

}  // namespace tessera
