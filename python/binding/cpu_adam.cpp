// The step of `tessera.CPUAdam`.
#include <tessera/engine/cpu_adam.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.h"

namespace tessera::python {
namespace {

// Steps parameters of a param group, whose options and state are Python's. `steps`: of each
// parameter, with this one.
void step_cpu_adam(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& exp_avgs,
                   const std::vector<at::Tensor>& exp_avg_sqs, const std::vector<int64_t>& steps,
                   double lr, std::tuple<double, double> betas, double eps, double weight_decay,
                   bool bias_correction, bool adamw_mode) {
  CPUAdam adam(params, CPUAdamOptions(lr)
                           .betas(betas)
                           .eps(eps)
                           .weight_decay(weight_decay)
                           .bias_correction(bias_correction)
                           .adamw_mode(adamw_mode));
  for (size_t i = 0; i < params.size(); ++i) {
    auto state = std::make_unique<CPUAdamParamState>();
    state->step(steps[i] - 1);
    state->exp_avg(exp_avgs[i]);
    state->exp_avg_sq(exp_avg_sqs[i]);
    adam.state()[params[i].unsafeGetTensorImpl()] = std::move(state);
  }
  adam.step();
}

}  // namespace

void bind_cpu_adam(py::module_& module) { module.def("step_cpu_adam", &step_cpu_adam, Waits()); }

}  // namespace tessera::python
