#include <tessera/version.h>

#include <string>

#include "binding.h"

PYBIND11_MODULE(_C, module) {
  namespace python = tessera::python;
  module.doc() = "Tessera's engine; see the Python package `tessera`.";
  module.attr("version") = std::to_string(TESSERA_VERSION_MAJOR) + "." +
                           std::to_string(TESSERA_VERSION_MINOR) + "." +
                           std::to_string(TESSERA_VERSION_PATCH);
  python::bind_world(module);
  python::bind_model(module);
  python::bind_deferred_init(module);
  python::bind_plan_report(module);
  python::bind_optimizer(module);
  python::bind_cpu_adam(module);
  python::bind_dist_tensor(module);
  python::bind_parallel(module);
  python::bind_pipeline(module);
  python::bind_dist_optimizer(module);
  python::bind_checkpoint(module);
  python::bind_exchange(module);
  python::bind_fairscale(module);
  python::bind_paddle(module);
  python::bind_colossalai(module);
}
