#include "tensor/op_plan.h"

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "base/dispatch/dry_run.h"
#include "base/dispatch/each_tensor.h"
#include "tensor/chunks.h"
#include "tensor/line_conversion.h"
#include "tensor/placed.h"
#include "tensor/redistribute.h"
#include "tensor/result_strides.h"
#include "tensor/rules.h"

namespace tessera {
namespace {

// A tensor among the arguments of a call, with its placements.
struct PlacedInput {
  at::Tensor tensor;
  Placements placements;
  bool is_written = false;
  bool is_parameter = false;
};

// The placements that the tensors of a call get.
struct ChosenWay {
  std::vector<Placements> inputs, outputs;
};

// Small, so that of two strategies that move nothing the one that leaves tensors as they are is
// chosen.
constexpr double kChange = 1;

// A parameter that is moved is moved in every step, and is then whole on every rank: leaving it
// where it is saves more than the bytes of one call.
constexpr double kParameterWeight = 4;

// The split factors above 1 of the inputs, each once.
std::set<int64_t> split_factors(const std::vector<PlacedInput>& inputs) {
  std::set<int64_t> factors;
  for (const PlacedInput& input : inputs) {
    for (const Placement& placement : input.placements) {
      if (is_split(placement)) factors.insert(std::get<Shard>(placement).split_factor);
    }
  }
  return factors;
}

bool has_split(const Strategy& way) {
  return std::ranges::any_of(way.inputs, is_split) || std::ranges::any_of(way.outputs, is_split);
}

// Adds each strategy with all shards split, for each factor.
void add_splits(Strategies& ways, const std::set<int64_t>& factors) {
  const size_t count = ways.size();
  for (const int64_t factor : factors) {
    for (size_t i = 0; i < count; ++i) {
      if (has_split(ways[i]) || !ways[i].can_split) continue;  // a split of the rule's own
      Strategy way = ways[i];
      for (Placements* const placements : {&way.inputs, &way.outputs}) {
        for (Placement& placement : *placements) {
          if (auto* const shard = std::get_if<Shard>(&placement)) shard->split_factor = factor;
        }
      }
      if (has_split(way)) ways.push_back(std::move(way));
    }
  }
}

bool fits(const Placement& placement, const TensorInfo& tensor) {
  const auto* const shard = std::get_if<Shard>(&placement);
  return !shard || (shard->dim >= 0 && shard->dim < tensor.ndim());
}

// An output that is an input written to, by the indices of both.
struct Written {
  size_t input, output;
};

std::vector<Written> find_written(const c10::FunctionSchema& schema,
                                  const std::vector<int>& first_input) {
  std::vector<Written> found;
  for (size_t result = 0; result < schema.returns().size(); ++result) {
    const auto index = written_index(schema, result);
    if (index && schema.arguments()[*index].type()->kind() == c10::TypeKind::TensorType)
      found.push_back({static_cast<size_t>(first_input[*index]), result});
  }
  return found;
}

// Chooses, along one mesh dim after the other, the strategy that moves least; nullopt if each of
// them would move a tensor that the operator writes to.
class Choice {
 public:
  Choice(OpCall& call, const std::vector<PlacedInput>& inputs, const DeviceMesh& mesh)
      : call_(call),
        inputs_(inputs),
        mesh_(mesh),
        written_(find_written(call.schema, call.first_input)) {}

  std::optional<ChosenWay> choose(const RuleEntry& entry) {
    const Strategies on_all_ranks = ways_of(entry, mesh_.size());
    std::deque<Strategies> by_mesh_dim;  // chosen_ refers to them
    for (int64_t i = 0; i < mesh_.ndim(); ++i) {
      const Strategies& ways = by_mesh_dim.emplace_back(
          mesh_.ndim() == 1 ? on_all_ranks : ways_of(entry, mesh_.size(i)));
      const Strategy* best = nullptr;
      double least = 0;
      for (const Strategy& way : ways) {
        check(way);
        // A dim that several mesh dims cut is in as many parts as the mesh has ranks.
        if (cuts_again(way) && !has(on_all_ranks, way)) continue;
        if (!can_split(way, i)) continue;
        const auto cost = cost_of_way(way, i);
        if (cost && (!best || *cost < least)) best = &way, least = *cost;
      }
      if (!best) return std::nullopt;
      chosen_.push_back(best);
    }
    ChosenWay result{std::vector<Placements>(call_.inputs.size()),
                     std::vector<Placements>(call_.outputs.size())};
    for (const Strategy* const way : chosen_) {
      for (size_t t = 0; t < way->inputs.size(); ++t) result.inputs[t].push_back(way->inputs[t]);
      for (size_t t = 0; t < way->outputs.size(); ++t) result.outputs[t].push_back(way->outputs[t]);
    }
    return result;
  }

 private:
  // The strategies where a dim is cut into parts for this many ranks.
  Strategies ways_of(const RuleEntry& entry, int64_t ranks) {
    call_.ranks = ranks;
    Strategies ways = entry.rule(call_);
    ways.push_back({Placements(call_.inputs.size(), Replicate{}),
                    Placements(call_.outputs.size(), Replicate{})});
    if (entry.splits) add_splits(ways, split_factors(inputs_));
    return ways;
  }

  static bool has(const Strategies& ways, const Strategy& way) {
    return std::ranges::any_of(ways, [&](const Strategy& other) {
      return other.inputs == way.inputs && other.outputs == way.outputs;
    });
  }

  // True if a dim that this cuts is cut along an earlier mesh dim.
  bool cuts_again(const Strategy& way) const {
    return std::ranges::any_of(chosen_, [&](const Strategy* other) {
      return has_same_cut(way.inputs, other->inputs) || has_same_cut(way.outputs, other->outputs);
    });
  }
  static bool has_same_cut(const Placements& a, const Placements& b) {
    for (size_t t = 0; t < a.size(); ++t) {
      const auto* const shard = std::get_if<Shard>(&a[t]);
      if (shard && is_shard(b[t], shard->dim)) return true;
    }
    return false;
  }

  void check(const Strategy& way) const {
    TORCH_INTERNAL_ASSERT(
        way.inputs.size() == call_.inputs.size() && way.outputs.size() == call_.outputs.size(),
        "the rule of ", call_.schema.name(), " has ", way.inputs.size(), " inputs and ",
        way.outputs.size(), " outputs; expected ", call_.inputs.size(), " and ",
        call_.outputs.size());
    TORCH_INTERNAL_ASSERT(std::ranges::equal(way.inputs, call_.inputs, fits) &&
                              std::ranges::equal(way.outputs, call_.outputs, fits),
                          "the rule of ", call_.schema.name());
  }

  // False if a split would be uneven, or not the only shard along its dim of a tensor.
  bool can_split(const Strategy& way, int64_t mesh_dim) const {
    const bool is_even_only = has_split(way);
    const auto can_be = [&](Placements Strategy::*side, const std::vector<TensorInfo>& tensors) {
      for (size_t t = 0; t < tensors.size(); ++t) {
        const Placement& placement = (way.*side)[t];
        const auto* const shard = std::get_if<Shard>(&placement);
        if (!shard) continue;
        const int64_t parts = shard->split_factor * mesh_.size(mesh_dim);
        if (is_even_only && tensors[t].sizes[shard->dim] % parts != 0) return false;
        for (const Strategy* const other : chosen_) {
          const Placement& outer = (other->*side)[t];
          if (is_shard(outer, shard->dim) && (is_split(outer) || is_split(placement))) return false;
        }
      }
      return true;
    };
    return can_be(&Strategy::inputs, call_.inputs) && can_be(&Strategy::outputs, call_.outputs);
  }

  std::optional<double> cost_of_way(const Strategy& way, int64_t mesh_dim) const {
    for (const Written& written : written_) {
      if (way.outputs[written.output] != way.inputs[written.input]) return std::nullopt;
    }
    double cost = 0;
    bool moves = false;
    for (size_t t = 0; t < inputs_.size(); ++t) {
      const Placement& from = inputs_[t].placements[mesh_dim];
      if (from == way.inputs[t]) continue;
      if (inputs_[t].is_written) return std::nullopt;
      Placements to = inputs_[t].placements;
      to[mesh_dim] = way.inputs[t];
      const auto nbytes = static_cast<double>(inputs_[t].tensor.numel()) *
                          static_cast<double>(inputs_[t].tensor.element_size());
      const double weight = inputs_[t].is_parameter ? kParameterWeight : 1;
      cost += kChange + weight * cost_of(mesh_, inputs_[t].placements, to, nbytes);
      moves |= moves_shards({from}, {way.inputs[t]});
    }
    return cost + cost_of_later(way, mesh_dim) + (moves ? cost_of_terms(way, mesh_dim) : 0);
  }

  // Returns the cost of reducing outputs that would be terms. Counted only if shards have to be
  // sent first: in another strategy this may be the only message.
  double cost_of_terms(const Strategy& way, int64_t mesh_dim) const {
    double cost = 0;
    for (size_t t = 0; t < way.outputs.size(); ++t) {
      if (is_partial(way.outputs[t])) cost += cost_until_whole(way, t, mesh_dim);
    }
    return cost;
  }

  // The cost left for outputs of pending inputs until all ranks have them whole. So a reduction is
  // done where that moves least, and is not split into a reduce-scatter here and an all-gather for
  // other operators.
  double cost_of_later(const Strategy& way, int64_t mesh_dim) const {
    bool keeps_terms = false, cuts_terms = false;
    for (size_t t = 0; t < inputs_.size(); ++t) {
      if (!is_partial(inputs_[t].placements[mesh_dim])) continue;
      keeps_terms |= is_partial(way.inputs[t]);
      cuts_terms |= is_shard(way.inputs[t]);
    }
    double cost = 0;
    for (size_t t = 0; t < way.outputs.size(); ++t) {
      const Placement& output = way.outputs[t];
      if ((keeps_terms && is_partial(output)) || (cuts_terms && is_shard(output)))
        cost += cost_until_whole(way, t, mesh_dim) + (cuts_terms ? kChange : 0);
    }
    return cost;
  }

  // The cost until all ranks have an output whole.
  double cost_until_whole(const Strategy& way, size_t t, int64_t mesh_dim) const {
    return conversion_cost(way.outputs[t], Replicate{}, line_bytes_of_output(t, mesh_dim),
                           mesh_.size(mesh_dim));
  }

  // Bytes of the part that the ranks of a line have together, as far as strategies are chosen.
  double line_bytes_of_output(size_t t, int64_t mesh_dim) const {
    const auto dtype = call_.outputs[t].dtype == c10::ScalarType::Undefined
                           ? call_.inputs[0].dtype
                           : call_.outputs[t].dtype;
    auto nbytes = static_cast<double>(c10::multiply_integers(call_.outputs[t].sizes)) *
                  static_cast<double>(c10::elementSize(dtype));
    for (int64_t i = 0; i < mesh_.ndim(); ++i) {
      if (i == mesh_dim) continue;
      const Placement& other = i < mesh_dim ? chosen_[i]->outputs[t] : inputs_[0].placements[i];
      if (is_shard(other)) nbytes /= static_cast<double>(mesh_.size(i));
    }
    return nbytes;
  }

  OpCall& call_;
  const std::vector<PlacedInput>& inputs_;
  const DeviceMesh& mesh_;
  const std::vector<Written> written_;
  std::vector<const Strategy*> chosen_;
};

// For a tensor that is created: placed as the input is, if both have the same sizes.
ChosenWay taken_over(const OpCall& call, const std::vector<PlacedInput>& inputs) {
  ChosenWay result;
  for (const PlacedInput& input : inputs) result.inputs.push_back(input.placements);
  Placements placements = inputs[0].placements;
  for (Placement& placement : placements) {
    if (call.inputs[0].sizes != call.outputs[0].sizes || is_partial(placement))
      placement = Replicate{};
  }
  result.outputs.push_back(std::move(placements));
  return result;
}

std::vector<PlacedInput> collect_inputs(const c10::FunctionSchema& schema,
                                        at::ArrayRef<c10::IValue> arguments, const DeviceMesh& mesh,
                                        std::vector<int>& first_input) {
  std::vector<PlacedInput> inputs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    first_input.push_back(static_cast<int>(inputs.size()));
    const auto* const alias = schema.arguments()[i].alias_info();
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      inputs.push_back({tensor, meta ? meta->spec->placements : replicated(mesh),
                        alias && alias->isWrite(), shows_parameter(tensor)});
    });
  }
  return inputs;
}

TensorInfo info_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.scalar_type()};
}

std::vector<size_t> unwanted_results(const OpCall& call) {
  std::vector<size_t> unwanted;
  const c10::IValue* const mask = call.find("output_mask");
  for (size_t i = 0; mask && i < call.schema.returns().size(); ++i) {
    if (!mask->toBoolList()[i]) unwanted.push_back(i);
  }
  return unwanted;
}

// Outputs of the operator on tensors without data; nullopt where LibTorch can't compute them.
std::optional<std::vector<at::Tensor>> outputs_on_meta(const c10::OperatorHandle& op,
                                                       const RuleEntry& entry,
                                                       at::ArrayRef<c10::IValue> arguments,
                                                       const std::vector<size_t>& unwanted) {
  const auto results = entry.knows_sizes ? std::nullopt : run_on_meta(op, arguments);
  if (!results) return std::nullopt;
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < results->size(); ++i) {
    const c10::IValue& value = results->at(i);
    if (!value.isTensor() && !value.isTensorList()) return std::nullopt;
    if (!std::ranges::binary_search(unwanted, i))
      each_tensor(value, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
  }
  return outputs;
}

bool is_of(const RuleEntry& entry, std::span<const RuleEntry> family) {
  return &entry >= family.data() && &entry < family.data() + family.size();
}

// Rules of this family see no real numbers, so plans need not be distinguished by them: the factors
// of optimizers change with each step.
bool is_elementwise(const RuleEntry& entry) { return is_of(entry, elementwise_rules()); }

// The arguments as a rule of that family sees them.
torch::jit::Stack without_reals(at::ArrayRef<c10::IValue> arguments) {
  torch::jit::Stack seen;
  for (const c10::IValue& value : arguments)
    seen.push_back(value.isDouble() ? c10::IValue() : value);
  return seen;
}

// Sets the size of this rank's part of the output, and its strides if the operator takes them.
void set_local_size(OpPlan& plan, const OpCall& call, std::string_view name, const DistSpec& spec) {
  const auto sizes = local_sizes_of(spec, call.outputs[0].sizes);
  for (size_t i = 0; i < call.values.size(); ++i) {
    const auto& argument = call.schema.arguments()[i].name();
    if (argument == name) plan.arguments.emplace_back(i, sizes);
    if (argument == "stride")
      plan.arguments.emplace_back(i, at::IntArrayRef(c10::contiguous_strides(sizes)));
  }
}

// Throws unless all inputs broadcast to the output, and those that are written to have its sizes.
void check_broadcast(const OpCall& call, const std::vector<PlacedInput>& inputs) {
  const TensorInfo& output = call.outputs[0];
  for (size_t t = 0; t < inputs.size(); ++t) {
    const auto& sizes = call.inputs[t].sizes;
    const size_t added = output.sizes.size() - sizes.size();
    bool is_fine = !inputs[t].is_written || sizes == output.sizes;
    for (size_t d = 0; d < sizes.size(); ++d)
      is_fine &= sizes[d] == 1 || sizes[d] == output.sizes[d + added];
    TORCH_CHECK(is_fine, "[", call.schema.name(),
                "] tensors must broadcast to one another, and into one that is written to; got one "
                "of sizes ",
                at::IntArrayRef(sizes), " where the result has ", at::IntArrayRef(output.sizes));
  }
}

// Returns false if the sizes of the outputs can't be determined. Wrong shapes are errors here, on
// all ranks alike: local parts may fit on some of them.
bool describe_outputs(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                      const RuleEntry& entry, const std::vector<PlacedInput>& inputs, OpCall& call,
                      OpPlan& plan) {
  plan.unwanted = unwanted_results(call);
  if (const auto outputs = outputs_on_meta(op, entry, arguments, plan.unwanted)) {
    for (const at::Tensor& output : *outputs) {
      call.outputs.push_back(info_of(output));
      plan.outputs.push_back(
          {nullptr, output.sizes().vec(), output.strides().vec(), output.storage_offset()});
    }
    return true;
  }
  if (!entry.sizes) return false;
  call.outputs = entry.sizes(call);
  for (TensorInfo& output : call.outputs) output.dtype = c10::ScalarType::Undefined;
  if (is_elementwise(entry) && !entry.creates) check_broadcast(call, inputs);
  for (const TensorInfo& output : call.outputs) {
    const auto strides = c10::contiguous_strides(output.sizes);
    plan.outputs.push_back({nullptr, output.sizes, {strides.begin(), strides.end()}});
  }
  return true;
}

// For an operator that has to know which parts this rank has.
void set_local_kernel(OpPlan& plan, const OpCall& call, const RuleEntry& entry,
                      const std::vector<PlacedInput>& inputs, const DeviceMesh& mesh) {
  if (!entry.local || !mesh.is_member()) return;
  plan.local = entry.local;
  for (size_t t = 0; t < call.inputs.size(); ++t)
    plan.parts.push_back(
        {local_box(call.inputs[t].sizes, without_splits(plan.inputs[t]->placements), mesh.shape(),
                   *mesh.coordinate()),
         call.inputs[t].sizes, inputs[t].tensor.is_contiguous()});
}

// A factor of a product that meets the shards of the other one is not among them: the program asks
// for this when it cuts matrices and, between them, the sequence.
std::vector<size_t> gathered_inputs_of(const OpPlan& plan, const RuleEntry& entry,
                                       const std::vector<PlacedInput>& inputs) {
  const bool is_product = is_of(entry, matrix_rules());
  std::vector<size_t> found;
  for (size_t t = 0; t < inputs.size(); ++t) {
    const Placements &from = inputs[t].placements, &to = plan.inputs[t]->placements;
    bool is_gathered = false;
    for (size_t i = 0; i < from.size(); ++i) {
      const bool is_divided = is_product && !is_replicate(plan.outputs[0].spec->placements[i]);
      is_gathered |= !is_divided && moves_shards({from[i]}, {to[i]});
    }
    if (is_gathered) found.push_back(t);
  }
  return found;
}

std::vector<size_t> whole_inputs_of(const OpPlan& plan) {
  std::vector<size_t> found;
  for (size_t t = 0; t < plan.inputs.size(); ++t) {
    const Placements& input = plan.inputs[t]->placements;
    bool is_whole = false;
    for (const OpPlan::Output& output : plan.outputs) {
      for (size_t i = 0; i < input.size(); ++i)
        is_whole |= is_replicate(input[i]) && is_shard(output.spec->placements[i]);
    }
    if (is_whole) found.push_back(t);
  }
  return found;
}

}  // namespace

bool shows_parameter(const at::Tensor& tensor) {
  const auto is_trained = [](const at::TensorBase& t) { return t.is_leaf() && t.requires_grad(); };
  return is_trained(tensor) || (tensor.is_view() && is_trained(tensor._base()));
}

bool returns_views(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(), [](const c10::Argument& value) {
    return value.alias_info() && !value.alias_info()->isWrite();
  });
}

bool ignores_reals(const c10::FunctionSchema& schema) {
  const RuleEntry* const entry = find_rule(schema);
  return entry && is_elementwise(*entry);
}

std::optional<OpPlan> plan_op(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                              const DeviceMesh& mesh) {
  const c10::FunctionSchema& schema = op.schema();
  const RuleEntry* const entry = find_rule(schema);
  if (!entry) return std::nullopt;
  const auto seen = is_elementwise(*entry) ? without_reals(arguments) : arguments.vec();
  OpCall call{{schema, seen}};
  const auto inputs = collect_inputs(schema, arguments, mesh, call.first_input);
  for (const PlacedInput& input : inputs) call.inputs.push_back(info_of(input.tensor));
  OpPlan plan;
  if (!describe_outputs(op, arguments, *entry, inputs, call, plan)) return std::nullopt;
  for (OpPlan::Output& output : plan.outputs) {
    const bool follows = is_elementwise(*entry) && !entry->creates;
    if (auto strides = strides_by_kernel(op, arguments, output.sizes, follows))
      output.strides = std::move(*strides);
  }
  auto choice =
      entry->creates ? taken_over(call, inputs) : Choice(call, inputs, mesh).choose(*entry);
  if (!choice) return std::nullopt;
  for (Placements& placements : choice->inputs)
    plan.inputs.push_back(intern(mesh, std::move(placements)));
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    plan.outputs[i].spec = intern(mesh, std::move(choice->outputs[i]));
  if (!entry->size_argument.empty())
    set_local_size(plan, call, entry->size_argument, *plan.outputs[0].spec);
  plan.is_view = returns_views(schema);
  plan.writes = std::ranges::any_of(inputs, &PlacedInput::is_written);
  plan.reads_strides = is_elementwise(*entry);
  plan.whole_inputs = whole_inputs_of(plan);
  plan.gathered_inputs = gathered_inputs_of(plan, *entry, inputs);
  set_local_kernel(plan, call, *entry, inputs, mesh);
  if (entry->reshapes) plan.reshape = local_sizes_of(*plan.outputs[0].spec, call.outputs[0].sizes);
  return plan;
}

}  // namespace tessera
