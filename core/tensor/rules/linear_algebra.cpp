#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Factorizations, solutions and functions of matrices, and Fourier transforms. A matrix is never
// cut: ranks have different matrices of a batch.

// True if all inputs have the dims of the batch in front: no broadcasting.
bool have_batch(const OpCall& call, int64_t dims) {
  const auto& first = call.inputs[0].sizes;
  return std::ranges::all_of(call.inputs, [&](const TensorInfo& input) {
    return input.ndim() >= dims &&
           std::equal(first.begin(), first.begin() + dims, input.sizes.begin());
  });
}

// Outputs that were not asked for are empty and have no batch.
Placement cut_if_batch(const TensorInfo& output, int64_t dim, int64_t size) {
  const bool has_it = output.ndim() > dim && output.sizes[dim] == size;
  return has_it ? Placement(Shard{dim}) : Replicate{};
}

// For a first input of [batch dims..., rows, columns].
Strategies by_matrix(const OpCall& call) {
  const int64_t batch = call.inputs[0].ndim() - 2;
  Strategies ways;
  if (batch <= 0 || !have_batch(call, batch)) return ways;
  for (int64_t d = 0; d < batch; ++d) {
    const int64_t size = call.inputs[0].sizes[d];
    if (!call.reaches_all(size)) continue;
    Strategy way{Placements(call.inputs.size(), Shard{d}), {}};
    for (const TensorInfo& output : call.outputs)
      way.outputs.push_back(cut_if_batch(output, d, size));
    ways.push_back(std::move(way));
  }
  return ways;
}

// Two tensors of vectors along `dim`; they broadcast. Linear in each.
Strategies cross(const OpCall& call) {
  const TensorInfo& output = call.outputs[0];
  const int64_t dim = call.dim("dim", output.ndim());
  Strategies ways;
  for (int64_t d = 0; d < output.ndim(); ++d) {
    if (d != dim) ways.push_back({inputs_under(call, d, output), {Shard{d}}});
  }
  ways.push_back({{kSum, Replicate{}}, {kSum}});
  ways.push_back({{Replicate{}, kSum}, {kSum}});
  return ways;
}

// Linear; along other dims than those of the argument `dim`, transforms are independent.
Strategies transform(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  const auto transformed = named_dims(call.find("dim"), ndim, /*empty_is_all=*/false);
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    const bool is_whole = std::ranges::find(transformed, d) != transformed.end();
    if (!is_whole && call.reaches_all(call.inputs[0].sizes[d])) ways.push_back(all_cut(call, d));
  }
  add_sums(ways, call);
  return ways;
}

std::vector<TensorInfo> half_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0];
  int64_t& last =
      output.sizes[c10::maybe_wrap_dim(call.argument("dim").toIntVector().back(), output.ndim())];
  if (call.argument("onesided").toBool()) last = last / 2 + 1;
  return {output};
}

std::vector<TensorInfo> real_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0];
  output.sizes[c10::maybe_wrap_dim(call.argument("dim").toIntVector().back(), output.ndim())] =
      call.argument("last_dim_size").toInt();
  return {output};
}

// Sizes of the outputs, where LibTorch can't compute the operator on meta tensors.

std::vector<TensorInfo> like_last(const OpCall& call) { return {call.inputs.back()}; }

std::vector<TensorInfo> like_first_and_reflectors(const OpCall& call) {
  TensorInfo reflectors = call.inputs[0];
  const int64_t columns = reflectors.sizes.back();
  reflectors.sizes.pop_back();
  reflectors.sizes.back() = std::min(reflectors.sizes.back(), columns);
  return {call.inputs[0], reflectors};
}

std::vector<TensorInfo> eigenvalue_sizes(const OpCall& call) {
  TensorInfo values = call.inputs[0];
  values.sizes.pop_back();
  return {values, call.inputs[0]};
}

std::vector<TensorInfo> transposed_sizes(const OpCall& call) {
  TensorInfo output = call.inputs[0];
  std::swap(output.sizes[output.ndim() - 2], output.sizes[output.ndim() - 1]);
  return {output};
}

// The kernel factorizes the transposed matrices if the layout of its input suggests that, and the
// backward concludes from the layout of the whole tensor which ones it has factorized.
void local_determinant(const c10::OperatorHandle& op, const std::vector<LocalPart>& parts,
                       torch::jit::Stack& stack) {
  const at::Tensor part = stack[0].toTensor();
  if (!parts[0].is_contiguous && part.is_contiguous()) stack[0] = part.mT().contiguous().mT();
  op.callBoxed(stack);
}

std::vector<RuleEntry> make_linear_algebra_rules() {
  std::vector<RuleEntry> rules = {
      {"linalg_cross", cross},
      {"_fft_c2c", transform, like_first},
      {"_fft_r2c", transform, half_sizes},
      {"_fft_c2r", transform, real_sizes},
  };
  for (const auto& [name, sizes] : std::initializer_list<std::pair<const char*, OutputSizes>>{
           {"cholesky", like_first},
           {"cholesky_inverse", like_first},
           {"cholesky_solve", like_first},
           {"geqrf", like_first_and_reflectors},
           {"linalg_eig", eigenvalue_sizes},
           {"linalg_householder_product", like_first},
           {"linalg_matrix_exp", like_first},
           {"linalg_pinv", transposed_sizes},
           {"linalg_solve_triangular", like_second},
           {"ormqr", like_last},
       })
    rules.push_back({name, by_matrix, sizes});
  for (const auto name :
       {"_linalg_eigh", "_linalg_solve_ex", "_linalg_svd", "linalg_cholesky_ex", "linalg_inv_ex",
        "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lu", "linalg_lu_factor_ex",
        "linalg_lu_solve", "linalg_qr", "lu_unpack", "triangular_solve"})
    rules.push_back({name, by_matrix});
  for (const auto name : {"_linalg_det", "_linalg_slogdet"})
    rules.push_back({.name = name, .rule = by_matrix, .local = local_determinant});
  for (RuleEntry& rule : rules) rule.splits = true;
  return rules;
}

}  // namespace

std::span<const RuleEntry> linear_algebra_rules() {
  static const auto* const rules = new std::vector<RuleEntry>(make_linear_algebra_rules());
  return *rules;
}

}  // namespace tessera
