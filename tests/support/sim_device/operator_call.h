#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <vector>

namespace tessera::testing::sim {

/// An output as its operator would allocate it.
struct OutputForm {
  bool is_defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};

/// Applies `change` to the tensors in `value`: a tensor, or a list of (optional) tensors. Skips
/// undefined ones.
c10::IValue map_tensors(const c10::IValue& value,
                        const std::function<at::Tensor(const at::Tensor&)>& change);

/// An operator with the arguments of one call, of which some are tensors of a sim device.
class OperatorCall {
 public:
  /// Throws if the arguments' tensors are not all on one device. As for CUDA, CPU tensors without
  /// dims count as numbers.
  OperatorCall(const c10::OperatorHandle& op, std::vector<c10::IValue> arguments);

  const c10::OperatorHandle& op() const { return op_; }
  c10::Device device() const { return device_; }
  const std::vector<c10::IValue>& arguments() const { return arguments_; }
  bool is_out(size_t argument) const { return schema_arguments()[argument].is_out(); }

  /// The arguments for a kernel that runs later: CPU tensors over the device's memory, copies of
  /// numbers, and a CPU generator seeded by the device's.
  torch::jit::Stack for_kernel() const;

  /// The argument that return `index` is; nullopt for a new tensor or another value.
  std::optional<size_t> written_argument(size_t index) const;

  /// The forms of all new outputs (none for returned arguments), and the sizes of `out` arguments;
  /// nullopt if they depend on data.
  struct Forms {
    std::vector<std::vector<OutputForm>> returns;  // a list has several
    std::vector<std::optional<OutputForm>> outs;   // by argument
  };
  std::optional<Forms> forms() const;

 private:
  const std::vector<c10::Argument>& schema_arguments() const { return op_.schema().arguments(); }
  bool needs_forms() const;
  void check_devices();
  Forms forms_of(torch::jit::Stack stack, c10::DispatchKey key) const;
  torch::jit::Stack for_meta() const;
  torch::jit::Stack for_rehearsal() const;
  torch::jit::Stack replaced(const std::function<at::Tensor(const at::Tensor&)>& tensor,
                             c10::DeviceType device, const c10::IValue& generator) const;

  const c10::OperatorHandle& op_;
  std::vector<c10::IValue> arguments_;
  c10::Device device_{c10::kCPU};
};

}  // namespace tessera::testing::sim
