#include "tensor/dist_dispatch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/device/device.h"
#include "base/dispatch/dry_run.h"
#include "base/dispatch/each_tensor.h"
#include "base/dispatch/math_bits.h"
#include "base/dispatch/unit_key.h"
#include "comm/group/module_of_operators.h"
#include "tensor/decompositions.h"
#include "tensor/gradient_placement.h"
#include "tensor/identity.h"
#include "tensor/kernel_layouts.h"
#include "tensor/op_plan.h"
#include "tensor/operator_digest.h"
#include "tensor/placed.h"
#include "tensor/plan_key.h"
#include "tensor/result_strides.h"
#include "tensor/strict.h"
#include "tensor/strided_operators.h"
#include "tensor/view_source.h"

namespace tessera {

// [Note: Operators on DistTensors]
//
// One boxed kernel is registered for every operator of LibTorch that has a kernel of its own;
// composite operators arrive here as the operators they are composed of. Autograd works above, so
// the kernel sees one forward or backward operator at a time, on values. It looks up the plan of
// the call (plan_op), calls the operator's CPU or CUDA kernel with the local parts, placed as the
// plan says, and makes DistTensors of the results. Plans depend on the operator, on the metadata of
// the tensors and on the other arguments, and are cached by these.
//
// An operator without a plan is computed by every rank on the whole tensors.
namespace {

using Stack = torch::jit::Stack;

constexpr size_t kMostPlans = 20'000;

struct CachedPlan {
  std::optional<OpPlan> plan;
  std::vector<DistSpecPtr> keys;  // their addresses are in the key; all on one mesh
  uint64_t digest = 0;
  bool is_told = false;          // that it gathers
  std::optional<Stack> outside;  // results without data, for ranks that are not in the mesh
};

std::shared_ptr<CachedPlan> plan_of(const c10::OperatorHandle& op,
                                    at::ArrayRef<c10::IValue> arguments) {
  thread_local std::unordered_map<PlanKey, std::shared_ptr<CachedPlan>, PlanKeyHash> plans;
  thread_local PlanKey key;
  const bool is_complete = write_plan_key(key, op, arguments);
  if (is_complete) {
    const auto found = plans.find(key);
    if (found != plans.end()) return found->second;
  }
  const DeviceMesh& mesh = mesh_of_arguments(op, arguments);
  auto made = std::make_shared<CachedPlan>(CachedPlan{plan_op(op, arguments, mesh)});
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (const DistMeta* meta = find_dist_meta(tensor)) made->keys.push_back(meta->spec);
    });
  }
  made->digest = digest_of(op, arguments, made->plan);
  if (!is_complete) return made;
  if (plans.size() >= kMostPlans) plans.clear();
  plans.emplace(key, made);
  return made;
}

// Returns the source of a view that shows the base's local part, or a copy of it. `given` is the
// local part that the operator got.
std::shared_ptr<ViewSource> source_of(const OpPlan& plan, const at::Tensor& base,
                                      const at::Tensor& given, const c10::IValue& result) {
  const DistMeta* const meta = find_dist_meta(base);
  if (!meta) return nullptr;
  const bool is_copy = plan.reshape && !result.toTensor().is_alias_of(given);
  if (!is_copy && plan.inputs[0] == meta->spec) return meta->source;
  return std::make_shared<ViewSource>(base, plan.inputs[0], is_copy ? result.toTensor() : given,
                                      given.sizes());
}

// In InferenceMode, too, a view of a normal tensor must be a normal tensor: autograd shares the
// base's version with it.
class ModeOf {
 public:
  explicit ModeOf(const at::Tensor& base) {
    if (c10::InferenceMode::is_enabled() && !base.is_inference()) off_.emplace(false);
  }

 private:
  std::optional<c10::InferenceMode> off_;
};

void push_views(const OpPlan& plan, const at::Tensor& base, const at::Tensor& given,
                const Stack& results, Stack* stack) {
  const ModeOf mode(base);
  const auto source = source_of(plan, base, given, results[0]);
  size_t output = 0;
  for (const c10::IValue& result : results)
    stack->push_back(map_tensors(result, [&](const at::Tensor& part) {
      const OpPlan::Output& made = plan.outputs[output++];
      const at::Tensor view = make_dist_view(part, made.spec, made.sizes, made.strides,
                                             base.storage_offset() + made.offset, source);
      reduce_once(view, base, plan.inputs[0]);
      return view;
    }));
}

// Pushes the arguments that were written to, and `make(i, output)` for each other result i.
// `output` is the index of the result's first tensor; `make` must advance it.
template <class Make>
void push_results(const c10::FunctionSchema& schema, const Stack& arguments, Stack* stack,
                  Make make) {
  size_t output = 0;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (const auto written = written_index(schema, i)) {
      each_tensor(arguments[*written], [&](const at::Tensor&) { ++output; });
      stack->push_back(arguments[*written]);
    } else {
      stack->push_back(make(i, output));
    }
  }
}

void write_back(const c10::FunctionSchema& schema, const Stack& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    each_tensor(arguments[i], [](const at::Tensor& tensor) {
      if (const DistMeta* const meta = find_dist_meta(tensor)) wrote_to(*meta);
    });
  }
}

// Where one tensor is written to, LibTorch's kernel above this one counts the writes for autograd.
void count_writes_to_lists(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !arguments[i].isTensorList()) continue;
    each_tensor(arguments[i], [](const at::Tensor& tensor) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    });
  }
}

// See [Note: Where gradients lie].
void reduce_gradients_of(const OpPlan& plan, const Stack& arguments) {
  if (plan.whole_inputs.empty() || !at::GradMode::is_enabled()) return;
  size_t input = 0;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (std::ranges::binary_search(plan.whole_inputs, input++)) reduce_gradients(tensor);
    });
  }
}

// [Note: Layouts of parts]
//
// Some kernels read memory as if it were contiguous, or its last dim: LibTorch's code above them
// has made it so or chosen the kernel by the strides, or an operator has made the tensor (the
// moments of a layer norm, the indices of a pooling). That holds for the whole tensor, and its
// strides say so. A part that is cut out of a tensor which this rank has whole is strided. So a
// kernel gets parts that are dense where the whole tensors are, with their order of dims
// (ordered_as). This does not apply to arguments whose memory the operator writes to or shows, nor
// to elementwise operators: they honor strides.
void call_planned(const c10::OperatorHandle& op, const OpPlan& plan, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Stack arguments = torch::jit::pop(*stack, count);
  size_t input = 0;
  Stack local;
  local.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const bool keeps_layout = plan.reads_strides || schema.arguments()[i].alias_info();
    local.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      const DistSpecPtr& wanted = plan.inputs[input++];
      const at::Tensor part = plan.writes ? placed(tensor, *wanted, schema.name())
                                          : placed_argument(tensor, wanted, schema.name());
      return keeps_layout ? part : ordered_as(tensor, part);
    }));
  }
  for (const auto& [index, value] : plan.arguments) local[index] = value;
  const at::Tensor given = plan.is_view ? local[0].toTensor() : at::Tensor();
  // Operators lay out parts without elements as they like; views check the strides all the same.
  if (given.defined() && given.numel() == 0 &&
      given.strides() != at::IntArrayRef(c10::contiguous_strides(given.sizes())))
    local[0] = with_marks_of(given, at::empty(given.sizes(), given.options()));
  if (plan.reshape) {
    const at::Tensor part = local[0].toTensor();
    local = {with_marks_of(part, part.reshape(*plan.reshape))};
  } else if (plan.local) {
    plan.local(op, plan.parts, local);
  } else {
    op.callBoxed(local);
  }
  reduce_gradients_of(plan, arguments);
  if (plan.is_view) return push_views(plan, arguments[0].toTensor(), given, local, stack);
  if (plan.writes) write_back(schema, arguments);
  push_results(schema, arguments, stack, [&](size_t i, size_t& output) {
    if (std::ranges::binary_search(plan.unwanted, i)) return c10::IValue(at::Tensor());
    return map_tensors(local[i], [&](const at::Tensor& part) {
      const OpPlan::Output& made = plan.outputs[output++];
      const at::Tensor result = make_dist(part, made.spec, made.sizes, made.strides);
      reduce_once(result);
      return result;
    });
  });
}

void push_whole_views(const DistSpecPtr& whole, const at::Tensor& base, const at::Tensor& given,
                      const Stack& results, Stack* stack) {
  const ModeOf mode(base);
  const DistMeta& meta = *find_dist_meta(base);
  const auto source = given.is_same(meta.local)
                          ? meta.source
                          : std::make_shared<ViewSource>(base, whole, given, given.sizes());
  for (const c10::IValue& result : results)
    stack->push_back(map_tensors(result, [&](const at::Tensor& part) {
      const int64_t offset = part.storage_offset() - given.storage_offset();
      const at::Tensor view = make_dist_view(part, whole, part.sizes(), part.strides(),
                                             base.storage_offset() + offset, source);
      reduce_once(view, base, whole);
      return view;
    }));
}

// Replicas that share the unit of a cut weight may look up other rows; only the unit's operators
// would learn of them. Along a dim of the weight's own mesh, indices are those of all ranks.
void check_rows_known(const c10::FunctionSchema& schema, const DistMeta& weight,
                      const at::Tensor& given) {
  if (schema.name() != "aten::embedding_renorm_" || !weight.local.key_set().has(kUnitKey)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      given.is_same(weight.local) || (weight.parameter && weight.parameter->gradients),
      "[embedding_renorm_] an embedding with max_norm, whose weight is a cut DistTensor of a "
      "sharded model, needs plan.mesh_dim: else no rank knows the rows that other replicas look "
      "up; got ",
      to_string(weight.spec->placements),
      ". Or leave out max_norm and, after each step, write torch::renorm(weight, norm_type, 0, "
      "max_norm) into the weight");
}

// Every rank computes on whole tensors; values that were written are converted back to the
// placements of the tensors they were written to.
void call_replicated(const c10::OperatorHandle& op, const DeviceMesh& mesh, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  const DistSpecPtr whole = intern(mesh, replicated(mesh));
  const bool is_view =
      returns_views(schema) && arguments[0].isTensor() && find_dist_meta(arguments[0].toTensor());
  const bool writes = schema.is_mutable();
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  Stack local;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    local.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      const at::Tensor part = writes ? placed(tensor, *whole, schema.name())
                                     : placed_argument(tensor, whole, schema.name());
      if (alias && alias->isWrite() && find_dist_meta(tensor)) {
        check_rows_known(schema, *find_dist_meta(tensor), part);
        written.emplace_back(tensor, part);
      }
      if (is_view || takes_strides(schema)) return laid_out_as(tensor, part);
      return alias ? part : ordered_as(tensor, part);
    }));
  }
  shift_offset(schema, arguments, local);
  if (is_view) {
    const at::Tensor base = arguments[0].toTensor(), given = local[0].toTensor();
    op.callBoxed(local);
    return push_whole_views(whole, base, given, local, stack);
  }
  op.callBoxed(local);
  for (const auto& [tensor, part] : written) {
    const DistMeta& meta = *find_dist_meta(tensor);
    part.is_same(meta.local) ? wrote_to(meta)
                             : write_part(meta, part.sizes(), part, *whole, schema.name());
  }
  push_results(schema, arguments, stack, [&](size_t i, size_t&) {
    return map_tensors(local[i], [&](const at::Tensor& part) {
      return make_dist(part, whole, part.sizes(), part.strides());
    });
  });
}

// Follows the ranks of the mesh in placing the arguments of an operator that does not write to
// them.
void note_placed(at::ArrayRef<c10::IValue> arguments, const OpPlan* plan,
                 const DistSpecPtr& whole) {
  size_t input = 0;
  for (const c10::IValue& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      note_placed_argument(tensor, plan ? plan->inputs[input++] : whole);
    });
}

// Results of the global sizes and dtypes.
Stack results_without_data(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  const RuleEntry* const rule = find_rule(op.schema());
  std::optional<Stack> results;
  if (!rule || !rule->knows_sizes) results = run_on_meta(op, arguments);
  return results ? std::move(*results) : run_on_constants(op, arguments);
}

// Calls an operator on a rank that is not in the mesh of the DistTensors: pushes the results that
// the ranks of the mesh get, with the global sizes and dtypes but without data, so that one program
// runs on all ranks. `plan` may be null; `results` caches the results for later calls that have the
// same plan.
void call_outside(const c10::OperatorHandle& op, const DeviceMesh& mesh, const OpPlan* plan,
                  std::optional<Stack>& results, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  check_known_outside(op, arguments, mesh);
  check_own_elements(schema, arguments);
  if (plan) reduce_gradients_of(*plan, arguments);
  const DistSpecPtr whole = intern(mesh, replicated(mesh));
  const c10::Device device = device_of(arguments);
  if (plan ? !plan->writes : !schema.is_mutable()) note_placed(arguments, plan, whole);
  const bool is_view =
      returns_views(schema) && arguments[0].isTensor() && find_dist_meta(arguments[0].toTensor());
  push_results(schema, arguments, stack, [&](size_t i, size_t& output) {
    if (plan && std::ranges::binary_search(plan->unwanted, i)) return c10::IValue(at::Tensor());
    if (!results) results = results_without_data(op, arguments);
    return map_tensors((*results)[i], [&](const at::Tensor& like) {
      const at::Tensor part = with_marks_of(like, at::empty({0}, like.options().device(device)));
      const OpPlan::Output* const planned = plan ? &plan->outputs[output++] : nullptr;
      const at::Tensor made = planned
                                  ? make_dist(part, planned->spec, planned->sizes, planned->strides)
                                  : make_dist(part, whole, like.sizes(), like.strides());
      is_view ? reduce_once(made, arguments[0].toTensor(), plan ? plan->inputs[0] : whole)
              : reduce_once(made);
      return made;
    });
  });
}

void replacing_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const IdentityScope identity(op, torch::jit::last(*stack, op.schema().arguments().size()));
  at::AutoDispatchBelowADInplaceOrView below;
  call_replacing(op, stack);
}

void dist_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  place_gradients_of(arguments);
  if (op.schema().is_mutable()) check_writable(op.schema(), arguments);
  const auto cached = plan_of(op, arguments);
  note_call(cached->digest);
  const DeviceMesh& mesh = cached->keys.front()->mesh;
  const IdentityScope identity(op, arguments);
  at::AutoDispatchBelowADInplaceOrView below;
  if (!mesh.is_member())
    return call_outside(op, mesh, cached->plan ? &*cached->plan : nullptr, cached->outside, stack);
  if (cached->plan) {
    if (!cached->plan->gathered_inputs.empty() &&
        (is_strict() || !std::exchange(cached->is_told, true)))
      tell_gather(op, arguments, cached->plan->inputs);
    return call_planned(op, *cached->plan, stack);
  }
  if (!is_meant_whole(op.schema().name())) tell_without_rule(op, arguments);
  call_replicated(op, mesh, stack);
}

void random_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  place_gradients_of(torch::jit::last(*stack, op.schema().arguments().size()));
  {
    const IdentityScope numbered(0);  // two draws of one shape have other values
    at::AutoDispatchBelowADInplaceOrView below;
    if (call_random(op, stack)) return;
  }
  dist_kernel(op, keys, stack);
}

void list_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const KeepTerms keep;
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  place_gradients_of(arguments);
  check_writable(op.schema(), arguments);
  count_writes_to_lists(op.schema(), arguments);
  const IdentityScope identity(op, arguments);
  at::AutoDispatchBelowADInplaceOrView below;
  call_on_lists(op, stack);
}

// Lays the results of a decomposition out as the operator's own kernel does: contiguous for
// contiguous arguments.
void lay_out(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments, Stack& stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto results = torch::jit::last(stack, schema.returns().size());
  bool is_usual = true;
  for (const auto& values : {arguments, results})
    for (const c10::IValue& value : values)
      each_tensor(value, [&](const at::Tensor& tensor) { is_usual &= tensor.is_contiguous(); });
  if (is_usual || returns_views(schema) || schema.is_mutable()) return;
  const auto described = run_on_meta(op, arguments);
  for (size_t i = 0; described && i < results.size(); ++i) {
    const at::Tensor result = results[i].isTensor() ? results[i].toTensor() : at::Tensor();
    const DistMeta* const meta = find_dist_meta(result);
    if (!meta) continue;
    const at::Tensor like = (*described)[i].toTensor();
    const auto strides = strides_by_kernel(op, arguments, like.sizes(), /*is_elementwise=*/false);
    const at::Tensor wanted = strides ? like.as_strided(like.sizes(), *strides) : like;
    if (result.strides() != wanted.strides())
      stack[stack.size() - results.size() + i] = make_dist_like(meta->local, meta->spec, wanted);
  }
}

// For operators that may be decomposed into others.
class DecomposingKernel final : public c10::OperatorKernel {
 public:
  explicit DecomposingKernel(const DecompositionEntry& entry) : entry_(entry) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const KeepTerms keep;
    place_gradients_of(arguments);
    mesh_of_arguments(op, arguments);  // throws if there are several
    {
      const IdentityScope identity(op, arguments);
      at::AutoDispatchBelowADInplaceOrView below;
      const Stack before = arguments.vec();
      const DecomposedDigest digest;
      if (entry_.decompose(op, *stack)) {
        digest.note(op, *stack);
        return lay_out(op, before, *stack);
      }
    }
    dist_kernel(op, keys, stack);
  }

 private:
  const DecompositionEntry& entry_;
};

torch::CppFunction kernel_of(const c10::FunctionSchema& schema) {
  using torch::CppFunction;
  if (replaces_tensor(schema)) return CppFunction::makeFromBoxedFunction<&replacing_kernel>();
  if (takes_lists(schema)) return CppFunction::makeFromBoxedFunction<&list_kernel>();
  if (draws_numbers(schema)) return CppFunction::makeFromBoxedFunction<&random_kernel>();
  if (const DecompositionEntry* const entry = find_decomposition(schema.name()))
    return CppFunction::makeFromBoxedFunctor(std::make_unique<DecomposingKernel>(*entry));
  return CppFunction::makeFromBoxedFunction<&dist_kernel>();
}

bool has_kernel_of(const c10::OperatorHandle& op, c10::DeviceType device) {
  return op.hasKernelForDispatchKey(backend_key(device));
}

// For `set_data()`. LibTorch's own answer is no for meta tensors, and for those on devices that
// register themselves (PrivateUse1), unless both have the same keys.
bool can_take_data_of(const at::Tensor& self, const at::Tensor& from) {
  if (!find_dist_meta(self) && !find_dist_meta(from))
    return self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

}  // namespace

bool is_meant_whole(const std::string& name) {
  return name == "aten::_local_scalar_dense" || name == "aten::equal" ||
         name == "aten::multinomial" || name == "aten::_linalg_check_errors" ||
         name == "aten::_amp_update_scale_";
}

bool has_own_kernel(const c10::OperatorHandle& op) {
  const bool is_composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  return has_kernel_of(op, at::kCPU) ||
         (accelerator() && !is_composite && has_kernel_of(op, *accelerator())) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

void register_dist_operators() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_composites();
    check_kernel_layouts();
    set_module_of_operators(&last_module);
    static auto* const library = new torch::Library(
        torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse3, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0) continue;
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (op && has_own_kernel(*op))
        library->impl(c10::toString(name).c_str(), kernel_of(op->schema()));
    }
    // A kernel of the backend takes LibTorch's composite away from autograd's key.
    for (const auto key : {c10::DispatchKey::PrivateUse3, c10::DispatchKey::AutogradPrivateUse3,
                           c10::DispatchKey::Meta, c10::DispatchKey::AutogradMeta})
      (new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__))
          ->impl("_has_compatible_shallow_copy_type", &can_take_data_of);
  });
}

void register_rule(const std::string& name, Rule rule, const RuleOptions& options) {
  register_dist_operators();
  TORCH_CHECK_VALUE(rule, "[register_rule] rule must be a function; got none for '", name, "'");
  std::vector<c10::OperatorHandle> overloads;
  for (const c10::OperatorName& known : c10::Dispatcher::singleton().getAllOpNames()) {
    if (known.name != name) continue;
    if (const auto op = c10::Dispatcher::singleton().findSchema(known)) overloads.push_back(*op);
  }
  TORCH_CHECK_VALUE(!overloads.empty(),
                    "[register_rule] name must be that of an operator, with its namespace, which "
                    "is defined before; got '",
                    name, "'");
  std::erase_if(overloads, [](const c10::OperatorHandle& op) { return !has_own_kernel(op); });
  TORCH_CHECK_VALUE(!overloads.empty(), "[register_rule] '", name,
                    "' has no kernel of its own: it arrives as the operators that it is composed "
                    "of, and needs no rule");
  for (const c10::OperatorHandle& op : overloads)
    TORCH_CHECK_VALUE(!find_rule(op.schema()), "[register_rule] '", name, "' has a rule already");
  add_rule(name, rule, options);
  const std::string library = name.substr(0, name.find("::"));
  if (library == "aten") return;
  const auto library_of = [&](c10::DispatchKey key) {
    return new torch::Library(torch::Library::IMPL, library, key, __FILE__, __LINE__);
  };
  torch::Library* const kernels = library_of(c10::DispatchKey::PrivateUse3);
  // LibTorch lets operators without derivatives pass for its own backends only.
  torch::Library* const autograd = library_of(c10::DispatchKey::AutogradPrivateUse3);
  for (const c10::OperatorHandle& op : overloads) {
    const std::string overload = c10::toString(op.operator_name());
    kernels->impl(overload.c_str(), kernel_of(op.schema()));
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::Autograd))
      autograd->impl(overload.c_str(), torch::CppFunction::makeFallthrough());
  }
}

}  // namespace tessera
