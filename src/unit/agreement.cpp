#include "unit/agreement.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace tessera {
namespace {

const char* dtype_name(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "none";
}

// One line per fact that must be equal on all ranks.
std::vector<std::string> describe(const std::vector<ParamSlot>& params, const ShardPlan& plan) {
  std::vector<std::string> lines;
  const Precision& precision = plan.precision;
  lines.push_back(
      fmt::format("plan: owners {}, ignored {}, unreplicated {}, reduce_gradients {}, gather_dtype "
                  "{}, device {}, predivide {}, bucket_bytes {}, master_only {}, "
                  "has memory_budget {}",
                  plan.owners, plan.ignored, plan.unreplicated, plan.reduce_gradients,
                  dtype_name(precision.gather_dtype),
                  plan.device ? c10::DeviceTypeName(plan.device->type()) : "any", plan.predivide,
                  plan.bucket_bytes, precision.master_only, plan.memory_budget.has_value()));
  lines.push_back(fmt::format(
      "plan: level {}, partition {}, unit_bytes {}, units {}, whole_numel {}, whole "
      "{}, resident_bytes {}, "
      "prefetch {}, average {}, start_values {}, sync_buffers {}, param_dtype {}, master_dtype {}, "
      "reduce_dtype {}, buffer_dtype {}, cast_inputs {}, offload {}",
      static_cast<int>(plan.level), static_cast<int>(plan.partition), plan.unit_bytes.value(),
      plan.units, plan.whole_numel, plan.whole, plan.resident_bytes, plan.prefetch, plan.average,
      static_cast<int>(plan.start_values), plan.sync_buffers, dtype_name(precision.param_dtype),
      dtype_name(precision.master_dtype), dtype_name(precision.reduce_dtype),
      dtype_name(precision.buffer_dtype), precision.cast_inputs, static_cast<int>(plan.offload)));
  for (const ParamSlot& param : params) {
    lines.push_back(fmt::format("'{}' {} [{}] with strides [{}]{}", fmt::join(param.names, "' = '"),
                                c10::toString(param.dtype), fmt::join(param.sizes, ", "),
                                fmt::join(param.strides, ", "),
                                param.requires_grad ? "" : ", frozen"));
    if (param.dist) lines.back() += ", placed " + to_string(param.dist->spec->placements);
  }
  return lines;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

std::string line_at(const std::vector<std::string>& lines, size_t i) {
  return i < lines.size() ? lines[i] : "no such parameter";
}

// Describes the first line in which some rank differs from rank 0, by groups of equal ranks.
std::string first_difference(const std::vector<std::vector<std::string>>& ranks) {
  size_t line = 0;
  auto differs = [&](const auto& other) { return line_at(other, line) != line_at(ranks[0], line); };
  while (std::none_of(ranks.begin(), ranks.end(), differs)) ++line;
  std::vector<size_t> different;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (differs(ranks[rank])) different.push_back(rank);
  }
  return fmt::format("rank 0 has {}, but rank{} {} {} {}", line_at(ranks[0], line),
                     different.size() > 1 ? "s" : "", fmt::join(different, ", "),
                     different.size() > 1 ? "have" : "has", line_at(ranks[different[0]], line));
}

}  // namespace

void check_same_lines(const ShardMesh& mesh, const std::vector<std::string>& lines,
                      const std::string& must) {
  if (mesh.size() == 1) return;
  const std::string text = fmt::format("{}", fmt::join(lines, "\n"));
  const std::string hash = std::to_string(std::hash<std::string>()(text));
  const CollectiveTag tag{"check of the models", Channel::kControl};
  const auto hashes = mesh.all_gather_bytes(hash, tag);
  if (std::equal(hashes.begin() + 1, hashes.end(), hashes.begin())) return;
  std::vector<std::vector<std::string>> ranks;
  for (const std::string& other : mesh.all_gather_bytes(text, tag))
    ranks.push_back(split_lines(other));
  TORCH_CHECK_VALUE(false, must, "; ", first_difference(ranks));
}

void check_same_model(const ShardMesh& mesh, const std::vector<ParamSlot>& params,
                      const ShardPlan& plan) {
  check_same_lines(mesh, describe(params, plan),
                   "[fully_shard] the models must be the same on all ranks");
}

}  // namespace tessera
