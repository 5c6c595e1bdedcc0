#include "support/sim_device/operator_call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "support/sim_device/generator.h"
#include "support/sim_device/streams.h"
#include "support/sim_device/tensors.h"

namespace tessera::testing::sim {
namespace {

// CUDA's kernels move CPU tensors among these arguments to the device, or read them on the host.
const std::set<std::string>& operators_that_take_cpu_tensors() {
  static const auto& names = *new std::set<std::string>{
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  return names;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& use) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    use(tensor);
    return tensor;
  });
}

OutputForm form_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

std::vector<OutputForm> forms_of_value(const c10::IValue& value) {
  if (value.isTensor()) return {form_of(value.toTensor())};
  std::vector<OutputForm> forms;
  for (const at::Tensor& tensor : value.toTensorVector()) forms.push_back(form_of(tensor));
  return forms;
}

at::Tensor keep_wrapped(at::Tensor changed, const at::Tensor& tensor) {
  const bool is_wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (is_wrapped) changed.unsafeGetTensorImpl()->set_wrapped_number(true);
  return changed;
}

bool is_tensor_or_list(const c10::Argument& value) {
  const auto kind = value.type()->kind();
  return kind == c10::TypeKind::TensorType ||
         (kind == c10::TypeKind::ListType &&
          value.type()->containedType(0)->kind() == c10::TypeKind::TensorType);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

}  // namespace

c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

OperatorCall::OperatorCall(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments)
    : op_(op), arguments_(std::move(arguments)) {
  for (const c10::IValue& argument : arguments_) {
    if (argument.isDevice() && argument.toDevice().is_privateuseone())
      device_ = argument.toDevice();
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (device_.is_cpu() && !tensor.is_cpu()) device_ = tensor.device();
    });
  }
  TORCH_CHECK(device_.is_privateuseone(), "[sim] ", op.operator_name(),
              " without a tensor of a sim device");
  if (!device_.has_index()) device_.set_index(static_cast<c10::DeviceIndex>(current_device()));
  check_devices();
}

void OperatorCall::check_devices() {
  const std::string& name = op_.operator_name().name;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const bool takes_cpu =
        operators_that_take_cpu_tensors().contains(name) ||
        (name.starts_with("aten::_foreach_") && schema_arguments()[i].name() == "scalars");
    for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      const bool is_number = tensor.is_cpu() && tensor.dim() == 0;
      const bool is_allowed =
          tensor.is_cpu() && (takes_cpu || is_number) && !is_written(schema_arguments()[i]);
      TORCH_CHECK(tensor.device() == device_ || is_allowed,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device_, " and ", tensor.device(), "! (argument ", schema_arguments()[i].name(),
                  " of ", op_.operator_name(), ")");
    });
  }
}

std::optional<size_t> OperatorCall::written_argument(size_t index) const {
  const c10::AliasInfo* const info = op_.schema().returns()[index].alias_info();
  if (!info) return std::nullopt;
  TORCH_INTERNAL_ASSERT(info->isWrite(), "[sim] view without a kernel: ", op_.operator_name());
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const c10::AliasInfo* const other = schema_arguments()[i].alias_info();
    if (other && *other == *info) return i;
  }
  TORCH_INTERNAL_ASSERT(false, "[sim] ", op_.operator_name(), " returns no argument");
}

torch::jit::Stack OperatorCall::replaced(const std::function<at::Tensor(const at::Tensor&)>& tensor,
                                         c10::DeviceType device,
                                         const c10::IValue& generator) const {
  torch::jit::Stack stack;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const c10::IValue& argument = arguments_[i];
    if (argument.isDevice()) {
      stack.emplace_back(c10::Device(device));
    } else if (schema_arguments()[i].name() == "generator") {
      stack.push_back(generator);
    } else {
      stack.push_back(
          map_tensors(argument, [&](const at::Tensor& t) { return keep_wrapped(tensor(t), t); }));
    }
  }
  return stack;
}

torch::jit::Stack OperatorCall::for_kernel() const {
  c10::IValue generator;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (schema_arguments()[i].name() != "generator") continue;
    const auto given = arguments_[i].toOptional<at::Generator>();
    generator =
        at::check_generator<SimGenerator>(given ? given : default_generator(device_.index()))
            ->next();
  }
  return replaced(
      [](const at::Tensor& tensor) {
        return tensor.is_cpu() ? tensor.clone() : kernel_view(tensor);
      },
      c10::kCPU, generator);
}

torch::jit::Stack OperatorCall::for_meta() const {
  return replaced(
      [](const at::Tensor& tensor) {
        return at::empty_strided(tensor.sizes(), tensor.strides(),
                                 tensor.options().device(c10::kMeta));
      },
      c10::kMeta, {});
}

torch::jit::Stack OperatorCall::for_rehearsal() const {
  return replaced(
      [](const at::Tensor& tensor) {
        if (tensor.is_cpu()) return tensor;
        const auto bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                            tensor.element_size());
        const auto numel = static_cast<int64_t>(bytes / tensor.element_size());
        return at::zeros({numel}, tensor.options().device(c10::kCPU))
            .as_strided(tensor.sizes(), tensor.strides());
      },
      c10::kCPU, at::detail::createCPUGenerator());
}

OperatorCall::Forms OperatorCall::forms_of(torch::jit::Stack stack, c10::DispatchKey key) const {
  Forms forms;
  const torch::jit::Stack given = stack;
  op_.redispatchBoxed(c10::DispatchKeySet(key), &stack);
  for (size_t i = 0; i < stack.size(); ++i) {
    forms.returns.emplace_back();
    if (!written_argument(i)) forms.returns.back() = forms_of_value(stack[i]);
  }
  for (size_t i = 0; i < given.size(); ++i) {
    const bool is_tensor_out = is_out(i) && given[i].isTensor();
    forms.outs.push_back(is_tensor_out ? std::optional(form_of(given[i].toTensor()))
                                       : std::nullopt);
  }
  return forms;
}

bool OperatorCall::needs_forms() const {
  for (size_t i = 0; i < op_.schema().returns().size(); ++i)
    if (!written_argument(i)) return true;
  return std::ranges::any_of(schema_arguments(), [](const auto& a) { return a.is_out(); });
}

std::optional<OperatorCall::Forms> OperatorCall::forms() const {
  if (!needs_forms()) {
    return Forms{std::vector<std::vector<OutputForm>>(op_.schema().returns().size()),
                 std::vector<std::optional<OutputForm>>(arguments_.size())};
  }
  if (!std::ranges::all_of(op_.schema().returns(), is_tensor_or_list)) return std::nullopt;
  // All of index's overloads have the tag, but only masks give sizes that depend on data.
  const bool is_index = op_.operator_name().name == "aten::index";
  const bool has_mask = is_index && std::ranges::any_of(arguments_, [](const c10::IValue& value) {
                          bool found = false;
                          if (value.isOptionalTensorList())
                            for_each_tensor(value, [&](const at::Tensor& t) {
                              found |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
                            });
                          return found;
                        });
  const bool depends_on_data =
      op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output);
  if (is_index ? has_mask : depends_on_data) return std::nullopt;
  // An operator's own Meta kernel tells the forms without work; others are tried on zeros. If
  // neither can tell, the kernel itself will, or throw.
  for (const auto key : {c10::DispatchKey::Meta, c10::DispatchKey::CPU}) {
    const bool is_meta = key == c10::DispatchKey::Meta;
    if (is_meta && !op_.hasKernelForDispatchKey(key)) continue;
    try {
      return forms_of(is_meta ? for_meta() : for_rehearsal(), key);
    } catch (const std::exception&) {
    }
  }
  return std::nullopt;
}

}  // namespace tessera::testing::sim
