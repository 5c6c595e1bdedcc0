// Models that are built without memory.
#include <tessera/init/deferred_init.h>

#include "binding.h"
#include "entered.h"

namespace tessera::python {

void bind_deferred_init(py::module_& module) {
  using Context = Entered<DeferredInit>;
  py::class_<Context>(module, "DeferredInit")
      .def(py::init())
      .def("enter", [](Context& context) { context.enter(); })
      .def("exit", &Context::exit);
  module.def("is_deferred", &is_deferred,
             "True for a tensor that has no values yet, only the record of how to make them.");
  module.def(
      "materialize", [](const at::Tensor& tensor) { materialize(tensor); }, Waits());
}

}  // namespace tessera::python
