#pragma once

#include <tessera/comm/process_group.h>
#include <tessera/parallel/context_parallel.h>

#include <cstdint>

#include "parallel/block_attention.h"

namespace tessera {

/// One attention whose sequence is cut over the ranks of a line.
struct RingAttention {
  ProcessGroupPtr line;
  int64_t keys = 0;  ///< of all ranks
  bool is_causal = false;
  bool is_balanced = false;  ///< the order of the sequence is that of `balance_sequence()`
  RotateMethod rotate = RotateMethod::kRing;
  double scale = 1;
};

/// Returns the attention of this rank's queries to the keys of all ranks, given each rank's part of
/// the sequence. Collective over the line.
BlockAttention ring_attend(const RingAttention& ring, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v);

/// Returns the gradients of this rank's q, k and v, if `whole` is the result of `ring_attend()` and
/// `gradient` that of its output. Collective over the line.
AttentionGradients ring_attend_backward(const RingAttention& ring, const at::Tensor& gradient,
                                        const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const BlockAttention& whole);

}  // namespace tessera
