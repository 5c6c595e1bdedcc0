#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

// Attention on ordinary tensors of [batch, heads, length, head dim], none of them empty. k and v
// may have fewer heads than q: each of them then serves as many consecutive heads of q.

/// The attention of queries to some of the keys, as if there were no others.
struct BlockAttention {
  at::Tensor output;
  /// The logsumexp of each query's scores, [batch, heads, queries], in the dtype of sums.
  at::Tensor logsumexp;
};

/// Gradients in the dtypes of their tensors, or in that of sums.
struct AttentionGradients {
  at::Tensor q, k, v;
};

/// Float, or double for doubles.
at::ScalarType attention_sum_dtype(const at::Tensor& tensor);

/// If `is_causal`, query i attends to the keys 0 to i, and there are as many queries as keys.
BlockAttention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                      double scale);

/// Returns the contributions of these keys to the gradients, if `whole` is the attention of the
/// queries to all keys, and `gradient` that of its output.
AttentionGradients attend_backward(const at::Tensor& gradient, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v,
                                   const BlockAttention& whole, bool is_causal, double scale);

}  // namespace tessera
