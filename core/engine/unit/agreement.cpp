#include "engine/unit/agreement.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/engine/plan_fields.h>

#include <algorithm>
#include <array>
#include <set>
#include <sstream>
#include <string_view>
#include <type_traits>

#include "comm/group/ranks_text.h"
#include "init/deferred_storage.h"
#include "tensor/dist_meta.h"

namespace tessera {
namespace {

// The text of a field of a plan, by which ranks compare it.
std::string text_of(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "none";
}
std::string text_of(const std::optional<c10::Device>& device) {
  return device ? c10::DeviceTypeName(device->type()) : "any";
}
std::string text_of(const std::optional<int64_t>& number) {
  return number ? std::to_string(*number) : "none";
}
std::string text_of(const std::optional<OuterStep>& outer) {
  if (!outer) return "none";
  return fmt::format("every {}, learning_rate {}, momentum {}, nesterov {}, reduce_dtype {}",
                     outer->every, outer->learning_rate, outer->momentum, outer->nesterov,
                     text_of(outer->reduce_dtype));
}
std::string text_of(const std::vector<GroupRule>& rules) {
  std::vector<std::string> texts;
  for (const GroupRule& rule : rules) texts.push_back("'" + rule.names + "'");
  return fmt::format("[{}]", fmt::join(texts, ", "));
}
std::string text_of(const std::vector<CutRule>& rules) {
  std::vector<std::string> texts;
  for (const CutRule& rule : rules)
    texts.push_back(fmt::format("'{}' {} {} from {} dims", rule.names, plan_choice(rule.cut).name,
                                rule.size, rule.min_dim));
  return fmt::format("[{}]", fmt::join(texts, ", "));
}
template <class Value>
std::string text_of(const Value& value) {
  if constexpr (std::is_enum_v<Value>) {
    return plan_choice(value).enumerator;
  } else {
    return fmt::format("{}", value);
  }
}

// Each rank may have its own, as it has its own process groups.
constexpr std::array<std::string_view, 3> kOfEachRank = {"mesh_dim", "offload_directory",
                                                         "memory_budget"};

// One line per fact that must be equal on all ranks.
std::vector<std::string> describe(const std::vector<ParamSlot>& params, const ShardPlan& plan) {
  std::vector<std::string> lines;
  const auto add = [&](std::string_view name, const auto& value) {
    if constexpr (!std::is_same_v<std::decay_t<decltype(value)>, ProcessGroupPtr>) {
      if (std::find(kOfEachRank.begin(), kOfEachRank.end(), name) == kOfEachRank.end())
        lines.push_back(fmt::format("plan.{} {}", name, text_of(value)));
    }
  };
  visit_fields(add, plan);
  lines.push_back(fmt::format("plan.memory_budget {}", plan.memory_budget ? "given" : "none"));
  for (const ParamSlot& param : params) {
    const auto& strides = param.dist ? param.dist->strides : param.strides;
    lines.push_back(fmt::format("'{}' {} [{}] with strides [{}] on {}{}",
                                fmt::join(param.names, "' = '"), c10::toString(param.dtype),
                                fmt::join(param.global_sizes(), ", "), fmt::join(strides, ", "),
                                c10::DeviceTypeName(param.device.type(), /*lower_case=*/true),
                                param.requires_grad ? "" : ", frozen"));
    if (param.dist) lines.back() += ", placed " + to_string(param.dist->spec->placements);
    if (param.dist && param.group > 0)  // units must be cut alike on all ranks
      lines.back() += fmt::format(" in parts of [{}]", fmt::join(param.sizes, ", "));
  }
  return lines;
}

// One line per DistTensor of a group: the part of it that this rank holds.
std::vector<std::string> describe_parts(const std::vector<ParamSlot>& params, int group) {
  std::vector<std::string> lines;
  for (const ParamSlot& param : params) {
    if (!param.dist || param.group != group) continue;
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

namespace {

// Throws on every rank unless the ranks of `mesh` form process groups of one size for each rule,
// whose ranks hold the same parts of DistTensors.
void check_groups(const ShardMesh& mesh, const std::vector<ParamSlot>& params,
                  const ShardPlan& plan) {
  const CollectiveTag tag{"check of plan.groups", Channel::kControl};
  for (size_t i = 0; i < plan.groups.size(); ++i) {
    const GroupRule& rule = plan.groups[i];
    check_same_lines(mesh, {fmt::format("{} ranks", rule.process_group->size())},
                     fmt::format("[fully_shard] plan.groups: the process groups of '{}' must have "
                                 "one size",
                                 rule.names));
    // Those of each rank, by their numbers in the mesh.
    const std::string own = fmt::format(
        "{}",
        fmt::join(all_gather_bytes(*rule.process_group, std::to_string(mesh.rank()), tag), " "));
    const auto all = mesh.all_gather_bytes(own, tag);
    std::set<size_t> members;
    std::istringstream stream(own);
    for (size_t rank = 0; stream >> rank;)
      if (rank < all.size() && all[rank] == own) members.insert(rank);
    check_on_all_ranks(mesh, [&] {
      TORCH_CHECK_VALUE(
          std::ssize(members) == rule.process_group->size() && members.contains(mesh.rank()),
          "[fully_shard] plan.groups: the process group of '", rule.names,
          "' must be a part of the ranks that train the model, the same for all of its ranks; got "
          "one of ranks ",
          own, " of ", all.size());
    });
    const std::string difference =
        first_difference(ShardMesh(rule.process_group, nullptr),
                         describe_parts(params, static_cast<int>(i) + 1), tag);
    check_on_all_ranks(mesh, [&] {
      TORCH_CHECK_VALUE(difference.empty(),
                        "[fully_shard] plan.groups: all ranks of the process group of '",
                        rule.names, "' must hold the same parts of DistTensors; ", difference);
    });
  }
}

}  // namespace

void check_same_model(const ShardMesh& mesh, const std::vector<ParamSlot>& params,
                      const ShardPlan& plan) {
  check_same_lines(mesh, describe(params, plan),
                   "[fully_shard] the models and plans must be the same on all ranks");
  check_groups(mesh, params, plan);
  const std::vector<std::string> parts = describe_parts(params, 0);
  if (parts.empty()) return;
  check_same_lines(
      mesh, parts,
      "[fully_shard] the ranks that a model is sharded over, and its replicas, must hold the same "
      "parts of the DistTensors among its parameters: give plan.mesh_dim, a mesh dim along which "
      "these are replicated, or plan.process_group, ranks that hold equal parts");
}

}  // namespace tessera
