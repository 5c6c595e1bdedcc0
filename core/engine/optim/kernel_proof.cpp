#include "engine/optim/kernel_proof.h"

#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "engine/optim/optimizer_kinds.h"
#include "engine/optim/tensor_kind.h"

// [Note: Proof of a kernel]
//
// LibTorch writes a fused kernel for each dtype and instruction set apart, and not all are right:
// its SGD on the CPU leaves most elements of 16-bit parameters as they are. So a kernel is taken
// only if two of its steps, from zero state and from the state that the first one made, agree with
// the plain step of the same class in double. Options that matter by being zero or not keep that;
// otherwise they become 1/4 (every dtype represents that), so that a step changes parameters, from
// 1 to 2, by far more than they are rounded.
//
// The bound: let u be the dtype's unit roundoff. In each step, a kernel rounds the parameter and up
// to three tensors of state when it stores them: 8 errors of u in all; it may compute with up to 32
// roundings of float's (or double's) u. With these numbers nothing cancels, so no later operation
// enlarges an error relative to the largest element.
namespace tessera {
namespace {

using torch::optim::Optimizer;

// Odd, longer than the longest vector, and with so many elements behind the last whole vector that
// a kernel that reads two vectors in place of one stays in the tensor.
constexpr int64_t kNumel = 127;
constexpr double kOption = 0.25;
constexpr int kStoredRoundings = 8, kComputedRoundings = 64;

// Returns an empty value for a dtype that has no proof.
std::optional<double> unit_roundoff(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return 0x1p-53;
    case at::kFloat:
      return 0x1p-24;
    case at::kHalf:
      return 0x1p-11;
    case at::kBFloat16:
      return 0x1p-8;
    default:
      return {};
  }
}

// Numbers from 1 to 2, in another order for each `factor`.
at::Tensor numbers(int64_t factor) {
  return at::arange(kNumel, at::kDouble).mul(factor).remainder(kNumel).div(kNumel).add(1);
}

// Returns the parameter and its state, as doubles of the host, after two steps of an optimizer on a
// tensor of `device` and `dtype` that starts with numbers rounded to `rounded`.
template <class Kind>
std::vector<at::Tensor> results(Kind kind, const typename Kind::Options& options, at::Device device,
                                at::ScalarType dtype, at::ScalarType rounded, FusedStep step) {
  const auto make = [&](int64_t factor) {
    return numbers(factor).to(rounded).to(at::TensorOptions(device).dtype(dtype));
  };
  const at::Tensor param = make(1);
  typename Kind::Optimizer optimizer({param}, typename Kind::Options(kOption));
  static_cast<typename Kind::Options&>(optimizer.param_groups().front().options()) = options;
  for (const int64_t factor : {7, 11}) {
    param.mutable_grad() = make(factor);
    step(optimizer);
  }
  std::vector<at::Tensor> tensors;
  const auto add = [&](const char*, const at::Tensor& tensor) {
    if (tensor.defined()) tensors.push_back(tensor.to(at::kCPU, at::kDouble));
  };
  add("", param);
  for (const auto& [key, state] : optimizer.state())
    kind.visit_state(static_cast<typename Kind::State&>(*state), add, [](auto&&...) {});
  return tensors;
}

bool agree(const std::vector<at::Tensor>& exact, const std::vector<at::Tensor>& fused,
           double bound) {
  if (exact.size() != fused.size()) return false;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double error = (fused[i] - exact[i]).abs().max().item<double>();
    if (!(error <= bound * exact[i].abs().max().item<double>())) return false;
  }
  return true;
}

template <class Kind>
bool prove(Kind kind, const typename Kind::Options& options, const TensorKind& tensors,
           FusedStep step) {
  const auto [type, index, dtype] = tensors;
  const std::optional<double> stored = unit_roundoff(dtype);
  if (!stored) return false;
  const double computed = *unit_roundoff(dtype == at::kDouble ? at::kDouble : at::kFloat);
  const FusedStep plain = [](Optimizer& optimizer) { optimizer.step(); };
  try {
    return agree(results(kind, options, at::kCPU, at::kDouble, dtype, plain),
                 results(kind, options, at::Device(type, index), dtype, dtype, step),
                 kStoredRoundings * *stored + kComputedRoundings * computed);
  } catch (const c10::Error&) {  // the kernel does not know the dtype
    return false;
  }
}

using Proof = std::tuple<std::string, std::vector<double>, TensorKind>;

// Returns the options of the proof, and sets the part of its name that they are.
template <class Kind>
typename Kind::Options simplified(Kind kind, typename Kind::Options options, Proof& proof) {
  kind.visit_options(options, [&](const char*, auto& value) {
    if constexpr (std::is_same_v<std::remove_reference_t<decltype(value)>, double>)
      value = value == 0 ? 0 : kOption;
    std::get<1>(proof).push_back(static_cast<double>(value));
  });
  return options;
}

template <class Kind>
bool is_proved_for(Kind kind, const typename Kind::Options& options, const TensorKind& tensors,
                   FusedStep step) {
  static std::mutex mutex;
  static std::map<Proof, bool> proofs;
  Proof proof{kind.kName, {}, tensors};
  const auto simple = simplified(kind, options, proof);
  {
    const std::lock_guard lock(mutex);
    const auto it = proofs.find(proof);
    if (it != proofs.end()) return it->second;
  }
  const bool holds = prove(kind, simple, tensors, step);
  const std::lock_guard lock(mutex);
  return proofs.emplace(proof, holds).first->second;
}

}  // namespace

bool is_proved(Optimizer& optimizer, FusedStep step) {
  bool all = true;
  const bool is_known = with_fixed_kind(optimizer, [&](auto kind) {
    for (auto& group : optimizer.param_groups()) {
      std::set<TensorKind> tensors;
      for (const at::Tensor& param : group.params())
        if (param.grad().defined()) tensors.insert(kind_of(param));
      const auto& options = static_cast<const typename decltype(kind)::Options&>(group.options());
      for (const TensorKind& alike : tensors)
        all = all && is_proved_for(kind, options, alike, step);
    }
  });
  return is_known && all;
}

}  // namespace tessera
