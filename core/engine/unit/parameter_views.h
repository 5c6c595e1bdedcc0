#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>

#include "engine/unit/layout.h"
#include "engine/unit/unit_storage.h"

namespace tessera {

/// The tensors of a unit's parameters: views of the unit's memory.
class ParameterViews {
 public:
  ParameterViews(Unit& unit, const UnitLayout& layout);

  /// Makes the parameters views of the unit. Their storage keeps `keep_alive`.
  void install(const std::shared_ptr<void>& keep_alive);
  void install(const ParamSlot& slot, const std::shared_ptr<void>& keep_alive);

  /// True while any tensor is a view of the unit.
  bool any() const { return !storage_.expired(); }
  /// Lets the views show the memory of `full`. If that is undefined, `data_ptr()` throws `why_not`.
  void show(const at::Tensor& full, const std::string& why_not = "") const;

  /// Makes ordinary tensors, with values of `values`, of the parameters that are used and are still
  /// views; views that others keep have `memory` from then on.
  void give_back(const at::Tensor& values, const at::Tensor& memory);
  /// True if the parameter is a tensor, but no view of the unit any more.
  bool was_taken_out(const ParamSlot& slot) const;

  /// A parameter's tensor that was given other data; undefined if there is none. See [Note:
  /// Replaced data] in parameter_views.cpp.
  at::Tensor replacement(const ParamSlot& slot) const;
  /// Throws `c10::ValueError` if such data can't be the parameter's.
  void check_replacement(const ParamSlot& slot) const;
  /// Throws if a parameter was given other data.
  void check() const;

 private:
  void point_to(const ParamSlot& slot, const std::function<at::Tensor()>& make_view) const;

  Unit& unit_;
  const UnitLayout& layout_;
  c10::weak_intrusive_ptr<UnitStorage> storage_;
};

}  // namespace tessera
