#include "engine/unit/agreement.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>

#include "comm/group/ranks_text.h"
#include "init/deferred_storage.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

const char* dtype_name(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "none";
}

constexpr const char* kLevels[] = {"kNone", "kOptimizerState", "kGradients", "kParameters"};
constexpr const char* kPartitions[] = {"kFlatEven", "kWholeParam"};
constexpr const char* kStartValues[] = {"kBroadcast", "kKeep"};
constexpr const char* kOffloads[] = {"kNone", "kHost", "kDirectory"};

template <size_t kCount, class Enum>
const char* name_of(const char* const (&names)[kCount], Enum value) {
  return names[static_cast<size_t>(value)];
}

// One line per fact that must be equal on all ranks.
std::vector<std::string> describe(const std::vector<ParamSlot>& params, const ShardPlan& plan) {
  const Precision& precision = plan.precision;
  std::vector<std::string> lines = {fmt::format(
      "plan.level {}\nplan.partition {}\nplan.unit_bytes {}\nplan.owners {}\nplan.ignored {}\n"
      "plan.unreplicated {}\nplan.units {}\nplan.whole_numel {}\nplan.whole {}\n"
      "plan.resident_bytes {}\nplan.memory_budget {}\nplan.prefetch {}\nplan.average {}\n"
      "plan.predivide {}\nplan.bucket_bytes {}\nplan.reduce_gradients {}\nplan.device {}\n"
      "plan.start_values {}\nplan.sync_buffers {}\nplan.offload {}\n"
      "plan.precision.param_dtype {}\nplan.precision.master_dtype {}\n"
      "plan.precision.reduce_dtype {}\nplan.precision.error_feedback {}\n"
      "plan.precision.gather_dtype {}\n"
      "plan.precision.master_only {}\nplan.precision.buffer_dtype {}\n"
      "plan.precision.cast_inputs {}",
      name_of(kLevels, plan.level), name_of(kPartitions, plan.partition), plan.unit_bytes.value(),
      plan.owners, plan.ignored, plan.unreplicated, plan.units, plan.whole_numel, plan.whole,
      plan.resident_bytes, plan.memory_budget ? "given" : "none", plan.prefetch, plan.average,
      plan.predivide, plan.bucket_bytes, plan.reduce_gradients,
      plan.device ? c10::DeviceTypeName(plan.device->type()) : "any",
      name_of(kStartValues, plan.start_values), plan.sync_buffers, name_of(kOffloads, plan.offload),
      dtype_name(precision.param_dtype), dtype_name(precision.master_dtype),
      dtype_name(precision.reduce_dtype), precision.error_feedback,
      dtype_name(precision.gather_dtype), precision.master_only, dtype_name(precision.buffer_dtype),
      precision.cast_inputs)};
  if (const auto& outer = plan.outer) {
    lines.push_back(fmt::format("plan.outer every {}, learning_rate {}, momentum {}, nesterov {}",
                                outer->every, outer->learning_rate, outer->momentum,
                                outer->nesterov));
  }
  for (const ParamSlot& param : params) {
    const auto& strides = param.dist ? param.dist->strides : param.strides;
    lines.push_back(fmt::format("'{}' {} [{}] with strides [{}] on {}{}",
                                fmt::join(param.names, "' = '"), c10::toString(param.dtype),
                                fmt::join(param.global_sizes(), ", "), fmt::join(strides, ", "),
                                c10::DeviceTypeName(param.device.type(), /*lower_case=*/true),
                                param.requires_grad ? "" : ", frozen"));
    if (param.dist) lines.back() += ", placed " + to_string(param.dist->spec->placements);
  }
  return lines;
}

// One line per DistTensor: the part of it that this rank holds.
std::vector<std::string> describe_parts(const std::vector<ParamSlot>& params) {
  std::vector<std::string> lines;
  for (const ParamSlot& param : params) {
    if (!param.dist) continue;
    const DistSpec& spec = *param.dist->spec;
    std::string place;
    for (int64_t dim = 0; dim < spec.mesh.ndim(); ++dim) {
      if (is_replicate(spec.placements[dim])) continue;
      const auto& own = spec.mesh.coordinate();
      place += fmt::format("part {} of {} along '{}' of ", own ? (*own)[dim] : -1,
                           spec.mesh.size(dim), spec.mesh.dim_names()[dim]);
    }
    lines.push_back(fmt::format("{}'{}', [{}] with strides [{}]", place, param.name(),
                                fmt::join(param.sizes, ", "), fmt::join(param.strides, ", ")));
  }
  return lines;
}

std::string line_at(const std::vector<std::string>& lines, size_t i) {
  return i < lines.size() ? lines[i] : "nothing more";
}

// Describes the first line in which some rank differs from rank 0, by groups of equal ranks.
std::string difference_among(const std::vector<std::vector<std::string>>& ranks) {
  size_t line = 0;
  auto differs = [&](const auto& other) { return line_at(other, line) != line_at(ranks[0], line); };
  while (std::none_of(ranks.begin(), ranks.end(), differs)) ++line;
  std::vector<size_t> different;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (differs(ranks[rank])) different.push_back(rank);
  }
  return fmt::format("rank 0 has {}, but {} {} {}", line_at(ranks[0], line), ranks_text(different),
                     different.size() > 1 ? "have" : "has", line_at(ranks[different[0]], line));
}

}  // namespace

std::string first_difference(const ShardMesh& mesh, const std::vector<std::string>& lines,
                             const CollectiveTag& tag) {
  if (mesh.size() == 1) return {};
  const std::string text = fmt::format("{}", fmt::join(lines, "\n"));
  const std::string hash = std::to_string(std::hash<std::string>()(text));
  const auto hashes = mesh.all_gather_bytes(hash, tag);
  if (std::equal(hashes.begin() + 1, hashes.end(), hashes.begin())) return {};
  std::vector<std::vector<std::string>> ranks;
  for (const std::string& other : mesh.all_gather_bytes(text, tag)) {
    std::istringstream stream(other);
    ranks.emplace_back();
    for (std::string line; std::getline(stream, line);) ranks.back().push_back(line);
  }
  return difference_among(ranks);
}

void check_same_lines(const ShardMesh& mesh, const std::vector<std::string>& lines,
                      const std::string& must) {
  const std::string difference =
      first_difference(mesh, lines, {"check of the models", Channel::kControl});
  TORCH_CHECK_VALUE(difference.empty(), must, "; ", difference);
}

std::string hash_of(const at::Tensor& tensor) {
  const at::Tensor& local = local_of(tensor);
  at::Tensor values = at::empty_like(local, at::device(at::kCPU).requires_grad(false),
                                     at::MemoryFormat::Contiguous);
  read_into(local, values);
  const std::string_view bytes(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  return fmt::format("{:016x}", std::hash<std::string_view>()(bytes));
}

void check_same_model(const ShardMesh& mesh, const std::vector<ParamSlot>& params,
                      const ShardPlan& plan) {
  check_same_lines(mesh, describe(params, plan),
                   "[fully_shard] the models and plans must be the same on all ranks");
  const std::vector<std::string> parts = describe_parts(params);
  if (parts.empty()) return;
  check_same_lines(
      mesh, parts,
      "[fully_shard] the ranks that a model is sharded over, and its replicas, must hold the same "
      "parts of the DistTensors among its parameters: give plan.mesh_dim, a mesh dim along which "
      "these are replicated, or plan.process_group, ranks that hold equal parts");
}

}  // namespace tessera
