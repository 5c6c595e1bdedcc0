// [Note: Operators] An operator runs in two parts. On the caller's thread: the checks, the forms of
// the outputs (see OperatorCall::forms()), their allocation, and the choice of random numbers. On
// the stream's thread, later: the CPU's kernel, with CPU tensors over the device's memory, and the
// copying of its results to the outputs. The stream keeps addresses only, so memory that is freed
// before the kernel runs is the next tensor's, as on CUDA.
//
// If the forms depend on data, the caller waits for the kernel and allocates the outputs then.
#include "support/sim_device/kernels.h"

#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <tuple>
#include <utility>

#include "support/sim_device/copies.h"
#include "support/sim_device/operator_call.h"
#include "support/sim_device/sim_device.h"
#include "support/sim_device/streams.h"
#include "support/sim_device/tensors.h"

namespace tessera::testing::sim {
namespace {

using torch::jit::Stack;

struct OperatorsThatWaited {
  std::mutex mutex;
  std::vector<std::string> names;

  static OperatorsThatWaited& get() {
    static auto& operators = *new OperatorsThatWaited;
    return operators;
  }
};

at::Tensor allocate(const OutputForm& form, c10::Device device) {
  if (!form.is_defined) return {};
  return at::empty_strided(form.sizes, form.strides,
                           at::TensorOptions().dtype(form.dtype).device(device));
}

c10::IValue allocate_return(const std::vector<OutputForm>& forms, bool is_list,
                            c10::Device device) {
  if (!is_list) return allocate(forms.at(0), device);
  c10::List<at::Tensor> list;
  for (const OutputForm& form : forms) list.push_back(allocate(form, device));
  return list;
}

void store(const at::Tensor& result, const at::Tensor& output) {
  if (!output.defined()) return;
  TORCH_CHECK(result.defined() && result.sizes() == output.sizes(),
              "[sim] a kernel's output differs in size from its form");
  output.copy_(result);
}

// Copies results to outputs, except for returned arguments, which the kernel has written itself.
void store_results(const Stack& results, const Stack& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i].isTensor()) {
      store(results[i].toTensor(), outputs[i].toTensor());
    } else if (outputs[i].isTensorList()) {
      const auto from = results[i].toTensorVector(), to = outputs[i].toTensorVector();
      for (size_t k = 0; k < to.size(); ++k) store(from.at(k), to[k]);
    }
  }
}

Stack outputs_of(const OperatorCall& call, const OperatorCall::Forms& forms) {
  Stack outputs;
  const auto& returns = call.op().schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    const auto written = call.written_argument(i);
    const bool is_list = returns[i].type()->kind() == c10::TypeKind::ListType;
    outputs.push_back(written ? call.arguments()[*written]
                              : allocate_return(forms.returns[i], is_list, call.device()));
  }
  return outputs;
}

Stack issue(const OperatorCall& call, const OperatorCall::Forms& forms) {
  for (size_t i = 0; i < forms.outs.size(); ++i) {
    if (!forms.outs[i]) continue;
    const at::Tensor& out = call.arguments()[i].toTensor();
    if (out.sizes() != forms.outs[i]->sizes) resize_tensor(out, forms.outs[i]->sizes);
  }
  Stack outputs = outputs_of(call, forms);
  Stack targets;  // as the kernel reaches them; none for returned arguments
  for (size_t i = 0; i < outputs.size(); ++i)
    targets.push_back(call.written_argument(i) ? c10::IValue()
                                               : map_tensors(outputs[i], kernel_view));
  current_queue(call.device().index())
      .push(call.op().operator_name().name,
            [op = call.op(), stack = call.for_kernel(), targets = std::move(targets)]() mutable {
              const PlainDispatch plain;
              op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
              store_results(stack, targets);
            });
  return outputs;
}

at::Tensor to_device(const at::Tensor& host, c10::Device device) {
  OutputForm form{true, host.sizes().vec(), host.strides().vec(), host.scalar_type()};
  at::Tensor result = allocate(form, device);
  copy_from(host, result, /*non_blocking=*/false);
  return result;
}

// Runs the kernel while the host waits. It writes `out` arguments to new tensors, whose sizes are
// known afterwards.
Stack run_now(const OperatorCall& call) {
  const std::string name(toString(call.op().operator_name()));
  {
    auto& waited = OperatorsThatWaited::get();
    std::lock_guard lock(waited.mutex);
    waited.names.push_back(name);
  }
  Stack stack = call.for_kernel();
  const auto is_new_out = [&](size_t i) { return call.is_out(i) && stack[i].isTensor(); };
  for (size_t i = 0; i < stack.size(); ++i)
    if (is_new_out(i)) stack[i] = at::empty({0}, stack[i].toTensor().options());
  const Stack given = stack;
  auto results = std::make_shared<Stack>(std::move(stack));
  auto& queue = current_queue(call.device().index());
  queue.push(name + " (the host waits)", [op = call.op(), results] {
    const PlainDispatch plain;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), results.get());
  });
  queue.synchronize();
  stack = given;
  for (size_t i = 0; i < stack.size(); ++i) {
    if (!is_new_out(i)) continue;
    const at::Tensor& out = call.arguments()[i].toTensor();
    if (out.sizes() != stack[i].toTensor().sizes()) resize_tensor(out, stack[i].toTensor().sizes());
    copy_from(stack[i].toTensor(), out, /*non_blocking=*/false);
  }
  Stack outputs;
  for (size_t i = 0; i < results->size(); ++i) {
    const auto written = call.written_argument(i);
    outputs.push_back(written ? call.arguments()[*written]
                              : map_tensors((*results)[i], [&](const at::Tensor& host) {
                                  return to_device(host, call.device());
                                }));
  }
  return outputs;
}

c10::OperatorHandle operator_named(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// The CPU's convolution chooses among implementations, which only CPU tensors can use.
void convolution(const c10::OperatorHandle& /*op*/, Stack* stack) {
  run_operator(operator_named("aten::convolution"), stack);
}

// The CPU's has one argument more, after three tensors: the sizes of the bias, or None.
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto first = static_cast<ptrdiff_t>(stack->size() - op.schema().arguments().size());
  const at::Tensor grad_output = (*stack)[first].toTensor();
  const bool has_bias = stack->back().toBoolList().get(2);
  const c10::IValue sizes =
      has_bias ? c10::IValue(c10::List<int64_t>{grad_output.size(1)}) : c10::IValue();
  stack->insert(stack->begin() + first + 3, sizes);
  run_operator(operator_named("aten::convolution_backward"), stack);
}

// The CPU's kernel draws from the process's default generator. This is its formula.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  const at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

void register_operators(torch::Library& aten) {
  const auto by_cpu = [] { return torch::CppFunction::makeFromBoxedFunction<&run_operator>(); };
  // LibTorch has kernels of these for all devices, whose bits differ from those of the CPU's, or
  // (the losses) which resize their output twice, with a warning.
  for (const char* name :
       {"addr", "addr.out", "all.dims", "all.dims_out", "any.dims", "any.dims_out",
        "native_group_norm", "native_layer_norm", "narrow_copy", "pixel_shuffle",
        "pixel_unshuffle", "native_channel_shuffle", "silu_backward", "mish_backward",
        "linalg__powsum", "mse_loss", "smooth_l1_loss"})
    aten.impl(name, by_cpu());
  aten.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  aten.impl("convolution_backward_overrideable",
            torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  aten.impl("native_dropout", native_dropout);
}

}  // namespace

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const OperatorCall call(op, torch::jit::pop(*stack, count));
  const c10::DeviceGuard device(call.device());
  const PlainDispatch plain;
  const auto forms = call.forms();
  for (c10::IValue& output : forms ? issue(call, *forms) : run_now(call))
    stack->push_back(std::move(output));
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

void register_kernels() {
  using torch::Library;
  // Never destroyed, as that would unregister the operators before the streams' threads end.
  static auto& all = *new Library(Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, 0);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  static auto& aten =
      *new Library(Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, 0);
  register_copies(aten);
  register_operators(aten);
  register_autocast();
}

}  // namespace tessera::testing::sim
