#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <tessera/tensor/device_mesh.h>

#include <cstdint>
#include <functional>

namespace tessera {

// [Note: Functions of inner modules]
//
// C++ modules have no hooks, and no code sees that one module calls another. But a module that has
// a weight passes it to an operator. So a weight whose module has functions carries one more
// dispatch key, for which the operators that apply weights have a kernel: it calls the input
// function, the operator and the output function. All other operators fall through at that key, and
// tensors without it (all others) pay nothing.
//
// `torch::nn::Linear` does not call `linear`: it transposes its weight, and calls `matmul` or
// `addmm`. So the transposed weight gets the key as well.
//
// The key comes before those of autograd and autocast: functions are differentiated as if the
// program had called them, and a weight is recognized before autocast replaces it by a copy.

/// The dispatch key of weights whose modules have functions. LibTorch keeps it for tests.
constexpr c10::DispatchKey kModuleKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// Operators that apply a weight. A weight that two modules share, such as that of an embedding and
/// of the last linear layer, has functions for each.
enum class OperatorFamily : uint8_t {
  kAny,  ///< of functions: all operators below
  kLinear,
  kEmbedding,
  kOther,  ///< of operators: norms and convolutions
};

/// Functions that are called around the operator to which a module passes its weight.
struct ModuleFunctions {
  using Function = std::function<at::Tensor(const at::Tensor& tensor, const DeviceMesh& mesh)>;
  Function input;   ///< may be empty
  Function output;  ///< may be empty
  OperatorFamily family = OperatorFamily::kAny;
};

/// Lets operators of the family call these functions when they get `weight`, a parameter that is a
/// DistTensor, in place of those set before. Removes the latter if both are empty.
void set_functions(const at::Tensor& weight, ModuleFunctions functions);

/// Returns true if `weight` has functions for operators of this family, or for any.
bool has_functions(const at::Tensor& weight, OperatorFamily family);

}  // namespace tessera
