#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/process_group.h>
#include <tessera/parallel/context_parallel.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace tessera {

// [Note: Blocks on a ring]
//
// The keys and values of a rank are its block. In step s, a rank has the block of the rank s places
// before it on the line, so in as many steps as there are ranks each meets all blocks. The gradient
// of a block goes around with it, one step later: it is complete when it is back at its rank.
// Blocks are sent while a step computes, so a rank has room for two.

/// Keys and values, or their gradients: each [batch, heads, keys, head dim].
struct KeysValues {
  at::Tensor k, v;
};

/// The layout of the blocks of a line, whose ranks cut `keys` keys as `Shard` does. A block is sent
/// as one flat buffer: its keys, then its values.
class BlockLayout {
 public:
  BlockLayout(const KeysValues& own, int64_t keys, int64_t ranks);

  int64_t numel(int rank) const { return bounds_[rank + 1] - bounds_[rank]; }
  /// The blocks of all ranks, one after the other.
  const std::vector<int64_t>& bounds() const { return bounds_; }
  /// Returns views of the flat buffer of that rank's block.
  KeysValues view(const at::Tensor& flat, int rank) const;

 private:
  std::vector<int64_t> k_sizes_, v_sizes_;  // but for the number of keys
  std::vector<int64_t> lengths_, bounds_;
};

/// Returns the rank whose block is with this rank in `step`.
int block_owner(const ProcessGroup& line, int step);

/// Brings the blocks of all ranks to this one. The ranks of the line call it alike.
class BlockSource {
 public:
  virtual ~BlockSource() = default;
  /// Returns the block of `step`; called once for each step, in order. Waits for the block, and
  /// starts to send it on. The block of step 0 is this rank's own.
  virtual KeysValues take(int step) = 0;
};

std::unique_ptr<BlockSource> make_block_source(RotateMethod rotate, ProcessGroup& line,
                                               const BlockLayout& layout, const KeysValues& own);

/// Adds up the gradients that all ranks have for each block. The ranks of the line call it alike.
class BlockGradients {
 public:
  virtual ~BlockGradients() = default;
  /// Returns the tensors to which the gradients of the block of `step` must be added, before
  /// `pass_on(step)`. Both are called once for each step, in order.
  virtual KeysValues sums(int step) = 0;
  virtual void pass_on(int step) = 0;
  /// Returns the gradients of this rank's block, after the last step.
  virtual KeysValues own() = 0;
};

std::unique_ptr<BlockGradients> make_block_gradients(RotateMethod rotate, ProcessGroup& line,
                                                     const BlockLayout& layout,
                                                     const at::TensorOptions& options);

}  // namespace tessera
