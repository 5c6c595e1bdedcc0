#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/where.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "unit/parameter_views.h"
#include "unit/unit.h"

namespace tessera {

// [Note: Replaced data]
//
// `set_data()` gives a parameter other memory, and no operator is called that could be seen:
// `torch::load()`, `vector_to_parameters()` and `Module::to()` do it. The parameter is an ordinary
// tensor then, whole on each rank. It trains on as it is, as its hooks stay, but the unit knows
// nothing of its values. So all calls that read or change the unit's values look for such
// parameters first, and so do the ranks at the end of each backward that reduces. New values of the
// same shape and dtype are taken in: each rank keeps its part, and the parameter shows the unit
// again. Anything else is refused.
namespace {

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} [{}] on {}", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "), tensor.device().str());
}

}  // namespace

// The first of the parameter's tensors that shows other memory; undefined if none does.
at::Tensor ParameterViews::replacement(const ParamSlot& slot) const {
  const auto storage = storage_.lock();
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor tensor = slot.tensor(i);
    if (!tensor.defined()) continue;
    const at::Tensor& local = local_of(tensor);
    if (!local.has_storage() || local.storage().unsafeGetStorageImpl() != storage.get())
      return tensor;
  }
  return {};
}

void ParameterViews::check_replacement(const ParamSlot& slot) const {
  const at::Tensor tensor = replacement(slot);
  if (!tensor.defined()) return;
  const at::Tensor& local = local_of(tensor);
  TORCH_CHECK_VALUE(local.sizes() == at::IntArrayRef(slot.sizes) && local.scalar_type() == slot.dtype &&
                    local.device() == layout_.device && local.layout() == at::kStrided &&
                    (find_dist_meta(tensor) != nullptr) == slot.dist.has_value(),
                    "[tessera] parameter '", slot.name(), "' of ", unit_.label(), " was given other data after it was sharded, by "
                    "Module::to(), set_data() or torch::load(); expected ", c10::toString(slot.dtype), " [",
                    fmt::format("{}", fmt::join(slot.sizes, ", ")), "] on ", layout_.device.str(),
                    slot.dist ? ", a DistTensor" : "", "; got ", describe(local),
                    ". Convert the model before sharding it, or let the plan's precision and device do it; "
                    "load_full_state() takes values of any dtype");
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor other = slot.local(i);
    const bool is_other =
        other.defined() && other.storage().unsafeGetStorageImpl() != storage_.lock().get();
    TORCH_CHECK_VALUE(!is_other || at::equal(other, local), "[tessera] parameter '", slot.name(), "' of ", unit_.label(),
                      " has several tensors, which were given different data after it was sharded");
  }
}

void ParameterViews::check() const {
  for (const ParamSlot& slot : layout_.slots) {
    if (!replacement(slot).defined()) continue;
    check_replacement(slot);
    TORCH_CHECK(false, "[tessera] parameter '", slot.name(), "' of ", unit_.label(),
                " was given other data by set_data(), torch::load() or Module::to() since the last backward, which the "
                "sharded model has not seen. Do that before a backward, or use load_full_state()");
  }
}

}  // namespace tessera
