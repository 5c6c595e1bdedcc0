#include "mesh/list_operators.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "mesh/list_call.h"
#include "mesh/list_norm.h"
#include "mesh/op_plan.h"
#include "mesh/placed.h"

namespace tessera {

// [Note: Operators on lists]
//
// On the CPU, LibTorch's foreach operators are loops over operators on single tensors, which
// support DistTensors; operators without a shorter way here are left to that loop. The shorter way,
// for elementwise operators, is to place the tensors and to run the operator on lists of local
// parts: one trip through the dispatcher per list in place of one per tensor.
namespace {

using torch::jit::Stack;

constexpr std::string_view kForeach = "aten::_foreach_";
constexpr std::string_view kCheckGradients = "aten::_amp_foreach_non_finite_check_and_unscale_";

bool is_foreach(std::string_view name) { return name.starts_with(kForeach); }

bool is_fused_step(std::string_view name) {
  return name.starts_with("aten::_fused_ad") || name.starts_with("aten::_fused_sgd");
}

// True if f(a + b) = f(a) + f(b), in all tensors at a position together.
bool is_linear(const c10::FunctionSchema& schema) {
  static const auto* const names =
      new std::set<std::string>{"add.List",   "sub.List",       "mul.Scalar",  "mul.ScalarList",
                                "div.Scalar", "div.ScalarList", "lerp.Scalar", "lerp.ScalarList",
                                "neg",        "zero",           "clone",       "copy"};
  std::string name = schema.name().substr(kForeach.size());
  if (name.ends_with('_')) name.pop_back();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  return names->contains(name);
}

bool is_elementwise(std::string_view name) {
  for (const auto other : {"norm", "powsum", "max", "mm"}) {
    if (name.substr(kForeach.size()) == other) return false;
  }
  return true;
}

// Calls the operator as LibTorch composes it on the CPU, of operators on DistTensors.
void call_composed(const c10::OperatorHandle& op, Stack arguments, Stack* stack) {
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

at::Tensor as_result(const at::Tensor& part, const DistSpecPtr& spec, const at::Tensor& like) {
  if (!spec) return part;
  if (like.is_non_overlapping_and_dense())
    return make_dist(part, spec, like.sizes(), like.strides());
  return make_dist(part, spec, like.sizes());
}

void call_elementwise(const c10::OperatorHandle& op, Stack arguments, Stack* stack) {
  ListCall call(op, arguments, {.keeps_sums = is_linear(op.schema())});
  if (!call.has_equal_sizes() || !call.is_member_of_all())
    return call_composed(op, std::move(arguments), stack);
  const Stack results = call.run();
  for (const c10::IValue& result : results) {
    auto list = result.toTensorVector();
    for (size_t i = 0; i < list.size(); ++i)
      list[i] = as_result(list[i], call.row(i), call.first(i));
    stack->emplace_back(std::move(list));
  }
}

// Kernels need at least one element to find the largest.
std::vector<at::Tensor> filled(std::vector<at::Tensor> parts) {
  for (at::Tensor& part : parts) {
    if (part.numel() == 0) part = at::zeros({1}, part.options());
  }
  return parts;
}

void call_norm(const c10::OperatorHandle& op, Stack arguments, Stack* stack) {
  const ListCall call(op, arguments, {});
  const double order = arguments[1].toScalar().toDouble();
  // An empty part has no smallest element.
  if (order < 0 || !call.is_member_of_all()) return call_composed(op, std::move(arguments), stack);
  std::vector<at::Tensor> parts;
  std::vector<DistSpecPtr> specs;
  for (size_t i = 0; i < call.size(); ++i) {
    specs.push_back(call.row(i));
    parts.push_back(specs[i] ? placed(call.first(i), *specs[i], op.schema().name())
                             : call.first(i));
  }
  arguments[0] = filled(std::move(parts));
  op.callBoxed(arguments);
  auto norms = global_norms(arguments[0].toTensorVector(), specs, order);
  for (size_t i = 0; i < norms.size(); ++i) {
    if (!specs[i]) continue;
    const DeviceMesh& mesh = specs[i]->mesh;
    norms[i] = make_dist(norms[i], intern(mesh, replicated(mesh)), {});
  }
  stack->emplace_back(std::move(norms));
}

void call_fused_step(const c10::OperatorHandle& op, Stack arguments) {
  const auto& described = op.schema().arguments();
  const auto scale = std::find_if(described.begin(), described.end(),
                                  [](const c10::Argument& a) { return a.name() == "grad_scale"; });
  // Gradients are written to only where they are scaled.
  const bool scales = scale != described.end() && !arguments[scale - described.begin()].isNone();
  ListCall(op, std::move(arguments), {.needs_memory = true, .writes_grads = scales}).run();
}

// Shares the findings with all ranks of the mesh: each rank has checked its own parts only.
void share_findings(const ListCall& call, const at::Tensor& found) {
  std::vector<const DeviceMesh*> meshes;
  for (size_t i = 0; i < call.size(); ++i) {
    const DistSpecPtr& spec = call.row(i);
    if (!spec || !spec->mesh.is_member() || spec->mesh.size() == 1) continue;
    const bool is_cut = std::any_of(spec->placements.begin(), spec->placements.end(),
                                    [](const Placement& placement) { return is_shard(placement); });
    const bool is_known = std::any_of(meshes.begin(), meshes.end(),
                                      [&](const DeviceMesh* mesh) { return *mesh == spec->mesh; });
    if (is_cut && !is_known) meshes.push_back(&spec->mesh);
  }
  const DistMeta* const meta = find_dist_meta(found);
  at::Tensor own = meta ? meta->local : found;
  for (const DeviceMesh* const mesh : meshes) {
    at::Tensor largest = own.contiguous();
    mesh->process_group()->all_reduce(largest, ReduceOp::kMax, {"check of gradients"})->wait();
    if (!largest.is_same(own)) own.copy_(largest);
  }
}

void check_gradients(const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor found = arguments[1].toTensor();
  ListCall call(op, std::move(arguments), {.needs_memory = true});
  call.run();
  share_findings(call, found);
}

}  // namespace

bool takes_lists(const c10::FunctionSchema& schema) {
  return is_foreach(schema.name()) || is_fused_step(schema.name()) ||
         schema.name().starts_with("aten::_amp_foreach_non_finite_check_and_unscale");
}

void call_on_lists(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.schema().name();
  Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  if (name == kCheckGradients) return check_gradients(op, std::move(arguments));
  if (is_fused_step(name) && name.ends_with('_')) return call_fused_step(op, std::move(arguments));
  if (name == "aten::_foreach_norm") return call_norm(op, std::move(arguments), stack);
  if (is_foreach(name) && is_elementwise(name))
    return call_elementwise(op, std::move(arguments), stack);
  call_composed(op, std::move(arguments), stack);
}

}  // namespace tessera
