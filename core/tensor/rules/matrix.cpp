#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "tensor/rules.h"

namespace tessera {
namespace {

// Rows of `a` give rows of the product, columns of `b` give its columns; where the summed dim is
// cut, every rank has a term. A product is linear in each factor.
Strategies mm(const OpCall& call) {
  return {
      {{Shard{0}, Replicate{}}, {Shard{0}}}, {{Replicate{}, Shard{1}}, {Shard{1}}},
      {{Shard{1}, Shard{0}}, {kSum}},        {{kSum, Replicate{}}, {kSum}},
      {{Replicate{}, kSum}, {kSum}},
  };
}

Strategies bmm(const OpCall& call) {
  return {
      {{Shard{0}, Shard{0}}, {Shard{0}}},    {{Shard{1}, Replicate{}}, {Shard{1}}},
      {{Replicate{}, Shard{2}}, {Shard{2}}}, {{Shard{2}, Shard{1}}, {kSum}},
      {{kSum, Replicate{}}, {kSum}},         {{Replicate{}, kSum}, {kSum}},
  };
}

Strategies mv(const OpCall& call) {
  return {
      {{Shard{0}, Replicate{}}, {Shard{0}}},
      {{Shard{1}, Shard{0}}, {kSum}},
      {{kSum, Replicate{}}, {kSum}},
      {{Replicate{}, kSum}, {kSum}},
  };
}

Strategies dot(const OpCall& call) {
  return {
      {{Shard{0}, Shard{0}}, {kSum}}, {{kSum, Replicate{}}, {kSum}}, {{Replicate{}, kSum}, {kSum}}};
}

Strategies outer(const OpCall& call) {
  return {
      {{Shard{0}, Replicate{}}, {Shard{0}}},
      {{Replicate{}, Shard{0}}, {Shard{1}}},
      {{kSum, Replicate{}}, {kSum}},
      {{Replicate{}, kSum}, {kSum}},
  };
}

// `added` plus a product: as the product, except that terms of the product need terms of `added`.
Strategies with_added(const OpCall& call, Strategies products) {
  Strategies ways;
  for (Strategy& way : products) {
    const Placement& output = way.outputs[0];
    const auto* const shard = std::get_if<Shard>(&output);
    const Placement added =
        shard ? placed_under(call.inputs[0], shard->dim, call.outputs[0]) : output;
    ways.push_back({{added, way.inputs[0], way.inputs[1]}, {output}});
  }
  return ways;
}

Strategies addmm(const OpCall& call) { return with_added(call, mm(call)); }
Strategies baddbmm(const OpCall& call) { return with_added(call, bmm(call)); }
Strategies addmv(const OpCall& call) { return with_added(call, mv(call)); }
Strategies addr(const OpCall& call) { return with_added(call, outer(call)); }

// A product of factors in a short format, multiplied by scales: one for each factor, or one for
// each row of `self` and each column of `mat2`. Terms would have to be added in a wider format.
Strategies scaled_mm(const OpCall& call) {
  const auto scaled = [&](std::string_view name, int64_t dim) {
    const TensorInfo& scale = call.inputs[call.input(name)];
    return scale.ndim() == 2 && scale.sizes[dim] > 1 ? Placement(Shard{dim}) : Replicate{};
  };
  const auto is_by_block = [&](std::string_view name, int64_t inner) {
    const TensorInfo& scale = call.inputs[call.input(name)];
    return scale.ndim() == 2 && scale.sizes[inner] > 1;
  };
  if (is_by_block("scale_a", 1) || is_by_block("scale_b", 0)) return {};
  return {
      {placed_by_name(call, {{"self", Shard{0}}, {"scale_a", scaled("scale_a", 0)}}), {Shard{0}}},
      {placed_by_name(call,
                      {{"mat2", Shard{1}}, {"scale_b", scaled("scale_b", 1)}, {"bias", Shard{0}}}),
       {Shard{1}}}};
}

// Products of groups: a matrix whose rows (or summed columns) are in groups that end at `offs`, or
// a batch of matrices, one for each group. Groups are not cut.
Strategies grouped_mm(const OpCall& call) {
  if (call.input("bias") >= 0) return {};
  const int64_t a = call.inputs[0].ndim(), b = call.inputs[1].ndim();
  const Shard rows{a - 2}, columns{b - 1}, out_rows{call.outputs[0].ndim() - 2},
      out_columns{call.outputs[0].ndim() - 1};
  const auto given = [&](const Placement& self, const Placement& mat2) {
    return placed_by_name(call, {{"self", self}, {"mat2", mat2}});
  };
  Strategies ways = {{given(kSum, Replicate{}), {kSum}}, {given(Replicate{}, kSum), {kSum}}};
  // A factor of two dims beside one of three has its groups along the rows, or along the columns.
  if (a == 3 || b == 2) ways.push_back({given(rows, Replicate{}), {out_rows}});
  if (b == 3 || a == 2) ways.push_back({given(Replicate{}, columns), {out_columns}});
  if (a == 3 || b == 3) ways.push_back({given(Shard{a - 1}, Shard{b - 2}), {kSum}});
  if (a == 3 && b == 3) ways.push_back({given(Shard{0}, Shard{0}), {Shard{0}}});
  return ways;
}

// The kernel takes matrices whose rows, or columns, begin at multiples of these bytes.
constexpr int64_t kAlignment = 16;

bool has_columns(const at::Tensor& x) {
  return x.stride(-2) == 1 && x.stride(-1) >= std::max<int64_t>(x.size(-2), 1);
}

bool is_aligned(const at::Tensor& x) {
  const int64_t across = x.stride(has_columns(x) ? -1 : -2);
  const bool has_either =
      has_columns(x) || (x.stride(-1) == 1 && across >= std::max<int64_t>(x.size(-1), 1));
  return has_either && across * x.element_size() % kAlignment == 0;
}

// Checks the whole factors: parts may fit on some ranks where these don't.
std::vector<TensorInfo> grouped_mm_sizes(const OpCall& call) {
  const at::Tensor a = call.argument("self").toTensor(), b = call.argument("mat2").toTensor();
  const int64_t groups = call.input("offs") < 0 ? 0 : call.argument("offs").toTensor().numel();
  const auto has_dims = [](const at::Tensor& x) { return x.dim() == 2 || x.dim() == 3; };
  const bool both = has_dims(a) && has_dims(b);
  const int64_t of_a = both && a.dim() == 3 ? a.size(0) : groups;
  const int64_t of_b = both && b.dim() == 3 ? b.size(0) : groups;
  TORCH_CHECK_VALUE(
      both && a.size(-1) == b.size(-2) && of_a == of_b && is_aligned(a) && is_aligned(b),
      "[_grouped_mm] factors must have 2 dims, of which `offs` says the groups, or 3 with as many "
      "groups, the same summed dim, and rows or columns that are multiples of ",
      kAlignment, " bytes; got sizes ", a.sizes(), " and ", b.sizes(), ", strides ", a.strides(),
      " and ", b.strides(), ", ", groups, " groups by `offs`");
  TensorInfo output{{a.size(-2), b.size(-1)}};
  if (a.dim() == b.dim()) output.sizes.insert(output.sizes.begin(), of_a);
  return {output};
}

// Rows of a part may begin anywhere.
at::Tensor aligned(const at::Tensor& part) {
  const bool begins = reinterpret_cast<uintptr_t>(part.const_data_ptr()) % kAlignment == 0;
  if (is_aligned(part) && begins) return part;
  const at::Tensor rows = has_columns(part) ? part.mT() : part;
  const int64_t step = kAlignment / part.element_size();
  auto sizes = rows.sizes().vec();
  sizes.back() = (sizes.back() / step + 1) * step;
  const at::Tensor made = at::empty(sizes, part.options()).narrow(-1, 0, rows.size(-1)).copy_(rows);
  return has_columns(part) ? made.mT() : made;
}

void local_grouped_mm(const c10::OperatorHandle& op, const std::vector<LocalPart>&,
                      torch::jit::Stack& stack) {
  for (const size_t factor : {0, 1}) stack[factor] = aligned(stack[factor].toTensor());
  op.callBoxed(stack);
}

std::vector<TensorInfo> mv_sizes(const OpCall& call) { return {{{call.inputs[0].sizes[0]}}}; }
std::vector<TensorInfo> addr_sizes(const OpCall& call) {
  return {{{call.inputs[1].sizes[0], call.inputs[2].sizes[0]}}};
}
std::vector<TensorInfo> dot_sizes(const OpCall& call) { return {TensorInfo{}}; }

constexpr auto kMatrixRules = with_splits({
    {"mm", mm},
    {"addmm", addmm},
    {"addmm_", addmm},
    {"bmm", bmm},
    {"baddbmm", baddbmm},
    {"baddbmm_", baddbmm},
    {"_scaled_mm", scaled_mm},
    {.name = "_grouped_mm",
     .rule = grouped_mm,
     .sizes = grouped_mm_sizes,
     .local = local_grouped_mm,
     .splits = true,
     .knows_sizes = true},
    {"mv", mv, mv_sizes},
    {"addmv", addmv},
    {"dot", dot, dot_sizes},
    {"addr", addr, addr_sizes},
});

}  // namespace

std::span<const RuleEntry> matrix_rules() { return kMatrixRules; }

}  // namespace tessera
