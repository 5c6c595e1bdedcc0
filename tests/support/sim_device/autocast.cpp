#include <ATen/autocast_mode.h>

#include "support/sim_device/backend.h"

namespace tessera::testing::sim {

void register_autocast() {
  using namespace at;  // the macros' types
  constexpr auto kKey = c10::DispatchKey::AutocastPrivateUse1;
  library("_", kKey).fallback(torch::CppFunction::makeFallthrough());
  torch::Library& m = library("aten", kKey);
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_OPTIONAL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_OPTIONAL)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
#undef SIM_LOWER
#undef SIM_FP32
#undef SIM_FP32_OPTIONAL
#undef SIM_PROMOTE
}

}  // namespace tessera::testing::sim
