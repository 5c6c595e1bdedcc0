// The step of `tessera.CPUAdam`.
#include <tessera/engine/cpu_adam.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.h"

namespace tessera::python {
namespace {

// The moments of a parameter, and their scales; nothing where there is none yet.
using Moments = std::vector<std::optional<at::Tensor>>;

// Steps parameters of a param group, whose options and state are Python's. `steps`: of each
// parameter, with this one. Returns the moments that the parameters then have.
std::vector<Moments> step_cpu_adam(const std::vector<at::Tensor>& params,
                                   const std::vector<Moments>& moments,
                                   const std::vector<int64_t>& steps, double lr,
                                   std::tuple<double, double> betas, double eps,
                                   double weight_decay, bool bias_correction, bool adamw_mode,
                                   at::ScalarType state_dtype, int64_t seed) {
  CPUAdam adam(params, CPUAdamOptions(lr)
                           .betas(betas)
                           .eps(eps)
                           .weight_decay(weight_decay)
                           .bias_correction(bias_correction)
                           .adamw_mode(adamw_mode)
                           .state_dtype(state_dtype)
                           .seed(seed));
  for (size_t i = 0; i < params.size(); ++i) {
    const auto given = [&](size_t k) { return moments[i].at(k).value_or(at::Tensor()); };
    auto state = std::make_unique<CPUAdamParamState>();
    state->step(steps[i] - 1);
    state->exp_avg(given(0)).exp_avg_sq(given(1));
    state->exp_avg_scale(given(2)).exp_avg_sq_scale(given(3));
    adam.state()[params[i].unsafeGetTensorImpl()] = std::move(state);
  }
  adam.step();
  std::vector<Moments> stepped;
  for (const at::Tensor& param : params) {
    const auto& state =
        static_cast<const CPUAdamParamState&>(*adam.state().at(param.unsafeGetTensorImpl()));
    Moments& own = stepped.emplace_back();
    for (const at::Tensor& tensor :
         {state.exp_avg(), state.exp_avg_sq(), state.exp_avg_scale(), state.exp_avg_sq_scale()})
      own.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return stepped;
}

}  // namespace

void bind_cpu_adam(py::module_& module) { module.def("step_cpu_adam", &step_cpu_adam, Waits()); }

}  // namespace tessera::python
