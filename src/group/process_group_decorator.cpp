#include <c10/util/Exception.h>
#include <tessera/process_group_decorators.h>

#include <utility>

namespace tessera {

ProcessGroupDecorator::ProcessGroupDecorator(ProcessGroupPtr inner) : inner_(std::move(inner)) {
  TORCH_CHECK_VALUE(inner_ != nullptr, "[ProcessGroupDecorator] `inner` must be given");
}

}  // namespace tessera
