#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fnmatch.h>
#include <tessera/parallel/distribute_module.h>
#include <tessera/parallel/parallelize.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/files/untrusted.h"
#include "engine/unit/agreement.h"
#include "parallel/move_placement.h"
#include "tensor/dist_meta.h"
#include "tensor/module_functions.h"
#include "tensor/shard_mesh.h"

namespace tessera {
namespace {

using torch::nn::EmbeddingImpl;
using torch::nn::LinearImpl;
using torch::nn::Module;

// --- patterns ------------------------------------------------------------------------------------

std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts;
  std::istringstream stream(name);
  for (std::string part; std::getline(stream, part, '.');) parts.push_back(part);
  return parts;
}

bool matches(std::span<const std::string> pattern, std::span<const std::string> name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] == "**") {
    return matches(pattern.subspan(1), name) ||
           (!name.empty() && matches(pattern, name.subspan(1)));
  }
  return !name.empty() && fnmatch(pattern[0].c_str(), name[0].c_str(), FNM_NOESCAPE) == 0 &&
         matches(pattern.subspan(1), name.subspan(1));
}

struct NamedModule {
  std::string name;  // empty for the root
  Module* module;
  std::string text() const { return name.empty() ? "the module itself" : "'" + name + "'"; }
};

std::vector<NamedModule> modules_of(Module& root) {
  std::vector<NamedModule> modules = {{"", &root}};
  for (const auto& item : root.named_modules("", /*include_self=*/false))
    modules.push_back({item.key(), item.value().get()});
  return modules;
}

std::string some_names(const std::vector<NamedModule>& modules) {
  std::vector<std::string> names;
  for (const NamedModule& item : modules) {
    if (!item.name.empty()) names.push_back("'" + item.name + "'");
  }
  return names.empty() ? "no submodules" : shortened(names);
}

// --- styles --------------------------------------------------------------------------------------

const char* name_of(const ParallelStyle& style) {
  constexpr const char* kNames[] = {"ColwiseParallel", "RowwiseParallel", "SequenceParallel",
                                    "PrepareModuleInput", "PrepareModuleOutput"};
  return kNames[style.index()];
}

// Where the tensors that go through a module lie along the mesh dim; nullopt: as they are.
struct Flow {
  std::optional<Placement> given;  // of ordinary tensors
  std::optional<Placement> input;
  std::optional<Placement> output;
};

Flow flow_of(const ParallelStyle& style, bool is_embedding) {
  if (const auto* const colwise = std::get_if<ColwiseParallel>(&style))
    return {colwise->input, Replicate{}, colwise->output};
  if (const auto* const rowwise = std::get_if<RowwiseParallel>(&style))
    return {rowwise->input, is_embedding ? Placement(Replicate{}) : Shard{-1}, rowwise->output};
  if (const auto* const sequence = std::get_if<SequenceParallel>(&style))
    return {sequence->input, Shard{sequence->dim}, sequence->output.value_or(Shard{sequence->dim})};
  if (const auto* const prepared = std::get_if<PrepareModuleInput>(&style))
    return {prepared->input, prepared->desired_input, std::nullopt};
  return {std::nullopt, std::nullopt, std::get<PrepareModuleOutput>(style).desired_output};
}

std::string text_of(const std::optional<Placement>& placement) {
  return placement ? to_string(*placement) : "none";
}

// One line for each entry; the lines must be the same on all ranks.
std::vector<std::string> describe(const ParallelPlan& plan, int64_t mesh_dim) {
  std::vector<std::string> lines;
  for (const auto& [pattern, style] : plan) {
    const Flow flow = flow_of(style, /*is_embedding=*/false);
    lines.push_back(fmt::format("'{}' as {} (given {}, input {}, output {}) along mesh dim {}",
                                pattern, name_of(style), text_of(flow.given), text_of(flow.input),
                                text_of(flow.output), mesh_dim));
  }
  return lines;
}

// --- modules -------------------------------------------------------------------------------------

// The module's own parameter `weight`; undefined if it has none.
at::Tensor own_weight(const Module& module) {
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const at::Tensor* const weight = parameters.find("weight");
  return weight ? *weight : at::Tensor();
}

OperatorFamily family_of(const Module& module) {
  if (dynamic_cast<const LinearImpl*>(&module)) return OperatorFamily::kLinear;
  if (dynamic_cast<const EmbeddingImpl*>(&module)) return OperatorFamily::kEmbedding;
  return OperatorFamily::kAny;
}

// What a plan's entry does to one module.
struct Treatment {
  NamedModule item;
  std::string pattern;
  ParallelStyle style;
  at::Tensor weight;
  OperatorFamily family = OperatorFamily::kAny;
  std::vector<std::pair<at::Tensor, Placement>> parameters;
};

std::vector<std::pair<at::Tensor, Placement>> placed_by(const ParallelStyle& style,
                                                        Module& module) {
  const bool is_colwise = std::holds_alternative<ColwiseParallel>(style);
  const bool is_rowwise = std::holds_alternative<RowwiseParallel>(style);
  std::vector<std::pair<at::Tensor, Placement>> placed;
  if (std::holds_alternative<SequenceParallel>(style)) {
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false))
      placed.emplace_back(parameter, Replicate{});
  }
  if (!is_colwise && !is_rowwise) return placed;
  if (const auto* const linear = dynamic_cast<LinearImpl*>(&module)) {
    placed.emplace_back(linear->weight, Shard{is_colwise ? 0 : 1});
    if (linear->bias.defined())
      placed.emplace_back(linear->bias, is_colwise ? Placement(Shard{0}) : Replicate{});
  } else if (const auto* const embedding = dynamic_cast<EmbeddingImpl*>(&module)) {
    placed.emplace_back(embedding->weight, Shard{is_colwise ? 1 : 0});
  }
  return placed;
}

void check_can_place(const ParallelStyle& style, const NamedModule& item) {
  const bool cuts = style.index() < 2;
  TORCH_CHECK_VALUE(
      !cuts || family_of(*item.module) != OperatorFamily::kAny, "[parallelize_module] ",
      name_of(style),
      " places a torch::nn::Linear or a torch::nn::Embedding; expected one of them, got ",
      item.text(), ", a ", item.module->name(),
      ". distribute_module() places any module by a function");
  TORCH_CHECK_VALUE(
      own_weight(*item.module).defined(), "[parallelize_module] ", name_of(style),
      " needs a module with a parameter `weight` of its own, by whose use the call of the module "
      "is seen; got ",
      item.text(), ", a ", item.module->name(),
      ". C++ modules have no hooks: name the inner modules that read this one's input or make its "
      "output, or, for the outermost module, call it through the handle that "
      "distribute_module(module, mesh, partition, input_fn, output_fn) returns. A module without "
      "parameters takes tensors as they are placed: leave it out of the plan");
}

// The modules that a plan's patterns match, after all checks.
class Resolution {
 public:
  Resolution(Module& root, const DeviceMesh& mesh) : mesh_(mesh), modules_(modules_of(root)) {}

  void add(const std::string& pattern, const ParallelStyle& style) {
    const auto parts = parts_of(pattern);
    std::set<const Module*> own;  // one module may have several names
    for (const NamedModule& item : modules_) {
      if (matches(parts, parts_of(item.name)) && own.insert(item.module).second)
        add(item, pattern, style);
    }
    TORCH_CHECK_VALUE(!own.empty(), "[parallelize_module] each pattern must match a module; '",
                      pattern, "' matches none of ", some_names(modules_));
  }

  const std::vector<Treatment>& treatments() const { return treatments_; }
  // Null for a module that no pattern matches.
  const Treatment* find(const Module& module) const {
    const auto found = by_module_.find(&module);
    return found == by_module_.end() ? nullptr : &treatments_[found->second];
  }

 private:
  void add(const NamedModule& item, const std::string& pattern, const ParallelStyle& style) {
    if (const Treatment* const known = find(*item.module))
      TORCH_CHECK_VALUE(false, "[parallelize_module] each module must have one style; ",
                        item.text(), " is matched by '", known->pattern, "' and by '", pattern,
                        "'");
    check_can_place(style, item);
    const Treatment treatment{item,
                              pattern,
                              style,
                              own_weight(*item.module),
                              family_of(*item.module),
                              placed_by(style, *item.module)};
    check_weight(treatment);
    for (const auto& [tensor, placement] : treatment.parameters)
      check_parameter(item.text(), tensor, placement);
    by_module_.emplace(item.module, treatments_.size());
    treatments_.push_back(treatment);
  }

  void check_weight(const Treatment& treatment) {
    const std::string text = treatment.item.text();
    const at::Tensor& weight = treatment.weight;
    TORCH_CHECK_VALUE(!has_functions(weight, treatment.family),
                      "[parallelize_module] a module can be parallelized once; ", text,
                      " has functions already, which set_module_functions(module, {}) removes");
    TORCH_CHECK_VALUE(!is_dist(weight) || mesh_of(weight) == mesh_,
                      "[parallelize_module] the weight of ", text, " is on ",
                      is_dist(weight) ? mesh_of(weight).to_string() : "", "; expected ",
                      mesh_.to_string());
    const auto [sharer, is_first] = by_weight_.emplace(
        std::pair(weight.unsafeGetTensorImpl(), treatment.family), treatments_.size());
    TORCH_CHECK_VALUE(is_first || treatments_[sharer->second].style == treatment.style,
                      "[parallelize_module] ", text, " and ",
                      treatments_[sharer->second].item.text(),
                      " share their weight, and so must have the same style");
  }

  void check_parameter(const std::string& text, const at::Tensor& tensor,
                       const Placement& placement) {
    const auto [known, is_first] =
        placements_.emplace(tensor.unsafeGetTensorImpl(), std::pair(placement, text));
    TORCH_CHECK_VALUE(is_first || known->second.first == placement, "[parallelize_module] ",
                      known->second.second, " and ", text, " share a parameter, and place it as ",
                      to_string(known->second.first), " and ", to_string(placement));
  }

  const DeviceMesh& mesh_;
  const std::vector<NamedModule> modules_;
  std::vector<Treatment> treatments_;
  std::map<const Module*, size_t> by_module_;
  std::map<std::pair<const c10::TensorImpl*, OperatorFamily>, size_t> by_weight_;
  std::map<const c10::TensorImpl*, std::pair<Placement, std::string>> placements_;
};

Placements with(const at::Tensor& tensor, const DeviceMesh& mesh, int64_t mesh_dim,
                const Placement& placement) {
  Placements placements = is_dist(tensor) ? placements_of(tensor) : replicated(mesh);
  placements[mesh_dim] = placement;
  return placements;
}

int64_t checked_dim(const DeviceMesh& mesh, std::optional<int64_t> mesh_dim) {
  TORCH_CHECK_VALUE(mesh_dim || mesh.ndim() == 1,
                    "[parallelize_module] a mesh of several dims needs `mesh_dim`, the dim over "
                    "which modules are cut; got ",
                    mesh.to_string(), " without one");
  const int64_t dim = mesh_dim.value_or(0);
  TORCH_CHECK_VALUE(-mesh.ndim() <= dim && dim < mesh.ndim(),
                    "[parallelize_module] `mesh_dim` must be a dim of ", mesh.to_string(), "; got ",
                    dim);
  return dim < 0 ? dim + mesh.ndim() : dim;
}

ModuleFunctions functions_of(const Treatment& treatment, int64_t mesh_dim) {
  const Flow flow = flow_of(treatment.style, treatment.family == OperatorFamily::kEmbedding);
  ModuleFunctions functions{.family = treatment.family};
  const auto move = [&](const std::optional<Placement>& to,
                        const std::optional<Placement>& given) -> ModuleFunction {
    if (!to) return nullptr;
    return [mesh_dim, given, to = *to](const at::Tensor& tensor, const DeviceMesh& mesh) {
      return move_placement(tensor, mesh, mesh_dim, given, to);
    };
  };
  functions.input = move(flow.input, flow.given);
  functions.output = move(flow.output, std::nullopt);
  return functions;
}

}  // namespace

void parallelize_module(Module& module, const DeviceMesh& mesh, const ParallelPlan& plan,
                        std::optional<int64_t> mesh_dim) {
  int64_t dim = 0;
  Resolution resolution(module, mesh);
  const auto resolve = [&] {
    dim = checked_dim(mesh, mesh_dim);
    for (const auto& [pattern, style] : plan) resolution.add(pattern, style);
  };
  if (mesh.is_member()) {
    const ShardMesh ranks(mesh.process_group(), nullptr);
    check_on_all_ranks(ranks, resolve, "parallelize_module");
    check_same_lines(ranks, describe(plan, dim),
                     "[parallelize_module] all ranks must give the same plan");
  } else {
    resolve();
  }
  distribute_module(module, mesh, [&](const std::string&, Module& own, const DeviceMesh&) {
    const Treatment* const treatment = resolution.find(own);
    if (!treatment) return;
    for (const auto& [tensor, placement] : treatment->parameters)
      distribute_(tensor, mesh, with(tensor, mesh, dim, placement));
  });
  for (const Treatment& treatment : resolution.treatments())
    set_functions(treatment.weight, functions_of(treatment, dim));
}

void set_module_functions(Module& module, ModuleFunction input, ModuleFunction output) {
  const at::Tensor weight = own_weight(module);
  TORCH_CHECK_VALUE(weight.defined() && is_dist(weight),
                    "[set_module_functions] `module` must have a parameter `weight` of its own "
                    "that is a DistTensor; got ",
                    module.name(),
                    weight.defined() ? " with an ordinary weight; distribute_module() places it"
                                     : " without a weight; name the inner modules");
  set_functions(weight, {std::move(input), std::move(output), family_of(module)});
}

}  // namespace tessera
