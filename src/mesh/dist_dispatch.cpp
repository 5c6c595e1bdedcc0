#include "mesh/dist_dispatch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "mesh/decompositions.h"
#include "mesh/each_tensor.h"
#include "mesh/op_plan.h"
#include "mesh/redistribute.h"

namespace tessera {

// [Note: Operators on DistTensors]
//
// One boxed kernel is registered for every operator of LibTorch that has a kernel of its own; what
// is composed of others arrives here as those. Autograd works above, so the kernel sees one forward
// or backward operator at a time, on values. It looks up the plan of the call (plan_op), gives the
// operator's CPU or CUDA kernel the local parts, placed as the plan says, and makes DistTensors of
// the results. Plans depend on the operator, shapes, strides, placements and integer arguments only
// and are kept by these.
//
// An operator without a plan is computed by every rank on the whole tensors.
namespace {

using Stack = torch::jit::Stack;

constexpr size_t kMostPlans = 20'000;

using Key = std::vector<int64_t>;

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0x9e3779b97f4a7c15;
    for (const int64_t value : key) {
      hash ^= static_cast<uint64_t>(value);
      hash *= 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

void add_to_key(Key& key, const at::Tensor& tensor) {
  if (!tensor.defined()) return key.push_back(-1);
  const DistMeta* const meta = find_dist_meta(tensor);
  const bool wants_gradient = !meta && at::GradMode::is_enabled() && tensor.requires_grad();
  key.push_back(meta ? reinterpret_cast<int64_t>(meta->spec.get()) : wants_gradient ? -5 : -2);
  key.push_back(static_cast<int64_t>(tensor.scalar_type()) * 256 + tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

// Returns false for a call that can't be told by a few numbers.
bool add_to_key(Key& key, const c10::IValue& value) {
  if (value.isTensor()) {
    add_to_key(key, value.toTensor());
  } else if (value.isNone()) {
    key.push_back(-3);
  } else if (value.isInt()) {
    key.push_back(value.toInt());
  } else if (value.isBool()) {
    key.push_back(value.toBool());
  } else if (value.isDouble()) {
    key.push_back(-4);  // no rule asks for it
  } else if (value.isIntList()) {
    const auto list = value.toIntVector();
    key.push_back(static_cast<int64_t>(list.size()));
    key.insert(key.end(), list.begin(), list.end());
  } else if (value.isTensorList() || value.isList()) {
    const auto list = value.toListRef();
    key.push_back(static_cast<int64_t>(list.size()));
    for (const c10::IValue& element : list) {
      if (!add_to_key(key, element)) return false;
    }
  } else {
    return value.isDevice() || value.isGenerator() || value.isString() || value.isScalar();
  }
  return true;
}

struct CachedPlan {
  std::optional<OpPlan> plan;
  std::vector<DistSpecPtr> keys;  // whose addresses are in the key; all on one mesh
};

const DeviceMesh& mesh_of_arguments(const c10::OperatorHandle& op,
                                    at::ArrayRef<c10::IValue> arguments) {
  const DistMeta* first = nullptr;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      if (meta && !first) first = meta;
      if (meta) {
        TORCH_CHECK_VALUE(meta->spec->mesh.is_same(first->spec->mesh) ||
                              meta->spec->mesh == first->spec->mesh,
                          "[", op.schema().name(), "] all DistTensors must lie on one mesh; got ",
                          first->spec->mesh.to_string(), " and ", meta->spec->mesh.to_string(),
                          "; redistribute() moves a tensor to another mesh");
        return;
      }
      TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && tensor.requires_grad()),
                        "[", op.schema().name(), "] an ordinary tensor that requires a gradient can't be used "
                        "together with a DistTensor, because its gradient would be one; got one of sizes ",
                        tensor.sizes(), "; distribute() it first");
    });
  }
  TORCH_INTERNAL_ASSERT(first);
  return first->spec->mesh;
}

std::shared_ptr<const CachedPlan> plan_of(const c10::OperatorHandle& op,
                                          at::ArrayRef<c10::IValue> arguments) {
  thread_local std::unordered_map<Key, std::shared_ptr<const CachedPlan>, KeyHash> plans;
  thread_local Key key;
  key.clear();
  key.push_back(reinterpret_cast<int64_t>(&op.schema()));
  bool is_complete = true;
  for (const c10::IValue& argument : arguments) is_complete &= add_to_key(key, argument);
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
  if (!is_complete) return made;
  if (plans.size() >= kMostPlans) plans.clear();
  plans.emplace(key, made);
  return made;
}

// The local part of `tensor`, placed as the operator wants it.
at::Tensor placed(const at::Tensor& tensor, const DistSpec& wanted, std::string_view subject) {
  const DistMeta* const meta = find_dist_meta(tensor);
  if (meta && meta->spec.get() == &wanted) return meta->local;
  if (meta) return convert(meta->local, *meta->spec, wanted.placements, tensor.sizes(), subject);
  const DistSpec whole{wanted.mesh, replicated(wanted.mesh)};
  return convert(tensor, whole, wanted.placements, tensor.sizes(), subject);
}

// Of a result that is an argument written to: that argument.
const c10::IValue* written_argument(const c10::FunctionSchema& schema, size_t result,
                                    const Stack& arguments) {
  const auto* const alias = schema.returns()[result].alias_info();
  if (!alias || !alias->isWrite()) return nullptr;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* const own = schema.arguments()[i].alias_info();
    if (own && own->isWrite() && own->beforeSets() == alias->beforeSets()) return &arguments[i];
  }
  return nullptr;
}

void call_planned(const c10::OperatorHandle& op, const OpPlan& plan, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  Stack arguments = torch::jit::pop(*stack, count);
  const bool is_member = plan.inputs.empty() || plan.inputs[0]->mesh.is_member();
  size_t input = 0;
  Stack local;
  local.reserve(count);
  for (const c10::IValue& argument : arguments)
    local.push_back(map_tensors(argument, [&](const at::Tensor& tensor) {
      return placed(tensor, *plan.inputs[input++], schema.name());
    }));
  for (const auto& [index, value] : plan.arguments) local[index] = value;
  if (is_member && plan.is_reshape) {
    local = {local[0].toTensor().reshape(local[1].toIntVector())};
  } else if (is_member && plan.local) {
    plan.local(op, plan.parts, local);
  } else if (is_member) {
    op.callBoxed(local);
  } else {
    local.assign(schema.returns().size(), c10::IValue(at::empty({0})));
  }
  size_t output = 0;
  for (size_t i = 0; i < local.size(); ++i) {
    const c10::IValue* const written = written_argument(schema, i, arguments);
    if (written) {
      each_tensor(*written, [&](const at::Tensor&) { ++output; });
      stack->push_back(*written);
      continue;
    }
    stack->push_back(map_tensors(local[i], [&](const at::Tensor& part) {
      const OpPlan::Output& made = plan.outputs[output++];
      return make_dist(part, made.spec, made.sizes, made.strides);
    }));
  }
}

void warn_once(const std::string& name) {
  static std::mutex mutex;
  static auto* const warned = new std::set<std::string>();
  const std::lock_guard lock(mutex);
  if (warned->insert(name).second)
    TORCH_WARN("[tessera] ", name,
               " has no rule for DistTensors that fits this call: every rank "
               "computes it on whole tensors");
}

// Every rank computes on whole tensors; what was written goes back to where it belongs.
void call_replicated(const c10::OperatorHandle& op, const DeviceMesh& mesh, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(mesh.is_member(), "[", schema.name(), "] without a rule for DistTensors can't be "
                              "called by a rank that is not in the mesh ", mesh.to_string());
  Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  const DistSpecPtr whole = intern(mesh, replicated(mesh));
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  Stack local;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    local.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      const at::Tensor part = placed(tensor, *whole, schema.name());
      if (alias && alias->isWrite() && find_dist_meta(tensor)) written.emplace_back(tensor, part);
      return part;
    }));
  }
  op.callBoxed(local);
  for (const auto& [tensor, part] : written) {
    const DistMeta& meta = *find_dist_meta(tensor);
    if (!part.is_same(meta.local))
      meta.local.copy_(convert(part, *whole, meta.spec->placements, part.sizes(), schema.name()));
  }
  for (size_t i = 0; i < local.size(); ++i) {
    const c10::IValue* const result = written_argument(schema, i, arguments);
    stack->push_back(result ? *result : map_tensors(local[i], [&](const at::Tensor& part) {
      return make_dist(part, whole, part.sizes(), part.strides());
    }));
  }
}

// What has no rule because it is meant to be computed on whole tensors.
bool is_meant_whole(const std::string& name) {
  return name == "aten::_local_scalar_dense" || name == "aten::equal";
}

void dist_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  const auto cached = plan_of(op, arguments);
  at::AutoDispatchBelowADInplaceOrView below;
  if (cached->plan) return call_planned(op, *cached->plan, stack);
  if (!is_meant_whole(op.schema().name())) warn_once(op.schema().name());
  call_replicated(op, cached->keys.front()->mesh, stack);
}

// For operators that may be a sequence of others.
void decomposing_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const Decomposition decompose = find_decomposition(op.schema().name());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    if (decompose(op, *stack)) return;
  }
  dist_kernel(op, keys, stack);
}

bool has_own_kernel(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
}

}  // namespace

void register_dist_operators() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_composites();
    static auto* const library = new torch::Library(
        torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse3, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.name.rfind("aten::", 0) != 0) continue;
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op || !has_own_kernel(*op)) continue;
      const auto full =
          name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library->impl(full.c_str(),
                    find_decomposition(name.name) && !op->schema().is_mutable()
                        ? torch::CppFunction::makeFromBoxedFunction<&decomposing_kernel>()
                        : torch::CppFunction::makeFromBoxedFunction<&dist_kernel>());
    }
  });
}

}  // namespace tessera
