#include "tensor/module_functions.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "tensor/dist_meta.h"

namespace tessera {
namespace {

using FunctionsPtr = std::shared_ptr<const ModuleFunctions>;

constexpr c10::DispatchKeySet kBelowModules(c10::DispatchKeySet::FULL_AFTER, kModuleKey);

// The functions of that family, or else those for any; null if there are none.
FunctionsPtr find_functions(const DistMeta* meta, OperatorFamily family) {
  if (!meta) return nullptr;
  const auto& parameter = meta->parameter ? meta->parameter : meta->shown_parameter;
  if (!parameter) return nullptr;
  FunctionsPtr any;
  for (const FunctionsPtr& functions : parameter->functions) {
    if (functions->family == family) return functions;
    if (functions->family == OperatorFamily::kAny) any = functions;
  }
  return any;
}

void apply(const ModuleFunctions::Function& function, const char* which, c10::IValue& value,
           const DeviceMesh& mesh) {
  if (!function || !value.isTensor()) return;
  at::Tensor changed = function(value.toTensor(), mesh);
  TORCH_CHECK_VALUE(changed.defined(), "[module functions] the ", which,
                    " function of a module must return a tensor; got an undefined one");
  value = std::move(changed);
}

// `input` and `weight`: indices of arguments.
template <OperatorFamily family, size_t input, size_t weight>
void weighted_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                     torch::jit::Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  const c10::IValue& given = (*stack)[first + weight];
  const DistMeta* const meta = given.isTensor() ? find_dist_meta(given.toTensor()) : nullptr;
  const FunctionsPtr functions = find_functions(meta, family);
  if (!functions) return op.redispatchBoxed(keys & kBelowModules, stack);
  const DeviceMesh mesh = meta->spec->mesh;
  apply(functions->input, "input", (*stack)[first + input], mesh);
  {
    // Operators inside this one are not seen again. The keys are computed anew, since the input may
    // be another kind of tensor now.
    c10::impl::ExcludeDispatchKeyGuard exclude(kModuleKey);
    op.callBoxed(stack);
  }
  apply(functions->output, "output", stack->back(), mesh);
}

// LibTorch has no call that gives a tensor one more key.
struct KeyOf : c10::TensorImpl {
  static void add(c10::TensorImpl& tensor, c10::DispatchKey key) {
    c10::DispatchKeySet& keys = tensor.*(&KeyOf::key_set_);
    keys = keys.add(key);
  }
};

// A view knows the parameter that it shows; with the key, operators ask for the functions of that.
void transpose_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  const at::Tensor weight = stack->back().toTensor();
  op.redispatchBoxed(keys & kBelowModules, stack);
  const DistMeta* const meta = find_dist_meta(weight);
  if (meta && meta->parameter && find_functions(meta, OperatorFamily::kLinear))
    KeyOf::add(*stack->back().toTensor().unsafeGetTensorImpl(), kModuleKey);
}

template <OperatorFamily family, size_t input, size_t weight>
torch::CppFunction weighted() {
  return torch::CppFunction::makeFromBoxedFunction<&weighted_kernel<family, input, weight>>();
}

}  // namespace

void set_functions(const at::Tensor& weight, ModuleFunctions functions) {
  at::NoGradGuard no_grad;
  const DistMeta& meta = dist_meta("set_module_functions", weight);
  DistParameter parameter = meta.parameter ? *meta.parameter : DistParameter();
  std::erase_if(parameter.functions,
                [&](const FunctionsPtr& known) { return known->family == functions.family; });
  if (functions.input || functions.output)
    parameter.functions.push_back(std::make_shared<const ModuleFunctions>(std::move(functions)));
  weight.set_data(make_dist(meta.local, meta.spec, weight.sizes(), weight.strides(),
                            std::make_shared<const DistParameter>(std::move(parameter))));
}

bool has_functions(const at::Tensor& weight, OperatorFamily family) {
  return find_functions(find_dist_meta(weight), family) != nullptr;
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, TESTING_ONLY_GenericWrapper, m) {
  using enum OperatorFamily;
  m.impl("t", torch::CppFunction::makeFromBoxedFunction<&transpose_kernel>());
  // Not `mm`: the backward of all three calls it with the weight.
  for (const char* name : {"linear", "matmul"}) m.impl(name, weighted<kLinear, 0, 1>());
  m.impl("addmm", weighted<kLinear, 1, 2>());
  m.impl("embedding", weighted<kEmbedding, 1, 0>());
  for (const char* name : {"layer_norm", "rms_norm", "group_norm"})
    m.impl(name, weighted<kOther, 0, 2>());
  for (const char* name : {"batch_norm", "instance_norm", "conv1d", "conv2d", "conv3d",
                           "conv1d.padding", "conv2d.padding", "conv3d.padding", "conv_transpose1d",
                           "conv_transpose2d.input", "conv_transpose3d.input"})
    m.impl(name, weighted<kOther, 0, 1>());
}

}  // namespace tessera
