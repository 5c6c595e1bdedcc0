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

/// Calls `visit(name, field)` for each field of a plan, which may be constant. Fields of
/// `precision` are visited one by one, as "precision.param_dtype"; `outer` as a whole.
template <class Plan, class Visit>
void visit_fields(Plan& plan, Visit&& visit) {
  visit("level", plan.level);
  visit("partition", plan.partition);
  visit("unit_bytes", plan.unit_bytes);
  visit("owners", plan.owners);
  visit("ignored", plan.ignored);
  visit("unreplicated", plan.unreplicated);
  visit("units", plan.units);
  visit("whole_numel", plan.whole_numel);
  visit("whole", plan.whole);
  visit("resident_bytes", plan.resident_bytes);
  visit("memory_budget", plan.memory_budget);
  visit("prefetch", plan.prefetch);
  visit("average", plan.average);
  visit("predivide", plan.predivide);
  visit("bucket_bytes", plan.bucket_bytes);
  visit("reduce_gradients", plan.reduce_gradients);
  visit("device", plan.device);
  visit("start_values", plan.start_values);
  visit("sync_buffers", plan.sync_buffers);
  visit("process_group", plan.process_group);
  visit("replicate_group", plan.replicate_group);
  visit("outer", plan.outer);
  visit("mesh_dim", plan.mesh_dim);
  visit("precision.param_dtype", plan.precision.param_dtype);
  visit("precision.master_dtype", plan.precision.master_dtype);
  visit("precision.reduce_dtype", plan.precision.reduce_dtype);
  visit("precision.error_feedback", plan.precision.error_feedback);
  visit("precision.gather_dtype", plan.precision.gather_dtype);
  visit("precision.master_only", plan.precision.master_only);
  visit("precision.buffer_dtype", plan.precision.buffer_dtype);
  visit("precision.cast_inputs", plan.precision.cast_inputs);
  visit("offload", plan.offload);
  visit("offload_directory", plan.offload_directory);
}

}  // namespace tessera
