#include <c10/core/WrapDimMinimal.h>

#include <algorithm>

#include "mesh/rules.h"

namespace tessera {
namespace {

// The dims that are reduced, not negative; all of them if none are named.
std::vector<bool> reduced_dims(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  const c10::IValue* const value = call.find("dim");
  if (!value || value->isNone()) return std::vector<bool>(ndim, true);
  const auto dims = value->isInt() ? std::vector<int64_t>{value->toInt()} : value->toIntVector();
  std::vector<bool> reduced(ndim, dims.empty());
  for (const int64_t dim : dims) {
    if (ndim > 0) reduced[c10::maybe_wrap_dim(dim, ndim)] = true;
  }
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

Strategies sum(const OpCall& call) {
  Strategies ways = reduction(call, PartialOp::kSum, true);
  for (const PartialOp op : {PartialOp::kSum, PartialOp::kAvg})
    ways.push_back({{Partial{op}}, {Partial{op}}});
  return ways;
}

// As a reduction by `op` of terms that count alike: of parts of equal size, none of them empty.
Strategies of_equal_parts(const OpCall& call, PartialOp op) {
  Strategies ways = reduction(call, op, true);
  std::erase_if(ways, [&](const Strategy& way) {
    const int64_t dim = std::get<Shard>(way.inputs[0]).dim;
    return is_partial(way.outputs[0]) && call.inputs[0].sizes[dim] % call.ranks != 0;
  });
  ways.push_back({{Partial{op}}, {Partial{op}}});
  return ways;
}

Strategies mean(const OpCall& call) {
  Strategies ways = of_equal_parts(call, PartialOp::kAvg);
  ways.push_back({{Partial{PartialOp::kSum}}, {Partial{PartialOp::kSum}}});
  return ways;
}

Strategies amax(const OpCall& call) { return of_equal_parts(call, PartialOp::kMax); }
Strategies amin(const OpCall& call) { return of_equal_parts(call, PartialOp::kMin); }
Strategies prod(const OpCall& call) { return reduction(call, PartialOp::kProd, true); }
Strategies any(const OpCall& call) { return reduction(call, PartialOp::kAny, true); }
Strategies all(const OpCall& call) { return reduction(call, PartialOp::kAll, true); }
Strategies kept_dims(const OpCall& call) { return reduction(call, PartialOp::kSum, false); }

// `max.dim` and `min.dim` also tell where: the reduced dim must be whole. Without a dim, the value.
Strategies max(const OpCall& call) {
  return call.outputs.size() == 1 ? of_equal_parts(call, PartialOp::kMax) : kept_dims(call);
}
Strategies min(const OpCall& call) {
  return call.outputs.size() == 1 ? of_equal_parts(call, PartialOp::kMin) : kept_dims(call);
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

constexpr RuleEntry kRules[] = {
    {"sum", sum, reduced_sizes},
    {"mean", mean, reduced_sizes},
    {"amax", amax, reduced_sizes},
    {"amin", amin, reduced_sizes},
    {"max", max, reduced_sizes},
    {"min", min, reduced_sizes},
    {"prod", prod, reduced_sizes},
    {"any", any, reduced_sizes},
    {"all", all, reduced_sizes},
    {"argmax", kept_dims, reduced_sizes},
    {"argmin", kept_dims, reduced_sizes},
    {"var", kept_dims, reduced_sizes},
    {"norm", kept_dims, reduced_sizes},
    {"linalg_vector_norm", kept_dims, reduced_sizes},
    {"logsumexp", kept_dims, reduced_sizes},
    {"_softmax", along_other_dims},
    {"_log_softmax", along_other_dims},
    {"_softmax_backward_data", along_other_dims},
    {"_log_softmax_backward_data", along_other_dims},
    {"cumsum", along_other_dims},
    {"sort", along_other_dims},
    {"topk", along_other_dims},
};

}  // namespace

std::span<const RuleEntry> reduction_rules() { return kRules; }

}  // namespace tessera
