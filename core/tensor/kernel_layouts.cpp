#include "tensor/kernel_layouts.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "tensor/dist_meta.h"

namespace tessera {
namespace {

bool is_strided(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined() || find_dist_meta(value.toTensor()))
    return false;
  const at::Tensor tensor = value.toTensor();
  return !tensor.is_contiguous(tensor.suggest_memory_format());
}

// Functions above the kernels, of LibTorch or of a user, may get any tensor.
bool is_below_autograd() {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
}

std::unique_ptr<at::ObserverContext> check_call(const at::RecordFunction& call) {
  const auto schema = call.operator_schema();
  if (!schema || !is_below_autograd()) return nullptr;
  const std::string_view strided = find_strided_input(*schema, call.inputs());
  if (strided.empty()) return nullptr;
  std::fprintf(
      stderr,
      "TESSERA_CHECK_LAYOUTS: the kernel of %s reads `%.*s` as contiguous, and gets it strided\n",
      call.name(), static_cast<int>(strided.size()), strided.data());
  std::abort();  // LibTorch ignores exceptions of observers
}

}  // namespace

std::span<const ContiguousInput> contiguous_inputs() {
  static constexpr ContiguousInput kInputs[] = {
      {"aten::_embedding_bag_backward", "indices"},
      {"aten::_embedding_bag_backward", "offsets"},
      {"aten::_embedding_bag_backward", "offset2bag"},
      {"aten::_embedding_bag_per_sample_weights_backward", "indices"},
      {"aten::_embedding_bag_per_sample_weights_backward", "offset2bag"},
      {"aten::_linalg_check_errors", "info"},
      {"aten::_pdist_backward", "self"},
      {"aten::_pdist_backward", "pdist"},
      {"aten::_pdist_forward", "self"},
      {"aten::adaptive_max_pool3d_backward", "indices"},
      {"aten::fractional_max_pool2d_backward", "indices"},
      {"aten::fractional_max_pool3d_backward", "indices"},
      {"aten::native_batch_norm_backward", "weight"},
      {"aten::native_group_norm", "input"},
      {"aten::native_group_norm", "weight"},
      {"aten::native_group_norm", "bias"},
      {"aten::native_group_norm_backward", "grad_out"},
      {"aten::native_group_norm_backward", "input"},
      {"aten::native_group_norm_backward", "mean"},
      {"aten::native_group_norm_backward", "rstd"},
      {"aten::native_group_norm_backward", "weight"},
      {"aten::native_layer_norm_backward", "mean"},
      {"aten::native_layer_norm_backward", "rstd"},
  };
  return kInputs;
}

std::string_view find_strided_input(const c10::FunctionSchema& schema,
                                    at::ArrayRef<const c10::IValue> arguments) {
  for (const auto& [op, argument] : contiguous_inputs()) {
    if (schema.name() != op) continue;
    const auto index = schema.argumentIndexWithName(std::string(argument));
    if (index && is_strided(arguments[*index])) return argument;
  }
  return "";
}

void check_kernel_layouts() {
  const char* const value = std::getenv("TESSERA_CHECK_LAYOUTS");
  if (!value || std::string_view(value) != "1") return;
  at::addGlobalCallback(
      at::RecordFunctionCallback(check_call)
          .needsInputs(true)
          .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

}  // namespace tessera
