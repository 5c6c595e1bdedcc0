#include <algorithm>

#include "tensor/rules.h"

namespace tessera {
namespace {

// For each dim, whether it is reduced. An empty list names all dims, but none for `any` and `all`.
std::vector<bool> reduced_dims(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  const bool takes_none = call.schema.name() == "aten::any" || call.schema.name() == "aten::all";
  std::vector<bool> reduced(ndim, false);
  for (const int64_t d : named_dims(call.find("dim"), ndim, !takes_none)) reduced[d] = true;
  return reduced;
}

// Dims that are kept stay sharded. Where a reduced dim is cut, ranks have terms of a reduction by
// `op`, if `terms`.
Strategies reduction(const OpCall& call, PartialOp op, bool terms) {
  const int64_t ndim = call.inputs[0].ndim();
  const auto reduced = reduced_dims(call);
  const bool keeps = call.outputs[0].ndim() == ndim;
  Strategies ways;
  int64_t next = 0;
  for (int64_t d = 0; d < ndim; ++d) {
    const int64_t to = keeps ? d : next;
    if (!reduced[d]) {
      ways.push_back({{Shard{d}}, Placements(call.outputs.size(), Shard{to})});
      ++next;
    } else if (terms) {
      ways.push_back({{Shard{d}}, {Partial{op}}});
    }
  }
  return ways;
}

bool is_floating(const OpCall& call) {
  const c10::IValue* const dtype = call.find("dtype");
  return c10::isFloatingType(call.inputs[0].dtype) &&
         (!dtype || dtype->isNone() || c10::isFloatingType(dtype->toScalarType()));
}

// Terms that are rounded to a dtype do not add up to the rounded sum.
Strategies sum(const OpCall& call) {
  Strategies ways = reduction(call, PartialOp::kSum, true);
  const bool is_cast = call.find("dtype") && !call.argument("dtype").isNone();
  if (is_floating(call) || (!is_cast && call.inputs[0].dtype != c10::ScalarType::Bool))
    add_sums(ways, call);
  return ways;
}

// Where the reduced dim is cut evenly, all ranks have means of equally many values.
Strategies mean(const OpCall& call) {
  Strategies ways = reduction(call, PartialOp::kAvg, true);
  std::erase_if(ways, [&](const Strategy& way) {
    const int64_t dim = std::get<Shard>(way.inputs[0]).dim;
    return is_partial(way.outputs[0]) && call.inputs[0].sizes[dim] % call.ranks != 0;
  });
  add_sums(ways, call);
  return ways;
}

// For operators that can't reduce zero elements: no part may be empty.
Strategies of_nonempty(const OpCall& call, PartialOp op) {
  Strategies ways = reduction(call, op, true);
  std::erase_if(ways, [&](const Strategy& way) {
    const int64_t dim = std::get<Shard>(way.inputs[0]).dim;
    return is_partial(way.outputs[0]) && !call.reaches_all(call.inputs[0].sizes[dim]);
  });
  ways.push_back({{Partial{op}}, {Partial{op}}});
  return ways;
}

// The root of the sum of squares; norms of other orders are decomposed.
Strategies norm(const OpCall& call) {
  if (!is_floating(call)) return reduction(call, PartialOp::kNorm, false);
  Strategies ways = reduction(call, PartialOp::kNorm, true);
  ways.push_back({{Partial{PartialOp::kNorm}}, {Partial{PartialOp::kNorm}}});
  return ways;
}

Strategies amax(const OpCall& call) { return of_nonempty(call, PartialOp::kMax); }
Strategies amin(const OpCall& call) { return of_nonempty(call, PartialOp::kMin); }
Strategies prod(const OpCall& call) { return reduction(call, PartialOp::kProd, true); }
Strategies any(const OpCall& call) { return reduction(call, PartialOp::kAny, true); }
Strategies all(const OpCall& call) { return reduction(call, PartialOp::kAll, true); }
Strategies kept_dims(const OpCall& call) { return reduction(call, PartialOp::kSum, false); }

// `max.dim` and `min.dim` also return indices, so the reduced dim must be whole. Without a dim,
// they return the value alone.
Strategies max(const OpCall& call) {
  return call.outputs.size() == 1 ? of_nonempty(call, PartialOp::kMax) : kept_dims(call);
}
Strategies min(const OpCall& call) {
  return call.outputs.size() == 1 ? of_nonempty(call, PartialOp::kMin) : kept_dims(call);
}

// Both extremes at once.
Strategies aminmax(const OpCall& call) {
  Strategies ways = reduction(call, PartialOp::kMax, true);
  std::erase_if(ways, [&](const Strategy& way) {
    const int64_t dim = std::get<Shard>(way.inputs[0]).dim;
    return is_partial(way.outputs[0]) && !call.reaches_all(call.inputs[0].sizes[dim]);
  });
  for (Strategy& way : ways) {
    if (is_partial(way.outputs[0]))
      way.outputs = {Partial{PartialOp::kMin}, Partial{PartialOp::kMax}};
  }
  return ways;
}

// Counts, and sums that are not linear: parts have terms of the sum.
Strategies counted(const OpCall& call) { return reduction(call, PartialOp::kSum, true); }

// The bins depend on all values, unless their range is given.
Strategies histogram(const OpCall& call) {
  if (call.argument("min").toScalar().equal(0) && call.argument("max").toScalar().equal(0))
    return {};
  Strategies ways;
  for (int64_t d = 0; d < call.inputs[0].ndim(); ++d) ways.push_back({{Shard{d}}, {kSum}});
  return ways;
}

std::vector<TensorInfo> bins(const OpCall& call) { return {{{call.argument("bins").toInt()}}}; }

// With a dim they also return positions along it; without one, they need all values.
Strategies selected(const OpCall& call) {
  return call.outputs.size() == 1 ? Strategies() : kept_dims(call);
}

// Puts the gradient of a selected value where it was: the positions are known to all ranks.
Strategies selecting_backward(const OpCall& call) {
  const auto sizes = call.argument("sizes").toIntVector();
  const auto ndim = static_cast<int64_t>(sizes.size());
  if (ndim == 0) return {};
  const int64_t dim = call.dim("dim", ndim);
  const bool keeps = call.argument("keepdim").toBool();
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    const Shard cut{keeps || d < dim ? d : d - 1};
    if (d != dim) ways.push_back({{cut, cut}, {Shard{d}}});
  }
  ways.push_back({{kSum, Replicate{}}, {kSum}});
  return ways;
}

std::vector<TensorInfo> selecting_backward_sizes(const OpCall& call) {
  return {{call.argument("sizes").toIntVector()}};
}

// A running sum; linear.
Strategies scan(const OpCall& call) {
  Strategies ways = along_other_dims(call);
  if (is_floating(call)) add_sums(ways, call);
  return ways;
}

std::vector<TensorInfo> reduced_sizes(const OpCall& call) {
  const auto reduced = reduced_dims(call);
  const c10::IValue* const keepdim = call.find("keepdim");
  const bool keeps = keepdim && keepdim->toBool();
  TensorInfo output;
  for (size_t d = 0; d < reduced.size(); ++d) {
    if (!reduced[d]) output.sizes.push_back(call.inputs[0].sizes[d]);
    if (reduced[d] && keeps) output.sizes.push_back(1);
  }
  return std::vector<TensorInfo>(call.schema.returns().size(), output);
}

// Returns the sizes of one value without a dim; reduced_sizes() would need a dim.
std::vector<TensorInfo> selected_sizes(const OpCall& call) {
  return call.find("dim") ? reduced_sizes(call) : std::vector<TensorInfo>(1);
}

std::vector<TensorInfo> like_first_twice(const OpCall& call) {
  return {call.inputs[0], call.inputs[0]};
}

constexpr auto kReductionRules = with_splits({
    {"sum", sum, reduced_sizes},
    {"mean", mean, reduced_sizes},
    {"amax", amax, reduced_sizes},
    {"amin", amin, reduced_sizes},
    {"max", max, reduced_sizes},
    {"min", min, reduced_sizes},
    {"prod", prod, reduced_sizes},
    {"any", any, reduced_sizes},
    {"all", all, reduced_sizes},
    {"aminmax", aminmax, reduced_sizes},
    {"nansum", counted, reduced_sizes},
    {"count_nonzero", counted, reduced_sizes},
    {"linalg__powsum", counted, reduced_sizes},
    {"histc", histogram, bins},
    {"median", selected, selected_sizes},
    {"nanmedian", selected, selected_sizes},
    {"mode", kept_dims, reduced_sizes},
    {"kthvalue", kept_dims, reduced_sizes},
    {"value_selecting_reduction_backward", selecting_backward, selecting_backward_sizes, "sizes"},
    {"argmax", kept_dims, reduced_sizes},
    {"argmin", kept_dims, reduced_sizes},
    {"var", kept_dims, reduced_sizes},
    {"std", kept_dims, reduced_sizes},
    {"var_mean", kept_dims, reduced_sizes},
    {"std_mean", kept_dims, reduced_sizes},
    {"norm", norm, reduced_sizes},
    {"linalg_vector_norm", norm, reduced_sizes},
    {"logsumexp", kept_dims, reduced_sizes},
    {"_softmax", along_other_dims},
    {"_log_softmax", along_other_dims},
    {"_softmax_backward_data", along_other_dims},
    {"_log_softmax_backward_data", along_other_dims},
    {"cumsum", scan},
    {"cumprod", along_other_dims},
    {"logcumsumexp", along_other_dims},
    {"cummax", along_other_dims, like_first_twice},
    {"cummin", along_other_dims, like_first_twice},
    {"glu", along_other_dims},
    {"glu_backward", along_other_dims, like_second},
    {"_safe_softmax", along_other_dims, like_first},
    {"sort", along_other_dims},
    {"topk", along_other_dims},
});

}  // namespace

std::span<const RuleEntry> reduction_rules() { return kReductionRules; }

}  // namespace tessera
