#include "mesh/rules.h"

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

std::vector<TensorInfo> mv_sizes(const OpCall& call) { return {{{call.inputs[0].sizes[0]}}}; }
std::vector<TensorInfo> addr_sizes(const OpCall& call) {
  return {{{call.inputs[1].sizes[0], call.inputs[2].sizes[0]}}};
}
std::vector<TensorInfo> dot_sizes(const OpCall& call) { return {TensorInfo{}}; }

constexpr auto kMatrixRules = with_splits({
    {"mm", mm},
    {"addmm", addmm},
    {"bmm", bmm},
    {"baddbmm", baddbmm},
    {"mv", mv, mv_sizes},
    {"addmv", addmv},
    {"dot", dot, dot_sizes},
    {"addr", addr, addr_sizes},
});

}  // namespace

std::span<const RuleEntry> matrix_rules() { return kMatrixRules; }

}  // namespace tessera
