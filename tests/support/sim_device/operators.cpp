// [Note: Operators] An operator runs in two parts. On the caller's thread: the checks, the
// prototypes of the outputs, their allocation, and the choice of random numbers. On the stream's
// thread, later: the CPU's kernel, with CPU tensors over the device's memory, and the copying of
// its results to the outputs. The stream keeps addresses only, so memory that is freed before the
// kernel runs is the next tensor's, as on CUDA.
//
// Prototypes have the sizes, strides and dtypes of outputs. They come from the operator's own Meta
// kernel; if it has none, from the CPU's kernel, tried on zeros. If they depend on data, or the
// operator is not LibTorch's, the caller waits for the kernel and allocates the outputs then.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "support/sim_device/backend.h"
#include "support/sim_device/sim_device.h"
#include "support/sim_device/streams.h"

namespace tessera::testing::sim {
namespace {

using c10::IValue;
using torch::jit::Stack;
using TensorMap = std::function<at::Tensor(const at::Tensor&)>;

constexpr c10::DispatchKeySet kCpuKey(c10::DispatchKey::CPU);

struct OperatorsThatWaited {
  std::mutex mutex;
  std::vector<std::string> names;

  static OperatorsThatWaited& get() {
    static auto& operators = *new OperatorsThatWaited;
    return operators;
  }
};

// Applies `change` to a tensor, or to those of a list; skips undefined ones.
IValue map_tensors(const IValue& value, const TensorMap& change) {
  const auto map_all = [&](auto list, const auto& tensors) {
    for (const auto& tensor : tensors)
      list.push_back(map_tensors(IValue(tensor), change).to<typename decltype(list)::value_type>());
    return list;
  };
  if (value.isTensor())
    return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) return map_all(c10::List<at::Tensor>(), value.toTensorVector());
  if (value.isOptionalTensorList())
    return map_all(c10::List<std::optional<at::Tensor>>(), value.toOptionalTensorVector());
  return value;
}

void for_each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& use) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    use(tensor);
    return tensor;
  });
}

at::Tensor new_like(const at::Tensor& prototype, c10::Device device) {
  return at::empty_strided(prototype.sizes(), prototype.strides(),
                           prototype.options().device(device));
}

at::Tensor zeros_like_on_cpu(const at::Tensor& tensor) {
  const size_t bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size());
  const auto numel = static_cast<int64_t>(bytes / tensor.element_size());
  return at::zeros({numel}, tensor.options().device(c10::kCPU))
      .as_strided(tensor.sizes(), tensor.strides());
}

bool is_tensor_or_list(const c10::Argument& value) {
  const c10::TypePtr& type = value.type();
  return type->isSubtypeOf(*c10::TensorType::get()) ||
         type->isSubtypeOf(*c10::ListType::ofTensors());
}

// An operator with the arguments of one call, of which some are tensors of a sim device.
class OperatorCall {
 public:
  OperatorCall(const c10::OperatorHandle& op, Stack arguments)
      : op_(op), schema_(op.schema().arguments()), arguments_(std::move(arguments)) {
    for (const IValue& argument : arguments_) {
      if (argument.isDevice()) device_ = argument.toDevice();
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (device_.is_cpu() && !tensor.is_cpu()) device_ = tensor.device();
      });
    }
    TORCH_CHECK(device_.is_privateuseone(), "[sim] ", op.operator_name(), " on ", device_);
    if (!device_.has_index()) device_.set_index(static_cast<c10::DeviceIndex>(current_device()));
    for (size_t i = 0; i < arguments_.size(); ++i) check_devices(i);
  }

  Stack run() {
    const c10::DeviceGuard device(device_);
    const PlainDispatch plain;
    const auto prototypes = find_prototypes();
    return prototypes ? issue(*prototypes) : run_now();
  }

 private:
  struct Prototypes {
    Stack returns;
    Stack arguments;  // `out` arguments have their sizes here
  };

  // As on CUDA, CPU tensors without dims count as numbers.
  void check_devices(size_t i) const {
    static const auto& take_cpu_indices = *new std::set<std::string>{
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
    const std::string& name = op_.operator_name().name;
    const bool takes_cpu = take_cpu_indices.contains(name) || schema_[i].name() == "scalars";
    const bool is_written = schema_[i].alias_info() && schema_[i].alias_info()->isWrite();
    for_each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      const bool is_allowed = tensor.is_cpu() && (takes_cpu || tensor.dim() == 0) && !is_written;
      TORCH_CHECK(tensor.device() == device_ || is_allowed,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device_, " and ", tensor.device(), "! (argument ", schema_[i].name(), " of ",
                  op_.operator_name(), ")");
    });
  }

  bool is_out(size_t i) const { return schema_[i].is_out() && arguments_[i].isTensor(); }

  // The argument that is returned; nullptr for new tensors and other values.
  const IValue* written_argument(size_t index) const {
    const c10::AliasInfo* const info = op_.schema().returns()[index].alias_info();
    if (!info) return nullptr;
    TORCH_INTERNAL_ASSERT(info->isWrite(), "[sim] view without a kernel: ", op_.operator_name());
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (schema_[i].alias_info() && *schema_[i].alias_info() == *info) return &arguments_[i];
    TORCH_INTERNAL_ASSERT(false, "[sim] ", op_.operator_name(), " returns no argument");
  }

  // Returned arguments, and `make(i)` for new outputs.
  Stack outputs(size_t count, const std::function<IValue(size_t)>& make) const {
    Stack all;
    for (size_t i = 0; i < count; ++i) {
      const IValue* const written = written_argument(i);
      all.push_back(written ? *written : make(i));
    }
    return all;
  }

  Stack replaced(const TensorMap& tensor, c10::DeviceType device, const IValue& generator) const {
    const auto change = [&](const at::Tensor& given) {
      at::Tensor changed = tensor(given);
      if (given.unsafeGetTensorImpl()->is_wrapped_number())
        changed.unsafeGetTensorImpl()->set_wrapped_number(true);
      return changed;
    };
    Stack stack;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_[i].name() == "generator") {
        stack.push_back(generator);
      } else {
        const bool is_device = arguments_[i].isDevice();
        stack.push_back(is_device ? IValue(c10::Device(device))
                                  : map_tensors(arguments_[i], change));
      }
    }
    return stack;
  }

  // With CPU tensors over the device's memory, copies of numbers, and a CPU generator seeded by the
  // device's.
  Stack arguments_for_kernel() const {
    IValue generator;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (schema_[i].name() != "generator") continue;
      auto given = arguments_[i].toOptional<at::Generator>();
      if (!given) given = default_generator(device_.index());
      generator = at::check_generator<SimGenerator>(given)->next();
    }
    const auto view = [](const at::Tensor& tensor) {
      return tensor.is_cpu() ? tensor.clone() : kernel_view(tensor);
    };
    return replaced(view, c10::kCPU, generator);
  }

  Prototypes prototypes_by(c10::DispatchKey key) const {
    const auto as_meta = [](const at::Tensor& tensor) { return new_like(tensor, c10::kMeta); };
    const auto as_zeros = [](const at::Tensor& tensor) {
      return tensor.is_cpu() ? tensor : zeros_like_on_cpu(tensor);
    };
    Prototypes made;
    made.arguments = key == c10::DispatchKey::Meta
                         ? replaced(as_meta, c10::kMeta, {})
                         : replaced(as_zeros, c10::kCPU, at::detail::createCPUGenerator());
    made.returns = made.arguments;
    op_.redispatchBoxed(c10::DispatchKeySet(key), &made.returns);
    return made;
  }

  bool depends_on_data() const {
    if (op_.operator_name().name == "aten::index") {  // its tag is for masks
      bool has_mask = false;
      for_each_tensor(arguments_[1], [&](const at::Tensor& index) {
        has_mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
      });
      return has_mask;
    }
    if (op_.operator_name().name == "aten::_unique") return true;  // has its tag from 2.13 on
    return op_.hasTag(at::Tag::dynamic_output_shape) ||
           op_.hasTag(at::Tag::data_dependent_output) ||
           !std::ranges::all_of(op_.schema().returns(), is_tensor_or_list);
  }

  std::optional<Prototypes> find_prototypes() const {
    const size_t returns = op_.schema().returns().size();
    bool writes_arguments_only = true;
    for (size_t i = 0; i < arguments_.size(); ++i) writes_arguments_only &= !schema_[i].is_out();
    for (size_t i = 0; i < returns; ++i) writes_arguments_only &= written_argument(i) != nullptr;
    if (writes_arguments_only) return Prototypes{Stack(returns), arguments_};
    if (depends_on_data()) return std::nullopt;
    const bool is_libtorchs = op_.operator_name().name.starts_with("aten::");
    for (const auto key : {c10::DispatchKey::Meta, c10::DispatchKey::CPU}) {
      if (key == c10::DispatchKey::Meta && !op_.hasKernelForDispatchKey(key)) continue;
      // A trial of somebody else's operator could have effects, such as a collective.
      if (key == c10::DispatchKey::CPU && !is_libtorchs) continue;
      try {
        return prototypes_by(key);
      } catch (const std::exception&) {  // the kernel itself will throw, or can tell
      }
    }
    return std::nullopt;
  }

  StreamQueue& queue() const { return current_queue(device_.index()); }

  Stack issue(const Prototypes& prototypes) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const at::IntArrayRef sizes =
          is_out(i) ? prototypes.arguments[i].toTensor().sizes() : at::IntArrayRef();
      if (is_out(i) && arguments_[i].toTensor().sizes() != sizes)
        resize_out(arguments_[i].toTensor(), sizes);
    }
    const Stack made = outputs(prototypes.returns.size(), [&](size_t i) {
      return map_tensors(prototypes.returns[i],
                         [&](const at::Tensor& prototype) { return new_like(prototype, device_); });
    });
    Stack targets;  // none for returned arguments, which the kernel itself writes
    for (size_t i = 0; i < made.size(); ++i)
      targets.push_back(written_argument(i) ? IValue() : map_tensors(made[i], kernel_view));
    queue().push(op_.operator_name().name, [op = op_, stack = arguments_for_kernel(),
                                            targets = std::move(targets)]() mutable {
      const PlainDispatch plain;
      op.redispatchBoxed(kCpuKey, &stack);
      for (size_t i = 0; i < targets.size(); ++i) store(stack[i], targets[i]);
    });
    return made;
  }

  static void store(const IValue& results, const IValue& targets) {
    std::vector<at::Tensor> values;
    for_each_tensor(results, [&](const at::Tensor& result) { values.push_back(result); });
    size_t next = 0;
    for_each_tensor(targets, [&](const at::Tensor& target) {
      const at::Tensor& result = values.at(next++);
      TORCH_CHECK(result.sizes() == target.sizes(), "[sim] a result has sizes ", result.sizes(),
                  ", its prototype ", target.sizes());
      target.copy_(result);
    });
  }

  // The kernel writes `out` arguments to new tensors, whose sizes are known afterwards.
  Stack run_now() const {
    const std::string name = toString(op_.operator_name());
    {
      auto& waited = OperatorsThatWaited::get();
      std::lock_guard lock(waited.mutex);
      waited.names.push_back(name);
    }
    Stack given = arguments_for_kernel();
    for (size_t i = 0; i < given.size(); ++i)
      if (is_out(i)) given[i] = at::empty({0}, given[i].toTensor().options());
    const auto results = std::make_shared<Stack>(given);
    queue().push(name, [op = op_, results] {
      const PlainDispatch plain;
      op.redispatchBoxed(kCpuKey, results.get());
    });
    queue().synchronize();
    for (size_t i = 0; i < given.size(); ++i) {
      if (!is_out(i)) continue;
      const at::Tensor &host = given[i].toTensor(), &out = arguments_[i].toTensor();
      if (out.sizes() != host.sizes()) resize_out(out, host.sizes());
      copy_from(host, out, /*non_blocking=*/false);
    }
    return outputs(results->size(), [&](size_t i) {
      return map_tensors((*results)[i], [&](const at::Tensor& host) {
        return copy_from(host, new_like(host, device_), /*non_blocking=*/false);
      });
    });
  }

  const c10::OperatorHandle& op_;
  const std::vector<c10::Argument>& schema_;
  const Stack arguments_;
  c10::Device device_{c10::kCPU};
};

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  OperatorCall call(op, torch::jit::pop(*stack, op.schema().arguments().size()));
  for (IValue& output : call.run()) stack->push_back(std::move(output));
}

// The CPU's convolution chooses among implementations, which only CPU tensors can use.
void convolution(const c10::OperatorHandle& /*op*/, Stack* stack) {
  run_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

// The CPU's has one argument more, after three tensors: the sizes of the bias, or None.
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto first = static_cast<ptrdiff_t>(stack->size() - op.schema().arguments().size());
  const int64_t channels = (*stack)[first].toTensor().size(1);
  const bool has_bias = stack->back().toBoolList().get(2);
  stack->insert(stack->begin() + first + 3,
                has_bias ? IValue(c10::List<int64_t>{channels}) : IValue());
  run_operator(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""),
               stack);
}

// The CPU's kernel draws from the process's default generator. This is its formula.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  const at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

}  // namespace

void register_operators(torch::Library& aten) {
  const auto by_cpu = [] { return torch::CppFunction::makeFromBoxedFunction<&run_operator>(); };
  library("_", c10::DispatchKey::PrivateUse1).fallback(by_cpu());
  // LibTorch has kernels of these for all devices, whose bits differ from those of the CPU's, or
  // (the losses) which resize their output twice, with a warning.
  for (const char* name :
       {"addr", "addr.out", "all.dims", "all.dims_out", "any.dims", "any.dims_out",
        "native_group_norm", "native_layer_norm", "narrow_copy", "pixel_shuffle", "pixel_unshuffle",
        "native_channel_shuffle", "silu_backward", "mish_backward", "linalg__powsum", "mse_loss",
        "smooth_l1_loss"})
    aten.impl(name, by_cpu());
  aten.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  aten.impl("convolution_backward_overrideable",
            torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  aten.impl("native_dropout", native_dropout);
}

std::vector<std::string> operators_that_waited() {
  auto& waited = OperatorsThatWaited::get();
  std::lock_guard lock(waited.mutex);
  return waited.names;
}

void forget_operators_that_waited() {
  auto& waited = OperatorsThatWaited::get();
  std::lock_guard lock(waited.mutex);
  waited.names.clear();
}

}  // namespace tessera::testing::sim
