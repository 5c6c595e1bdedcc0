#include "mesh/op_plan.h"

#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <string>

#include "dispatch/dry_run.h"
#include "dispatch/each_tensor.h"
#include "mesh/chunks.h"
#include "mesh/redistribute.h"
#include "mesh/rules.h"
#include "mesh/way_choice.h"

namespace tessera {
namespace {

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

// Outputs of the operator on tensors without data; nullopt where LibTorch can't compute them.
std::optional<std::vector<at::Tensor>> outputs_on_meta(const c10::OperatorHandle& op,
                                                       at::ArrayRef<c10::IValue> arguments) {
  const auto results = run_on_meta(op, arguments);
  if (!results) return std::nullopt;
  std::vector<at::Tensor> outputs;
  for (const c10::IValue& value : *results) {
    if (!value.isTensor() && !value.isTensorList()) return std::nullopt;
    each_tensor(value, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
  }
  return outputs;
}

// Rules of this family see no real numbers, so plans need not be distinguished by them: the factors
// of optimizers change with each step.
bool is_elementwise(const RuleEntry& entry) {
  const auto rules = elementwise_rules();
  return &entry >= rules.data() && &entry < rules.data() + rules.size();
}

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
  for (size_t i = 0; i < call.arguments.size(); ++i) {
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
    TORCH_CHECK(is_fine, "[", call.schema.name(), "] tensors must broadcast to one another, and into one that is written to; "
                "got one of sizes ", at::IntArrayRef(sizes), " where the result has ", at::IntArrayRef(output.sizes));
  }
}

// Returns false if the sizes of the outputs can't be determined. Wrong shapes are errors here, on
// all ranks alike: local parts may fit on some of them.
bool describe_outputs(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                      const RuleEntry& entry, const std::vector<PlacedInput>& inputs, OpCall& call,
                      OpPlan& plan) {
  if (const auto outputs = outputs_on_meta(op, arguments)) {
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
                      const DeviceMesh& mesh) {
  if (!entry.local || !mesh.is_member()) return;
  plan.local = entry.local;
  for (size_t t = 0; t < call.inputs.size(); ++t)
    plan.parts.push_back({local_box(call.inputs[t].sizes, plan.inputs[t]->placements, mesh.shape(),
                                    *mesh.coordinate()),
                          call.inputs[t].sizes});
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

bool returns_views(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& value) {
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
  OpCall call{.schema = schema, .arguments = {seen.data(), seen.size()}, .ranks = mesh.size()};
  const auto inputs = collect_inputs(schema, arguments, mesh, call.first_input);
  for (const PlacedInput& input : inputs) call.inputs.push_back(info_of(input.tensor));
  OpPlan plan;
  if (!describe_outputs(op, arguments, *entry, inputs, call, plan)) return std::nullopt;
  auto choice = choose_way(call, *entry, inputs, mesh);
  if (!choice) return std::nullopt;
  for (Placements& placements : choice->inputs)
    plan.inputs.push_back(intern(mesh, std::move(placements)));
  for (size_t i = 0; i < plan.outputs.size(); ++i)
    plan.outputs[i].spec = intern(mesh, std::move(choice->outputs[i]));
  if (!entry->size_argument.empty())
    set_local_size(plan, call, entry->size_argument, *plan.outputs[0].spec);
  plan.is_view = returns_views(schema);
  plan.writes = std::any_of(inputs.begin(), inputs.end(),
                            [](const PlacedInput& input) { return input.is_written; });
  plan.whole_inputs = whole_inputs_of(plan);
  set_local_kernel(plan, call, *entry, mesh);
  if (entry->reshapes) plan.reshape = local_sizes_of(*plan.outputs[0].spec, call.outputs[0].sizes);
  return plan;
}

DistSpecPtr intern(const DeviceMesh& mesh, Placements placements) {
  thread_local std::vector<std::weak_ptr<const DistSpec>> known;
  for (const auto& candidate : known) {
    const DistSpecPtr spec = candidate.lock();
    if (spec && spec->mesh.is_same(mesh) && spec->placements == placements) return spec;
  }
  std::erase_if(known, [](const auto& spec) { return spec.expired(); });
  auto made = std::make_shared<const DistSpec>(DistSpec{mesh, std::move(placements)});
  known.push_back(made);
  return made;
}

}  // namespace tessera
