#include <algorithm>

#include "mesh/rules.h"

namespace tessera {
namespace {

// The dims that are reduced, not negative; all of them if none are named.
std::vector<bool> reduced_dims(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim();
  std::vector<bool> reduced(ndim, true);
  for (size_t i = 1; i < call.arguments.size(); ++i) {
    if (call.schema.arguments()[i].name() != "dim") continue;
    const c10::IValue& value = call.arguments[i];
    if (value.isNone()) break;
    const auto dims = value.isInt() ? std::vector<int64_t>{value.toInt()} : value.toIntVector();
    if (dims.empty()) break;
    reduced.assign(ndim, false);
    for (const int64_t dim : dims) {
      if (ndim > 0) reduced[dim < 0 ? dim + ndim : dim] = true;
    }
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

// Parts of equal size have means whose mean it is.
Strategies mean(const OpCall& call) {
  Strategies ways = reduction(call, PartialOp::kAvg, true);
  std::erase_if(ways, [&](const Strategy& way) {
    const auto* const shard = std::get_if<Shard>(&way.inputs[0]);
    return is_partial(way.outputs[0]) && call.inputs[0].sizes[shard->dim] % call.ranks != 0;
  });
  for (const PartialOp op : {PartialOp::kSum, PartialOp::kAvg})
    ways.push_back({{Partial{op}}, {Partial{op}}});
  return ways;
}

// A part without elements has no maximum.
Strategies of_nonempty(const OpCall& call, PartialOp op) {
  Strategies ways = reduction(call, op, true);
  std::erase_if(ways, [&](const Strategy& way) {
    const auto* const shard = std::get_if<Shard>(&way.inputs[0]);
    return is_partial(way.outputs[0]) && call.inputs[0].sizes[shard->dim] % call.ranks != 0;
  });
  ways.push_back({{Partial{op}}, {Partial{op}}});
  return ways;
}

Strategies amax(const OpCall& call) { return of_nonempty(call, PartialOp::kMax); }
Strategies amin(const OpCall& call) { return of_nonempty(call, PartialOp::kMin); }
Strategies prod(const OpCall& call) { return reduction(call, PartialOp::kProd, true); }
Strategies any(const OpCall& call) { return reduction(call, PartialOp::kAny, true); }
Strategies all(const OpCall& call) { return reduction(call, PartialOp::kAll, true); }
Strategies kept_dims(const OpCall& call) { return reduction(call, PartialOp::kSum, false); }

// `max.dim` and `min.dim` also tell where: the reduced dim must be whole. Without a dim, the value.
Strategies max(const OpCall& call) {
  return call.outputs.size() == 1 ? of_nonempty(call, PartialOp::kMax) : kept_dims(call);
}
Strategies min(const OpCall& call) {
  return call.outputs.size() == 1 ? of_nonempty(call, PartialOp::kMin) : kept_dims(call);
}

// The outputs have the dims of the input, and along one of them each needs all elements.
Strategies along_dim(const OpCall& call) {
  const int64_t ndim = call.inputs[0].ndim(), dim = call.dim("dim", ndim);
  Strategies ways;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != dim)
      ways.push_back(
          {Placements(call.inputs.size(), Shard{d}), Placements(call.outputs.size(), Shard{d})});
  }
  return ways;
}

bool keeps_dims(const OpCall& call) {
  for (size_t i = 1; i < call.arguments.size(); ++i) {
    if (call.schema.arguments()[i].name() == "keepdim") return call.arguments[i].toBool();
  }
  return false;
}

std::vector<TensorInfo> reduced_sizes(const OpCall& call) {
  const auto reduced = reduced_dims(call);
  const bool keeps = keeps_dims(call);
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
    {"_softmax", along_dim},
    {"_log_softmax", along_dim},
    {"_softmax_backward_data", along_dim},
    {"_log_softmax_backward_data", along_dim},
    {"cumsum", along_dim},
    {"sort", along_dim},
    {"topk", along_dim},
};

}  // namespace

std::span<const RuleEntry> reduction_rules() { return kRules; }

}  // namespace tessera
