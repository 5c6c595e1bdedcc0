#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/comm/collective.h>
#include <tessera/engine/fully_shard.h>
#include <tessera/engine/shard_plan.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tensor/dist_meta.h"

namespace tessera {

inline constexpr int kOwnGroup = -1;

/// The global view of a parameter that is a DistTensor, of which a unit holds this rank's part.
struct DistSlot {
  DistSpecPtr spec;
  std::vector<int64_t> sizes, strides;  ///< global
  /// Null: as `spec`.
  DistSpecPtr gradients;
  /// False on ranks whose part is a replica; the rank with the original counts it.
  bool is_first_replica = true;
};

/// A parameter, or this rank's part of one that is a DistTensor, and its place in a unit's flat
/// buffer.
struct ParamSlot {
  /// Fully qualified names; more than one if the parameter is tied.
  std::vector<std::string> names;
  /// The user's tensors: one, or several whose storage was the same. Weak: the module owns them,
  /// and they own the unit through their storage.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> handles;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype = at::kFloat;         ///< of the gathered parameter
  at::ScalarType master_dtype = at::kFloat;  ///< of the values that the optimizer updates
  at::ScalarType thawed_dtype = at::kFloat;  ///< the same, once it is trained
  at::Device device = at::kCPU;
  bool requires_grad = true;
  int group = 0;  ///< the ranks that share it: see `UnitLayout::group`
  Cut cut = Cut::kAnywhere;
  int64_t block = 1;   ///< elements that stay together, from the start
  int64_t offset = 0;  ///< elements from the start of the unit's flat buffer
  int64_t numel = 0;

  std::optional<DistSlot> dist;  ///< empty for an ordinary tensor

  const std::string& name() const { return names.front(); }
  const std::vector<int64_t>& global_sizes() const { return dist ? dist->sizes : sizes; }
  /// The tensor, or an undefined one if the module was destroyed.
  at::Tensor tensor(size_t i = 0) const;
  /// The tensor, or the local part of a DistTensor.
  at::Tensor local(size_t i = 0) const;
};

/// A range of a unit's flat buffer whose gradients travel together: one large parameter, or a run
/// of small ones that are copied into one buffer.
struct GradChunk {
  int64_t begin = 0, end = 0;           ///< elements
  size_t first_slot = 0, end_slot = 0;  ///< index range into the slots
  bool is_single() const { return end_slot - first_slot == 1; }
};

/// The flat layout of a unit. See [Note: Flat layout] in placement.cpp.
struct UnitLayout {
  std::string name;
  ShardLevel level = ShardLevel::kParameters;
  at::ScalarType dtype = at::kFloat;         ///< of the parameters
  at::ScalarType master_dtype = at::kFloat;  ///< of the updated values and their gradients
  at::ScalarType thawed_dtype = at::kFloat;  ///< `master_dtype` once frozen parameters are trained
  at::ScalarType reduce_dtype = at::kFloat;  ///< of gradients on the wire
  at::ScalarType gather_dtype = at::kFloat;  ///< to which parameters are rounded when updated
  Encoding gather_encoding = Encoding::kPlain;  ///< of blocks, to which they are rounded as well
  Encoding reduce_encoding = Encoding::kPlain;  ///< of gradients in messages
  bool error_feedback = false;                  ///< for what that loses
  at::Device device = at::kCPU;
  /// The ranks that share the parameters: 0, those of the model; i + 1, those of `plan.groups[i]`;
  /// `kOwnGroup`, none: each rank has its own, alone in a world of one.
  int group = 0;
  std::vector<ParamSlot> slots;   ///< ascending offsets
  std::vector<int64_t> bounds;    ///< rank r owns elements [bounds[r], bounds[r + 1])
  std::vector<GradChunk> chunks;  ///< ascending

  bool is_replicated() const { return group != kOwnGroup; }
  int64_t numel() const { return bounds.back(); }
  int64_t shard_numel(int rank) const { return bounds[rank + 1] - bounds[rank]; }
  bool rounds() const { return gather_dtype != dtype || quantizes(); }
  /// True if all ranks use parameters that are rounded by a scale of their block of a shard.
  bool quantizes() const { return gather_encoding != Encoding::kPlain; }
  /// A dtype as wide as the rounded values.
  at::ScalarType rounded_dtype() const { return quantizes() ? at::kChar : gather_dtype; }
  /// True if a reduction of this unit by itself, without replicas, may gather the gradients that
  /// all ranks keep: see `ReduceScatterOptions::gather_into`.
  bool may_gather_sums() const {
    return level == ShardLevel::kNone && reduce_encoding == Encoding::kPlain;
  }
  bool has_master() const { return master_dtype != dtype || rounds(); }
  /// Options of the full parameters.
  at::TensorOptions options() const { return at::TensorOptions().dtype(dtype).device(device); }
  /// Bytes of the full parameters.
  int64_t nbytes() const { return numel() * static_cast<int64_t>(c10::elementSize(dtype)); }
};

/// True if the parameter requires gradients now, whatever it did when it was sharded.
bool is_trained(const ParamSlot& slot);
/// True if any parameter of the unit does.
bool is_trained(const UnitLayout& layout);

/// The parameter's elements among [begin, end) of the flat buffer, counted there; an empty range if
/// there are none.
std::pair<int64_t, int64_t> overlap(const ParamSlot& slot, int64_t begin, int64_t end);

/// The parameter as it lies in `flat`, its unit's flat buffer.
at::Tensor view_param(const ParamSlot& slot, const at::Tensor& flat);

/// The shape in which an optimizer gets `numel` elements of the parameter: its own if it is whole,
/// that of rows if it is cut between them, else one dim.
std::vector<int64_t> part_sizes(const ParamSlot& slot, int64_t numel);
/// Part of a parameter, 1-D, as a view of that shape; and back, in the order of memory.
at::Tensor shaped_part(const ParamSlot& slot, const at::Tensor& part);
at::Tensor flat_part(const ParamSlot& slot, const at::Tensor& part);

/// The elements of `tensor` in the order of memory that `strides` describe, 1-D: seen, if that is
/// its own, or else copied.
at::Tensor flat_in_order(const at::Tensor& tensor, at::IntArrayRef strides);

/// True on one of the ranks that have equal parts of a DistTensor: the first of them in all mesh
/// dims along which it is replicated.
bool is_first_replica(const DistSpec& spec);

/// From a whole local value, in the parameter's shape, to a global one, and back. Collective over
/// the mesh of a DistTensor.
at::Tensor global_value(const ParamSlot& slot, const at::Tensor& local);
at::Tensor local_value(const ParamSlot& slot, const at::Tensor& global);

/// Lists the distinct parameters of a model in registration order, ties merged.
///
/// Throws `c10::ValueError` for a model without parameters, one that is sharded already, parameters
/// that overlap in part, and those that an operator made.
std::vector<ParamSlot> collect_parameters(const std::vector<NamedTensor>& named_parameters);

/// Throws `c10::ValueError` with both names if one of `others` lies in the memory of a parameter,
/// or of a model that is sharded already: it would keep the memory that the parameter leaves.
/// `kind`: of tensors they are.
void check_own_memory(const std::vector<ParamSlot>& params, const char* kind,
                      const std::vector<NamedTensor>& others);

/// Cuts the parameters into units and lays each unit out for the ranks that share it: `world_size`
/// share the model. See also `choose_groups()`.
std::vector<UnitLayout> lay_out(std::vector<ParamSlot> params, const ShardPlan& plan,
                                int world_size);

}  // namespace tessera
