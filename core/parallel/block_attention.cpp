#include "parallel/block_attention.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "base/device/device.h"

namespace tessera {
namespace {

constexpr int64_t kMostScores = int64_t{1} << 24;

// The heads of q that share a head of k and v, as a dim of their own. So no head is repeated in
// memory: the copies of a head of k are a dim of stride 0.
class HeadGroups {
 public:
  HeadGroups(const at::Tensor& q, const at::Tensor& k)
      : batch_(q.size(0)), heads_(k.size(1)), members_(q.size(1) / k.size(1)) {}

  at::Tensor of_queries(const at::Tensor& tensor) const {
    if (members_ == 1) return tensor;
    return tensor.unflatten(1, {heads_, members_}).flatten(0, 1);
  }
  at::Tensor of_keys(const at::Tensor& tensor) const {
    if (members_ == 1) return tensor;
    return tensor.flatten(0, 1).unsqueeze(1).expand({-1, members_, -1, -1});
  }
  at::Tensor queries(const at::Tensor& grouped) const {
    if (members_ == 1) return grouped;
    return grouped.unflatten(0, {batch_, heads_}).flatten(1, 2);
  }
  // Adds up the gradients of the copies of each head.
  at::Tensor keys(const at::Tensor& grouped) const {
    if (members_ == 1) return grouped;
    return grouped.sum({1}, /*keepdim=*/false, attention_sum_dtype(grouped))
        .unflatten(0, {batch_, heads_});
  }

 private:
  const int64_t batch_, heads_, members_;
};

bool has_flash_kernel(const at::Tensor& q, const at::Tensor& v) {
  const at::ScalarType dtype = q.scalar_type();
  const bool is_known =
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
  return is_host(q.device()) && is_known && q.size(3) == v.size(3);
}

// The flash kernel reads the elements of a head as adjacent, whatever their stride is.
at::Tensor with_adjacent(const at::Tensor& tensor) {
  return tensor.stride(3) == 1 ? tensor : tensor.contiguous();
}

// The attention as a sequence of operators that any device has, for some rows of the scores at a
// time, so that memory is bounded.
class AttentionByOperators {
 public:
  AttentionByOperators(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       bool is_causal, double scale)
      : dtype_(attention_sum_dtype(q)),
        q_(q.to(dtype_)),
        k_(k.to(dtype_)),
        v_(v.to(dtype_)),
        is_causal_(is_causal),
        scale_(scale) {}

  BlockAttention forward() const {
    std::vector<int64_t> sizes = q_.sizes().vec();
    const at::Tensor logsumexp = at::empty({sizes[0], sizes[1], sizes[2]}, q_.options());
    sizes[3] = v_.size(3);
    const at::Tensor output = at::empty(sizes, q_.options());
    for_each_rows([&](int64_t begin, int64_t count) {
      const at::Tensor scores = scores_of(begin, count);
      const at::Tensor sums = scores.logsumexp({-1}, /*keepdim=*/true);
      output.narrow(2, begin, count).copy_(scores.sub_(sums).exp_().matmul(v_));
      logsumexp.narrow(2, begin, count).copy_(sums.squeeze(-1));
    });
    return {output, logsumexp};
  }

  AttentionGradients backward(const at::Tensor& whole_gradient, const BlockAttention& whole) const {
    const AttentionGradients sums{at::empty(q_.sizes(), q_.options()),
                                  at::zeros(k_.sizes(), k_.options()),
                                  at::zeros(v_.sizes(), v_.options())};
    for_each_rows([&](int64_t begin, int64_t count) {
      const auto rows = [&](const at::Tensor& tensor) { return tensor.narrow(2, begin, count); };
      const at::Tensor gradient = rows(whole_gradient).to(dtype_);
      const at::Tensor shares =
          scores_of(begin, count).sub_(rows(whole.logsumexp).unsqueeze(-1)).exp_();
      sums.v.add_(shares.transpose(-2, -1).matmul(gradient));
      // The softmax subtracts the mean of the gradients of all its shares: their product with the
      // whole output, as the sum over all keys.
      const at::Tensor mean = gradient.mul(rows(whole.output).to(dtype_)).sum({-1}, true);
      const at::Tensor of_scores =
          gradient.matmul(v_.transpose(-2, -1)).sub_(mean).mul_(shares).mul_(scale_);
      rows(sums.q).copy_(of_scores.matmul(k_));
      sums.k.add_(of_scores.transpose(-2, -1).matmul(rows(q_)));
    });
    return sums;
  }

 private:
  template <class F>
  void for_each_rows(F&& f) const {
    const int64_t row = q_.size(0) * q_.size(1) * k_.size(2);
    const int64_t most = std::max<int64_t>(1, kMostScores / row);
    for (int64_t begin = 0; begin < q_.size(2); begin += most)
      f(begin, std::min(most, q_.size(2) - begin));
  }

  at::Tensor scores_of(int64_t begin, int64_t count) const {
    const at::Tensor scores = q_.narrow(2, begin, count).matmul(k_.transpose(-2, -1)).mul_(scale_);
    if (!is_causal_) return scores;
    const at::Tensor is_later =
        at::ones({count, k_.size(2)}, scores.options().dtype(at::kBool)).triu(begin + 1);
    return scores.masked_fill_(is_later, -std::numeric_limits<double>::infinity());
  }

  const at::ScalarType dtype_;
  const at::Tensor q_, k_, v_;
  const bool is_causal_;
  const double scale_;
};

BlockAttention attend_grouped(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              bool is_causal, double scale) {
  if (!has_flash_kernel(q, v)) return AttentionByOperators(q, k, v, is_causal, scale).forward();
  const auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      with_adjacent(q), with_adjacent(k), with_adjacent(v), /*dropout_p=*/0.0, is_causal,
      /*attn_mask=*/{}, scale);
  return {output, logsumexp};
}

AttentionGradients attend_grouped_backward(const at::Tensor& gradient, const at::Tensor& q,
                                           const at::Tensor& k, const at::Tensor& v,
                                           const BlockAttention& whole, bool is_causal,
                                           double scale) {
  if (!has_flash_kernel(q, v))
    return AttentionByOperators(q, k, v, is_causal, scale).backward(gradient, whole);
  auto [of_q, of_k, of_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      with_adjacent(gradient), with_adjacent(q), with_adjacent(k), with_adjacent(v),
      with_adjacent(whole.output), whole.logsumexp, /*dropout_p=*/0.0, is_causal, /*attn_mask=*/{},
      scale);
  return {std::move(of_q), std::move(of_k), std::move(of_v)};
}

}  // namespace

at::ScalarType attention_sum_dtype(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

BlockAttention attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool is_causal,
                      double scale) {
  const HeadGroups groups(q, k);
  const auto [output, logsumexp] =
      attend_grouped(groups.of_queries(q), groups.of_keys(k), groups.of_keys(v), is_causal, scale);
  return {groups.queries(output), groups.queries(logsumexp)};
}

AttentionGradients attend_backward(const at::Tensor& gradient, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v,
                                   const BlockAttention& whole, bool is_causal, double scale) {
  const HeadGroups groups(q, k);
  const auto [of_q, of_k, of_v] = attend_grouped_backward(
      groups.of_queries(gradient), groups.of_queries(q), groups.of_keys(k), groups.of_keys(v),
      {groups.of_queries(whole.output), groups.of_queries(whole.logsumexp)}, is_causal, scale);
  return {groups.queries(of_q), groups.keys(of_k), groups.keys(of_v)};
}

}  // namespace tessera
