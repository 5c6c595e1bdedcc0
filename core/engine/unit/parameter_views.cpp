#include "engine/unit/parameter_views.h"

#include <ATen/ops/equal.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "engine/unit/unit.h"

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

c10::intrusive_ptr<UnitStorage> no_storage() { return {}; }

// The DistTensor of which `view` is this rank's part, in place of `old`.
at::Tensor dist_around(const at::Tensor& view, const DistSlot& slot, const at::Tensor& old) {
  const DistMeta* const meta = find_dist_meta(old);
  DistParameter parameter = meta && meta->parameter ? *meta->parameter : DistParameter();
  parameter.gradients = slot.gradients;
  return make_dist(view, slot.spec, slot.sizes, slot.strides,
                   std::make_shared<const DistParameter>(std::move(parameter)));
}

bool is_in_use(const ParamSlot& slot) {
  return std::any_of(slot.handles.begin(), slot.handles.end(),
                     [](const auto& handle) { return !handle.expired(); });
}

// A view of the unit of `storage`, at the place of the parameter.
at::Tensor unit_view(const c10::intrusive_ptr<UnitStorage>& storage, const ParamSlot& slot) {
  const auto device = storage->_mutable_data_ptr_no_checks().device();
  const c10::DispatchKeySet backend(c10::computeDispatchKey(slot.dtype, at::kStrided, device));
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(storage)), backend.add(kUnitKey),
      c10::scalarTypeToTypeMeta(slot.dtype));
  impl->set_sizes_and_strides(slot.sizes, slot.strides, slot.offset);
  return at::Tensor(std::move(impl));
}

std::string describe(const at::Tensor& tensor) {
  return fmt::format("{} [{}] on {}", c10::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes(), ", "), tensor.device().str());
}

}  // namespace

ParameterViews::ParameterViews(Unit& unit, const UnitLayout& layout)
    : unit_(unit), layout_(layout), storage_(no_storage()) {}

void ParameterViews::install(const std::shared_ptr<void>& keep_alive) {
  for (const ParamSlot& slot : layout_.slots) install(slot, keep_alive);
}

void ParameterViews::install(const ParamSlot& slot, const std::shared_ptr<void>& keep_alive) {
  auto storage = storage_.lock();
  if (!storage) {
    storage = c10::make_intrusive<UnitStorage>(unit_, keep_alive, layout_.nbytes(), layout_.device);
    storage_ = c10::weak_intrusive_ptr<UnitStorage>(storage);
  }
  point_to(slot, [&] { return unit_view(storage, slot); });
}

// Makes the parameter's tensors views that `make_view` gives.
void ParameterViews::point_to(const ParamSlot& slot,
                              const std::function<at::Tensor()>& make_view) const {
  c10::impl::ExcludeDispatchKeyGuard not_a_use(kUnitKey);
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor tensor = slot.tensor(i);
    if (!tensor.defined()) continue;
    const at::Tensor view = make_view();
    tensor.set_data(slot.dist ? dist_around(view, *slot.dist, tensor) : view);
  }
}

void ParameterViews::show(const at::Tensor& full, const std::string& why_not) const {
  if (const auto storage = storage_.lock()) storage->show(full, why_not);
}

bool ParameterViews::was_taken_out(const ParamSlot& slot) const {
  return slot.local().defined() && unit_of(slot.local()) != &unit_;
}

void ParameterViews::give_back(const at::Tensor& values, const at::Tensor& memory) {
  for (const ParamSlot& slot : layout_.slots) {
    if (was_taken_out(slot) || !is_in_use(slot)) continue;
    const at::Tensor own = view_param(slot, values).clone(at::MemoryFormat::Preserve);
    point_to(slot, [&] { return own.alias(); });
  }
  if (const auto storage = storage_.lock()) storage->leave_unit(memory);
}

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
  TORCH_CHECK_VALUE(
      local.sizes() == at::IntArrayRef(slot.sizes) && local.scalar_type() == slot.dtype &&
          local.device() == layout_.device && local.layout() == at::kStrided &&
          (find_dist_meta(tensor) != nullptr) == slot.dist.has_value(),
      "[tessera] parameter '", slot.name(), "' of ", unit_.label(),
      " was given other data after it was sharded, by Module::to(), set_data() or torch::load(); "
      "expected ",
      c10::toString(slot.dtype), " [", fmt::format("{}", fmt::join(slot.sizes, ", ")), "] on ",
      layout_.device.str(), slot.dist ? ", a DistTensor" : "", "; got ", describe(local),
      ". Convert the model before sharding it, or let the plan's precision and device do it; "
      "load_full_state() takes values of any dtype");
  for (size_t i = 0; i < slot.handles.size(); ++i) {
    const at::Tensor other = slot.local(i);
    const bool is_other =
        other.defined() && other.storage().unsafeGetStorageImpl() != storage_.lock().get();
    TORCH_CHECK_VALUE(!is_other || at::equal(other, local), "[tessera] parameter '", slot.name(),
                      "' of ", unit_.label(),
                      " has several tensors, which were given different data after it was sharded");
  }
}

void ParameterViews::check() const {
  for (const ParamSlot& slot : layout_.slots) {
    if (!replacement(slot).defined()) continue;
    check_replacement(slot);
    TORCH_CHECK(false, "[tessera] parameter '", slot.name(), "' of ", unit_.label(),
                " was given other data by set_data(), torch::load() or Module::to() since the last "
                "backward, which the sharded model has not seen. Do that before a backward, or use "
                "load_full_state()");
  }
}

}  // namespace tessera
