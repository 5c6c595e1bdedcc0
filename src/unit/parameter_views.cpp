#include "unit/parameter_views.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

c10::intrusive_ptr<UnitStorage> no_storage() { return {}; }

// The DistTensor of which `view` is this rank's part, in place of `old`.
at::Tensor dist_around(const at::Tensor& view, const DistSlot& slot, const at::Tensor& old) {
  const DistMeta* const meta = find_dist_meta(old);
  DistParameter parameter;
  if (meta && meta->parameter) parameter.name = meta->parameter->name;
  parameter.gradients = slot.gradients;
  return make_dist(view, slot.spec, slot.sizes, slot.strides,
                   std::make_shared<const DistParameter>(std::move(parameter)));
}

bool is_in_use(const ParamSlot& slot) {
  return std::any_of(slot.handles.begin(), slot.handles.end(),
                     [](const auto& handle) { return !handle.expired(); });
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
  point_to(slot, [&] {
    return make_unit_view(storage, slot.dtype, slot.sizes, slot.strides, slot.offset);
  });
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

void ParameterViews::show(const at::Tensor& full) const {
  if (const auto storage = storage_.lock()) storage->show(full, "");
}

void ParameterViews::hide(const std::string& why) const {
  if (const auto storage = storage_.lock()) storage->show(at::Tensor(), why);
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

}  // namespace tessera
