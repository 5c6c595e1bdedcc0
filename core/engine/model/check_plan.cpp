#include "engine/model/check_plan.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <utility>

#include "base/device/device.h"
#include "comm/group/encoding.h"

namespace tessera {
namespace {

void check_precision(const Precision& precision) {
  for (const auto& [name, dtype] : {std::pair("param_dtype", precision.param_dtype),
                                    std::pair("master_dtype", precision.master_dtype),
                                    std::pair("buffer_dtype", precision.buffer_dtype)}) {
    TORCH_CHECK_VALUE(!dtype || c10::isFloatingType(*dtype), "[fully_shard] plan.precision.", name,
                      " must be a floating dtype; got ", *dtype);
  }
  for (const auto& [name, dtype] : {std::pair("reduce_dtype", precision.reduce_dtype),
                                    std::pair("gather_dtype", precision.gather_dtype)}) {
    TORCH_CHECK_VALUE(!dtype || block_encoding(*dtype) || c10::isFloatingType(*dtype),
                      "[fully_shard] plan.precision.", name,
                      " must be a floating dtype, or kChar (int8); got ", *dtype);
  }
  TORCH_CHECK_VALUE(!precision.round_frozen || precision.param_dtype,
                    "[fully_shard] plan.precision.round_frozen needs param_dtype, the dtype to "
                    "which frozen parameters are rounded");
}

void check_quantized_reductions(const ShardPlan& plan) {
  const auto& dtype = plan.precision.reduce_dtype;
  if (!dtype || !block_encoding(*dtype)) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      (!plan.replicate_group || plan.outer) && !plan.mesh_dim,
      "[fully_shard] plan.precision.reduce_dtype ", *dtype,
      " can't go with replicate_group or mesh_dim. Shard over all ranks: between hosts whose ranks "
      "share memory, the sums of a host are sent once");
  TORCH_CHECK_VALUE(!plan.precision.error_feedback || plan.bucket_bytes == 0,
                    "[fully_shard] plan.precision.error_feedback can't go with bucket_bytes: the "
                    "units that share messages may change from step to step. Set one of them to ",
                    "false or 0; got bucket_bytes ", plan.bucket_bytes);
}

void check_outer(const ShardPlan& plan) {
  if (!plan.outer) return;
  const OuterStep& outer = *plan.outer;
  TORCH_CHECK_VALUE(outer.every >= 1,
                    "[fully_shard] plan.outer.every must be at least 1, the number of optimizer "
                    "steps between two averages; got ",
                    outer.every);
  TORCH_CHECK_VALUE(std::isfinite(outer.learning_rate) && outer.learning_rate > 0,
                    "[fully_shard] plan.outer.learning_rate must be positive and finite; got ",
                    outer.learning_rate);
  TORCH_CHECK_VALUE(outer.momentum >= 0 && outer.momentum < 1,
                    "[fully_shard] plan.outer.momentum must be at least 0 and below 1; got ",
                    outer.momentum);
  TORCH_CHECK_VALUE(!outer.reduce_dtype || block_encoding(*outer.reduce_dtype),
                    "[fully_shard] plan.outer.reduce_dtype must be kChar (int8) or kFloat8_e4m3fn, "
                    "or none for float; got ",
                    *outer.reduce_dtype);
  TORCH_CHECK_NOT_IMPLEMENTED(!plan.mesh_dim, "[fully_shard] plan.outer can't go with mesh_dim");
  TORCH_CHECK_VALUE(
      plan.replicate_group,
      "[fully_shard] plan.outer needs plan.replicate_group, the ranks whose values are averaged; "
      "with one rank in each replica, plan.process_group is a process group of one rank");
  TORCH_CHECK_NOT_IMPLEMENTED(plan.reduce_gradients,
                              "[fully_shard] plan.outer needs plan.reduce_gradients");
}

// Messages should be long, but nothing is computed while the last unit is reduced and the first one
// gathered. In shared memory there are no messages, and a short unit is summed while its gradients
// are in the caches.
constexpr int64_t kMessageUnitBytes = int64_t{4} << 20;
constexpr int64_t kSharedUnitBytes = int64_t{1} << 20;

void check_groups(const ShardPlan& plan) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      plan.unreplicated.empty() || (!plan.replicate_group && !plan.mesh_dim),
      "[fully_shard] plan.unreplicated can't go with replicate_group or mesh_dim");
  for (const GroupRule& rule : plan.groups)
    TORCH_CHECK_VALUE(rule.process_group, "[fully_shard] plan.groups: '", rule.names,
                      "' must have a process group; single_process_group() is this rank alone");
  TORCH_CHECK_NOT_IMPLEMENTED(plan.groups.empty() || (!plan.outer && !plan.mesh_dim),
                              "[fully_shard] plan.groups can't go with outer or mesh_dim");
}

}  // namespace

ShardPlan with_defaults(ShardPlan plan, bool sends_nothing) {
  if (!plan.unit_bytes) plan.unit_bytes = sends_nothing ? kSharedUnitBytes : kMessageUnitBytes;
  return plan;
}

void check_plan(const ShardPlan& plan) {
  for (const auto& [name, number] :
       {std::pair("unit_bytes", plan.unit_bytes.value_or(0)),
        std::pair("whole_numel", plan.whole_numel), std::pair("prefetch", int64_t{plan.prefetch}),
        std::pair("bucket_bytes", plan.bucket_bytes)}) {
    TORCH_CHECK_VALUE(number >= 0, "[fully_shard] plan.", name, " must not be negative; got ",
                      number);
  }
  TORCH_CHECK_VALUE(plan.resident_bytes >= -1,
                    "[fully_shard] plan.resident_bytes must be -1 (no limit) or more; got ",
                    plan.resident_bytes);
  TORCH_CHECK_VALUE(plan.memory_budget.value_or(1) > 0,
                    "[fully_shard] plan.memory_budget must be positive; got ", *plan.memory_budget);
  TORCH_CHECK_VALUE(
      !plan.memory_budget || plan.resident_bytes == 0,
      "[fully_shard] plan.memory_budget chooses plan.resident_bytes, which must be 0 then; got ",
      plan.resident_bytes);
  check_precision(plan.precision);
  check_quantized_reductions(plan);
  check_outer(plan);
  TORCH_CHECK_VALUE(std::isfinite(plan.predivide) && plan.predivide > 0,
                    "[fully_shard] plan.predivide must be positive and finite; got ",
                    plan.predivide);
  check_groups(plan);
  TORCH_CHECK_VALUE(!plan.device || has_device(*plan.device),
                    "[fully_shard] plan.device must be a device of this process, which has ",
                    devices_text(), "; got ", *plan.device);
  for (const CutRule& rule : plan.cuts)
    TORCH_CHECK_VALUE(rule.size > 0, "[fully_shard] plan.cuts: the size of a block of '",
                      rule.names, "' must be positive; got ", rule.size);
  TORCH_CHECK_VALUE(plan.offload_directory.empty() || plan.offload == Offload::kDirectory,
                    "[fully_shard] plan.offload_directory needs Offload::kDirectory; got '",
                    plan.offload_directory, "'");
  if (plan.reduce_gradients) return;
  TORCH_CHECK_VALUE(
      plan.level < ShardLevel::kGradients,
      "[fully_shard] plan.reduce_gradients can be false for levels below kGradients only");
  const Precision& precision = plan.precision;
  TORCH_CHECK_VALUE(!precision.param_dtype && !precision.master_dtype && !precision.reduce_dtype,
                    "[fully_shard] without plan.reduce_gradients the dtypes of parameters, masters "
                    "and reductions can't be chosen: gradients stay as autograd makes them");
  TORCH_CHECK_VALUE(
      plan.predivide == 1 && plan.bucket_bytes == 0 && !plan.memory_budget,
      "[fully_shard] plan.predivide, bucket_bytes and memory_budget need plan.reduce_gradients");
}

}  // namespace tessera
