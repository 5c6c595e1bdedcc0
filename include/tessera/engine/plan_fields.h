#pragma once

#include <tessera/engine/shard_plan.h>

#include <array>
#include <optional>
#include <string_view>

namespace tessera {

// Plans as data: for programs that read plans from arguments or files, print them, or compare them.

/// A value of an enumeration of plans.
template <class Enum>
struct PlanChoice {
  Enum value;
  const char* enumerator;  ///< its name in C++: "kParameters"
  const char* name;        ///< its name in arguments and in Python: "p_g_os"
};

namespace detail {

template <class Enum>
inline constexpr std::array<PlanChoice<Enum>, 0> kPlanChoices = {};
template <>
inline constexpr std::array kPlanChoices<ShardLevel> = {
    PlanChoice{ShardLevel::kNone, "kNone", "none"},
    PlanChoice{ShardLevel::kOptimizerState, "kOptimizerState", "os"},
    PlanChoice{ShardLevel::kGradients, "kGradients", "os_g"},
    PlanChoice{ShardLevel::kParameters, "kParameters", "p_g_os"}};
template <>
inline constexpr std::array kPlanChoices<Partition> = {
    PlanChoice{Partition::kFlatEven, "kFlatEven", "flat_even"},
    PlanChoice{Partition::kWholeParam, "kWholeParam", "whole_param"}};
template <>
inline constexpr std::array kPlanChoices<Cut> = {
    PlanChoice{Cut::kAnywhere, "kAnywhere", "anywhere"}, PlanChoice{Cut::kRows, "kRows", "rows"},
    PlanChoice{Cut::kElements, "kElements", "elements"},
    PlanChoice{Cut::kWhole, "kWhole", "whole"}};
template <>
inline constexpr std::array kPlanChoices<StartValues> = {
    PlanChoice{StartValues::kBroadcast, "kBroadcast", "broadcast"},
    PlanChoice{StartValues::kKeep, "kKeep", "keep"}};
template <>
inline constexpr std::array kPlanChoices<Offload> = {
    PlanChoice{Offload::kNone, "kNone", "none"}, PlanChoice{Offload::kHost, "kHost", "host"},
    PlanChoice{Offload::kDirectory, "kDirectory", "directory"}};

}  // namespace detail

/// The values of an enumeration of plans, in its order.
template <class Enum>
inline constexpr const auto& kPlanChoices = detail::kPlanChoices<Enum>;

/// Returns the names of a value.
template <class Enum>
constexpr const PlanChoice<Enum>& plan_choice(Enum value) {
  return kPlanChoices<Enum>[static_cast<size_t>(value)];
}

/// Returns the value of this name in arguments; nothing if there is none.
template <class Enum>
constexpr std::optional<Enum> find_plan_choice(std::string_view name) {
  for (const PlanChoice<Enum>& choice : kPlanChoices<Enum>)
    if (name == choice.name) return choice.value;
  return std::nullopt;
}

/// Calls `visit(name, field...)` for each field, with that of each of the plans. Plans may be
/// constant. Fields of `precision` are visited one by one, as "precision.param_dtype"; `outer` as a
/// whole.
template <class Visit, class... Plans>
void visit_fields(Visit&& visit, Plans&... plans) {
  visit("level", plans.level...);
  visit("partition", plans.partition...);
  visit("unit_bytes", plans.unit_bytes...);
  visit("cuts", plans.cuts...);
  visit("owners", plans.owners...);
  visit("ignored", plans.ignored...);
  visit("unreplicated", plans.unreplicated...);
  visit("groups", plans.groups...);
  visit("units", plans.units...);
  visit("whole_numel", plans.whole_numel...);
  visit("whole", plans.whole...);
  visit("resident_bytes", plans.resident_bytes...);
  visit("memory_budget", plans.memory_budget...);
  visit("prefetch", plans.prefetch...);
  visit("average", plans.average...);
  visit("predivide", plans.predivide...);
  visit("bucket_bytes", plans.bucket_bytes...);
  visit("reduce_gradients", plans.reduce_gradients...);
  visit("device", plans.device...);
  visit("start_values", plans.start_values...);
  visit("sync_buffers", plans.sync_buffers...);
  visit("process_group", plans.process_group...);
  visit("replicate_group", plans.replicate_group...);
  visit("outer", plans.outer...);
  visit("mesh_dim", plans.mesh_dim...);
  visit("precision.param_dtype", plans.precision.param_dtype...);
  visit("precision.master_dtype", plans.precision.master_dtype...);
  visit("precision.round_frozen", plans.precision.round_frozen...);
  visit("precision.reduce_dtype", plans.precision.reduce_dtype...);
  visit("precision.error_feedback", plans.precision.error_feedback...);
  visit("precision.gather_dtype", plans.precision.gather_dtype...);
  visit("precision.master_only", plans.precision.master_only...);
  visit("precision.buffer_dtype", plans.precision.buffer_dtype...);
  visit("precision.cast_inputs", plans.precision.cast_inputs...);
  visit("offload", plans.offload...);
  visit("offload_directory", plans.offload_directory...);
}

}  // namespace tessera
