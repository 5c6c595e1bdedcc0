#include "parallel/ring_attention.h"

#include <ATen/ops/logaddexp.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <vector>

#include "parallel/ring_blocks.h"
#include "tensor/chunks.h"

namespace tessera {
namespace {

// The part of a step that isn't masked: some of this rank's queries, some keys of the block.
struct UnmaskedPart {
  Range queries, keys;
  bool is_causal = false;  // of equally many queries and keys
};

// [Note: Balanced order]
//
// In a causal attention, the rank with the last part of the sequence attends to all blocks, and
// that with the first part to its own only. In balanced order, each of k ranks has two of 2k
// chunks, one from the front and one from the back: chunks i and 2k - 1 - i. Its own block is then
// masked as ever, since its positions ascend. To a block of a rank before it, all of its queries
// attend, but only to the front chunk; to a block of a rank behind it, only the queries of the back
// chunk, but to all keys. Both are half of a block, so in each step all ranks compute as much.
std::optional<UnmaskedPart> unmasked_part(const RingAttention& ring, int owner, int64_t queries,
                                          int64_t keys) {
  UnmaskedPart part{{0, queries}, {0, keys}};
  const int rank = ring.line->rank();
  if (ring.is_causal && owner == rank) part.is_causal = true;
  if (ring.is_causal && owner != rank) {
    if (owner < rank && ring.is_balanced) part.keys.end = keys / 2;
    if (owner > rank) part.queries.begin = ring.is_balanced ? queries / 2 : queries;
  }
  return part.queries.size() > 0 && part.keys.size() > 0 ? std::optional(part) : std::nullopt;
}

at::Tensor sequence_rows(const at::Tensor& tensor, const Range& range) {
  return tensor.narrow(2, range.begin, range.size());
}

// The attention to the keys met so far.
class MergedAttention {
 public:
  explicit MergedAttention(at::ScalarType sum_dtype) : sum_dtype_(sum_dtype) {}

  // The first part must be of all queries.
  void add(const Range& queries, BlockAttention part) {
    if (!whole_.output.defined()) {
      whole_ = std::move(part);
      return;
    }
    whole_.output = whole_.output.to(sum_dtype_);
    const at::Tensor sums = sequence_rows(whole_.logsumexp, queries);
    // The part's share of the sum of both exponentials.
    const at::Tensor share = at::sigmoid(part.logsumexp.sub(sums)).unsqueeze(-1);
    sequence_rows(whole_.output, queries).lerp_(part.output.to(sum_dtype_), share);
    sums.copy_(at::logaddexp(sums, part.logsumexp));
  }

  // `q` and `v` are those of this rank: without queries, or a batch, there are no parts.
  BlockAttention result(const at::Tensor& q, const at::Tensor& v) const {
    if (whole_.output.defined()) return {whole_.output.to(q.scalar_type()), whole_.logsumexp};
    std::vector<int64_t> sizes = q.sizes().vec();
    sizes[3] = v.size(3);
    return {at::zeros(sizes, q.options()),
            at::zeros({sizes[0], sizes[1], sizes[2]}, q.options().dtype(sum_dtype_))};
  }

 private:
  const at::ScalarType sum_dtype_;
  BlockAttention whole_;
};

}  // namespace

BlockAttention ring_attend(const RingAttention& ring, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v) {
  ProcessGroup& line = *ring.line;
  const BlockLayout layout({k, v}, ring.keys, line.size());
  const auto blocks = make_block_source(ring.rotate, line, layout, {k, v});
  MergedAttention merged(attention_sum_dtype(q));
  for (int step = 0; step < line.size(); ++step) {
    const KeysValues block = blocks->take(step);
    const auto part = unmasked_part(ring, block_owner(line, step), q.size(2), block.k.size(2));
    if (!part || q.numel() == 0) continue;
    merged.add(part->queries,
               attend(sequence_rows(q, part->queries), sequence_rows(block.k, part->keys),
                      sequence_rows(block.v, part->keys), part->is_causal, ring.scale));
  }
  return merged.result(q, v);
}

AttentionGradients ring_attend_backward(const RingAttention& ring, const at::Tensor& gradient,
                                        const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const BlockAttention& whole) {
  ProcessGroup& line = *ring.line;
  const at::TensorOptions options = q.options().dtype(attention_sum_dtype(q)).requires_grad(false);
  const BlockLayout layout({k, v}, ring.keys, line.size());
  const auto blocks = make_block_source(ring.rotate, line, layout, {k, v});
  const auto gradients = make_block_gradients(ring.rotate, line, layout, options);
  const at::Tensor of_q = at::zeros(q.sizes(), options);
  for (int step = 0; step < line.size(); ++step) {
    const KeysValues block = blocks->take(step);
    const KeysValues sums = gradients->sums(step);
    const auto part = unmasked_part(ring, block_owner(line, step), q.size(2), block.k.size(2));
    if (part && q.numel() > 0) {
      const auto& [queries, keys, is_causal] = *part;
      const auto added = attend_backward(
          sequence_rows(gradient, queries), sequence_rows(q, queries), sequence_rows(block.k, keys),
          sequence_rows(block.v, keys),
          {sequence_rows(whole.output, queries), sequence_rows(whole.logsumexp, queries)},
          is_causal, ring.scale);
      sequence_rows(of_q, queries).add_(added.q);
      sequence_rows(sums.k, keys).add_(added.k);
      sequence_rows(sums.v, keys).add_(added.v);
    }
    gradients->pass_on(step);
  }
  const KeysValues own = gradients->own();
  return {of_q.to(q.scalar_type()), own.k.to(k.scalar_type()), own.v.to(v.scalar_type())};
}

}  // namespace tessera
