#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/div.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/log.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <limits>

#include "tensor/decompositions.h"
#include "tensor/rules.h"

namespace tessera {
namespace {

bool keeps_dims(const DecomposedCall& call) {
  const c10::IValue* const keepdim = call.find("keepdim");
  return keepdim && keepdim->toBool();
}

// The dtype asked for, or `own`.
at::ScalarType result_dtype(const DecomposedCall& call, at::ScalarType own) {
  const c10::IValue* const dtype = call.find("dtype");
  return dtype && !dtype->isNone() ? dtype->toScalarType() : own;
}

int64_t count(const at::Tensor& tensor, const std::vector<int64_t>& dims) {
  int64_t result = 1;
  for (const int64_t dim : dims) result *= tensor.size(dim);
  return result;
}

// True if one of `dims` is cut and `counts` holds for its size and the number of ranks.
template <class Counts>
bool is_any_cut(const at::Tensor& tensor, const std::vector<int64_t>& dims, Counts counts) {
  const DistMeta* const meta = find_dist_meta(tensor);
  return meta && std::ranges::any_of(dims, [&](int64_t dim) {
           return counts(tensor.size(dim), meta->spec->mesh.size()) && is_cut_along(tensor, dim);
         });
}

// Means of parts of different sizes have different weights.
bool uneven_mean(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const auto dims = named_dims(call.find("dim"), self.dim());
  const at::ScalarType dtype = result_dtype(call, self.scalar_type());
  const bool is_uneven =
      is_any_cut(self, dims, [](int64_t size, int64_t ranks) { return size % ranks != 0; });
  if (!is_uneven || !c10::isFloatingType(dtype)) return false;
  const at::Tensor sum = at::sum(self, dims, keeps_dims(call), sum_dtype(dtype));
  return finish(op, stack, {at::div(sum, static_cast<double>(count(self, dims))).to(dtype)});
}

struct Moments {
  at::Tensor mean, variance;
};

// In two passes, by deviations from the mean of all values.
Moments moments(const DecomposedCall& call, const at::Tensor& self,
                const std::vector<int64_t>& dims) {
  const c10::IValue* const given = call.find("correction");
  const double correction = given && !given->isNone() ? given->toScalar().toDouble() : 1;
  const at::Tensor wide = self.to(sum_dtype(self.scalar_type()));
  const at::Tensor mean = at::mean(wide, dims, /*keepdim=*/true);
  const at::Tensor deviation = at::sub(wide, mean);
  const at::Tensor squares = at::sum(at::mul(deviation, deviation), dims, keeps_dims(call));
  const double divisor = std::max(static_cast<double>(count(self, dims)) - correction, 0.0);
  std::vector<int64_t> sizes = squares.sizes().vec();
  return {mean.reshape(sizes).to(self.scalar_type()), at::div(squares, divisor)};
}

template <bool kRoot, bool kWithMean>
bool variance(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const auto dims = named_dims(call.find("dim"), self.dim());
  const bool is_cut = is_any_cut(self, dims, [](int64_t, int64_t) { return true; });
  if (!is_cut || !c10::isFloatingType(self.scalar_type())) return false;
  const Moments found = moments(call, self, dims);
  const at::Tensor result =
      (kRoot ? at::sqrt(found.variance) : found.variance).to(self.scalar_type());
  return kWithMean ? finish(op, stack, {result, found.mean}) : finish(op, stack, {result});
}

// For orders other than 2, whose norm has a rule.
at::Tensor norm_of_order(const at::Tensor& values, double order, const std::vector<int64_t>& dims,
                         bool keeps_dims) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const at::Tensor sizes = at::abs(values);
  if (order == kInfinity) return at::amax(sizes, dims, keeps_dims);
  if (order == -kInfinity) return at::amin(sizes, dims, keeps_dims);
  if (order == 0) return at::sum(at::ne(sizes, 0).to(sizes.scalar_type()), dims, keeps_dims);
  if (order == 1) return at::sum(sizes, dims, keeps_dims);
  return at::pow(at::sum(at::pow(sizes, order), dims, keeps_dims), 1 / order);
}

bool norm(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor self = call.tensor("self");
  const c10::IValue* const given = call.find("p") ? call.find("p") : call.find("ord");
  const double order = given->isNone() ? 2 : given->toScalar().toDouble();
  if (order == 2 || !call.any_not_whole()) return false;
  const at::ScalarType dtype = result_dtype(call, c10::toRealValueType(self.scalar_type()));
  const at::ScalarType wide =
      c10::isComplexType(self.scalar_type()) ? self.scalar_type() : sum_dtype(dtype);
  const auto dims = named_dims(call.find("dim"), self.dim());
  return finish(op, stack, {norm_of_order(self.to(wide), order, dims, keeps_dims(call)).to(dtype)});
}

// Where classes are cut, what ranks send of each row is its maximum and the sum of its
// exponentials.
template <bool kLog>
bool softmax(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor& self = call.values[0].toTensor();
  if (self.numel() == 0 || self.dim() == 0) return false;  // no elements have no maximum
  const int64_t dim = c10::maybe_wrap_dim(call.values[1].toInt(), self.dim());
  if (!is_cut_along(self, dim)) return false;
  const c10::IValue* const widens = call.find("half_to_float");
  const at::ScalarType dtype =
      widens && widens->toBool() ? at::kFloat : result_dtype(call, self.scalar_type());
  const at::Tensor wide = self.to(sum_dtype(dtype));
  const at::Tensor shifted = at::sub(wide, at::amax(wide, {dim}, /*keepdim=*/true));
  const at::Tensor powers = at::exp(shifted), sums = at::sum(powers, {dim}, /*keepdim=*/true);
  return finish(op, stack,
                {(kLog ? at::sub(shifted, at::log(sums)) : at::div(powers, sums)).to(dtype)});
}

template <bool kLog>
bool softmax_backward(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const DecomposedCall call(op, stack);
  const at::Tensor gradient = call.tensor("grad_output"), output = call.tensor("output");
  if (output.dim() == 0) return false;
  const int64_t dim = c10::maybe_wrap_dim(call.argument("dim").toInt(), output.dim());
  if (!is_cut_along(output, dim)) return false;
  const at::ScalarType dtype = call.argument("input_dtype").toScalarType();
  const at::ScalarType wide = sum_dtype(dtype);
  const at::Tensor y = output.to(wide), dy = gradient.to(wide);
  const auto sum = [&](const at::Tensor& x) { return at::sum(x, {dim}, /*keepdim=*/true); };
  return finish(op, stack,
                {(kLog ? at::sub(dy, at::mul(at::exp(y), sum(dy)))
                       : at::mul(y, at::sub(dy, sum(at::mul(dy, y)))))
                     .to(dtype)});
}

constexpr DecompositionEntry kReductions[] = {
    {"_softmax", softmax<false>},
    {"_log_softmax", softmax<true>},
    {"_softmax_backward_data", softmax_backward<false>},
    {"_log_softmax_backward_data", softmax_backward<true>},
    {"mean", uneven_mean},
    {"var", variance<false, false>},
    {"std", variance<true, false>},
    {"var_mean", variance<false, true>},
    {"std_mean", variance<true, true>},
    {"norm", norm},
    {"linalg_vector_norm", norm},
};

}  // namespace

std::span<const DecompositionEntry> reduction_decompositions() { return kReductions; }

}  // namespace tessera
