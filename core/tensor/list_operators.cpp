#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tensor/dist_dispatch.h"
#include "tensor/dist_meta.h"
#include "tensor/placed.h"
#include "tensor/redistribute.h"
#include "tensor/view_source.h"

namespace tessera {

// [Note: Operators on lists]
//
// On the CPU, LibTorch's foreach operators are loops over operators on single tensors, and those
// support DistTensors; operators without a shorter way here are left to that loop. The shorter way,
// for elementwise operators, is to place the tensors and to run the operator on lists of local
// parts: one trip through the dispatcher per list in place of one per tensor.
namespace {

using torch::jit::Stack;

bool is_pending_other_than_sum(const Placement& placement) {
  const auto* const partial = std::get_if<Partial>(&placement);
  return partial && partial->op != PartialOp::kSum && partial->op != PartialOp::kAvg;
}

// A call of an operator on lists of tensors: places the tensors at each position of the lists for
// the operator, and writes changed values back afterwards.
class ListCall {
 public:
  struct Options {
    bool keeps_sums = false;    // sums pending in the tensors may stay pending
    bool needs_memory = false;  // kernels read memory as if it were contiguous
    bool writes_grads = true;   // an argument `grads` is written to if the schema says so
  };

  ListCall(const c10::OperatorHandle& op, Stack arguments, Options options)
      : op_(op), arguments_(std::move(arguments)), options_(options), lists_(arguments_.size()) {
    main_ = arguments_.size();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!arguments_[i].isTensorList()) continue;
      lists_[i] = arguments_[i].toTensorVector();
      main_ = std::min(main_, i);
      TORCH_CHECK_VALUE(lists_[i].size() == lists_[main_].size() || lists_[i].empty(), "[",
                        op.schema().name(), "] all lists must be of one length; expected ",
                        lists_[main_].size(), ", got ", lists_[i].size());
    }
    TORCH_INTERNAL_ASSERT(main_ < arguments_.size(), op.schema().name());
    for (size_t i = 0; i < lists_[main_].size(); ++i) rows_.push_back(find_row(i));
  }

  size_t size() const { return rows_.size(); }
  // The placements at a position; null if all tensors there are ordinary.
  const DistSpecPtr& row(size_t i) const { return rows_[i]; }
  // The tensor of the first list at a position.
  const at::Tensor& first(size_t i) const { return lists_[main_][i]; }

  // True if a list that is written to has two tensors, or one twice, that show the same memory:
  // each sees what was written before, which it can't where the operator gets copies. Ranks that
  // are not in the mesh don't know which are copied.
  bool writes_twice() const {
    for (size_t argument = 0; argument < lists_.size(); ++argument) {
      if (lists_[argument].empty() || !is_written(argument)) continue;
      std::vector<const c10::TensorImpl*> bases;
      for (const at::Tensor& tensor : lists_[argument]) {
        const at::TensorBase& base = tensor.is_view() ? tensor._base() : tensor;
        bases.push_back(base.unsafeGetTensorImpl());
      }
      std::ranges::sort(bases);
      if (std::ranges::adjacent_find(bases) != bases.end()) return true;
    }
    return false;
  }

  bool has_equal_sizes() const {
    for (const auto& list : lists_) {
      for (size_t i = 0; i < list.size(); ++i) {
        if (list[i].sizes() != first(i).sizes()) return false;
      }
    }
    return true;
  }

  // Runs the operator on local parts and returns its results. Values written to tensors that had
  // to be placed anew are copied back to these.
  Stack run() {
    Stack local;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const c10::IValue& argument = arguments_[i];
      if (argument.isTensorList()) {
        local.push_back(local_list(i));
      } else if (argument.isTensor() && argument.toTensor().defined()) {
        local.emplace_back(local_number(argument.toTensor(), is_written(i)));
      } else {
        local.push_back(argument);
      }
    }
    if (local[main_].toTensorList().empty()) {
      local.clear();
    } else {
      op_.callBoxed(local);
    }
    write_back();
    return local;
  }

 private:
  // A tensor that is written to, and whose values the operator gets in other memory.
  struct Moved {
    at::Tensor tensor, part;
    DistSpecPtr spec;
  };

  DistSpecPtr find_row(size_t i) const {
    const DistMeta* first_meta = nullptr;
    bool wants_gradient = false;
    for (const auto& list : lists_) {
      if (list.empty()) continue;
      const DistMeta* const meta = find_dist_meta(list[i]);
      wants_gradient |= !meta && at::GradMode::is_enabled() && list[i].requires_grad();
      if (!meta) continue;
      if (!first_meta) first_meta = meta;
      TORCH_CHECK_VALUE(meta->spec->mesh == first_meta->spec->mesh, "[", op_.schema().name(),
                        "] all DistTensors at one place of the lists must lie on one mesh; got ",
                        first_meta->spec->mesh.to_string(), " and ", meta->spec->mesh.to_string(),
                        " at place ", i);
    }
    if (!first_meta) return nullptr;
    TORCH_CHECK_VALUE(!wants_gradient, "[", op_.schema().name(),
                      "] an ordinary tensor that requires a gradient can't be used together with a "
                      "DistTensor; got them at place ",
                      i, "; distribute() it first");
    const DeviceMesh& mesh = first_meta->spec->mesh;
    // A tensor that is written to keeps its placements; other ordinary tensors may be cut as
    // needed.
    if (!find_dist_meta(first(i)) && is_written(main_)) return intern(mesh, replicated(mesh));
    const Placements& placements = first_meta->spec->placements;
    const bool keeps =
        options_.keeps_sums && std::ranges::none_of(placements, is_pending_other_than_sum);
    return keeps ? first_meta->spec : intern(mesh, without_partial(placements));
  }

  bool is_written(size_t argument) const {
    const c10::Argument& described = op_.schema().arguments()[argument];
    const bool writes = described.alias_info() && described.alias_info()->isWrite();
    return writes && (options_.writes_grads || described.name() != "grads");
  }

  // A rank has no elements of tensors of meshes that it is not in.
  bool is_used(size_t i) const { return !rows_[i] || rows_[i]->mesh.is_member(); }

  // The operator writes to `part` in place of `tensor`.
  void note_written(const at::Tensor& tensor, const at::Tensor& part, const DistSpecPtr& spec) {
    const DistMeta* const meta = find_dist_meta(tensor);
    if (part.is_same(meta ? meta->local : tensor)) {
      written_.push_back(tensor);
    } else {
      moved_.push_back({tensor, part, spec});
    }
  }

  at::Tensor local_element(const at::Tensor& tensor, size_t i, bool is_written) {
    DistSpecPtr spec = rows_[i];
    // The number of steps, for example, is a single one for the whole tensor.
    if (spec && tensor.sizes() != first(i).sizes())
      spec = intern(spec->mesh, replicated(spec->mesh));
    at::Tensor part = spec ? placed(tensor, *spec, op_.schema().name()) : tensor;
    if (options_.needs_memory) part = part.contiguous();
    if (is_written) note_written(tensor, part, spec);
    return part;
  }

  // Tensors that hold one number for the whole list may be on any mesh.
  at::Tensor local_number(const at::Tensor& tensor, bool is_written) {
    const DistMeta* const meta = find_dist_meta(tensor);
    if (!meta) return tensor;
    const DistSpecPtr whole = intern(meta->spec->mesh, replicated(meta->spec->mesh));
    const at::Tensor part = placed(tensor, *whole, op_.schema().name());
    if (is_written) note_written(tensor, part, whole);
    return part;
  }

  c10::IValue local_list(size_t argument) {
    std::vector<at::Tensor> local;
    for (size_t i = 0; i < lists_[argument].size(); ++i) {
      const at::Tensor part = local_element(lists_[argument][i], i, is_written(argument));
      if (is_used(i)) {
        local.push_back(part);
      } else if (!options_.needs_memory) {
        local.push_back(at::empty({0}, part.options()));
      }
    }
    return local;
  }

  void write_back() const {
    for (const auto& [tensor, part, spec] : moved_) {
      const DistMeta* const meta = find_dist_meta(tensor);
      if (spec && !spec->mesh.is_member()) continue;
      const std::string& subject = op_.schema().name();
      if (meta) {
        write_part(*meta, tensor.sizes(), part, *spec, subject);
      } else {
        tensor.copy_(spec ? convert(part, *spec, replicated(spec->mesh), tensor.sizes(), subject)
                          : part);
      }
    }
    for (const at::Tensor& tensor : written_) {
      if (const DistMeta* const meta = find_dist_meta(tensor)) wrote_to(*meta);
    }
  }

  const c10::OperatorHandle& op_;
  const Stack arguments_;
  const Options options_;
  std::vector<std::vector<at::Tensor>> lists_;  // by argument; empty for other arguments
  size_t main_ = 0;
  std::vector<DistSpecPtr> rows_;
  std::vector<Moved> moved_;
  std::vector<at::Tensor> written_;
};

// Tensors whose norms are reduced over the same ranks: by one message.
struct NormFamily {
  const DeviceMesh* mesh;
  std::vector<bool> is_cut;  // by mesh dim
  std::vector<size_t> members;
};

std::vector<bool> cut_dims(const DistSpec& spec) {
  std::vector<bool> is_cut;
  for (int64_t d = 0; d < spec.mesh.ndim(); ++d)
    is_cut.push_back(is_shard(spec.placements[d]) && spec.mesh.size(d) > 1);
  return is_cut;
}

std::vector<NormFamily> families_of(const std::vector<DistSpecPtr>& specs) {
  std::vector<NormFamily> families;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!specs[i] || !specs[i]->mesh.is_member()) continue;
    const auto is_cut = cut_dims(*specs[i]);
    NormFamily* own = nullptr;
    for (NormFamily& family : families) {
      if (*family.mesh == specs[i]->mesh && family.is_cut == is_cut) own = &family;
    }
    if (!own) own = &families.emplace_back(NormFamily{&specs[i]->mesh, is_cut, {}});
    own->members.push_back(i);
  }
  return families;
}

// Replaces norms of parts by those of whole tensors: |a, b| = (|a|^p + |b|^p)^(1/p); order 0: the
// number of elements; infinite order: the largest.
void combine(const NormFamily& family, std::vector<at::Tensor>& norms, double order) {
  std::vector<at::Tensor> own;
  for (const size_t i : family.members) own.push_back(norms[i].to(at::kDouble));
  const bool is_largest = std::isinf(order), has_root = !is_largest && order != 0;
  at::Tensor terms = at::stack(own);
  if (has_root) terms = terms.pow(order);
  bool is_sent = false;
  for (size_t d = 0; d < family.is_cut.size(); ++d) {
    if (!family.is_cut[d]) continue;
    is_sent = true;
    family.mesh->process_group(static_cast<int64_t>(d))
        ->all_reduce(terms, is_largest ? ReduceOp::kMax : ReduceOp::kSum, {"norms of a list"})
        ->wait();
  }
  if (!is_sent) return;
  if (has_root) terms = terms.pow(1 / order);
  for (size_t i = 0; i < family.members.size(); ++i) {
    at::Tensor& norm = norms[family.members[i]];
    norm = terms.select(0, static_cast<int64_t>(i)).to(norm.scalar_type()).clone();
  }
}

constexpr std::string_view kForeach = "aten::_foreach_";
constexpr std::string_view kCheckGradients = "aten::_amp_foreach_non_finite_check_and_unscale_";

bool is_foreach(std::string_view name) { return name.starts_with(kForeach); }

bool is_fused_step(std::string_view name) {
  return name.starts_with("aten::_fused_ad") || name.starts_with("aten::_fused_sgd");
}

// True if f(a + b) = f(a) + f(b), in all tensors at a position together.
bool is_linear(const c10::FunctionSchema& schema) {
  static const auto* const names =
      new std::set<std::string>{"add.List",   "sub.List",       "mul.Scalar",  "mul.ScalarList",
                                "div.Scalar", "div.ScalarList", "lerp.Scalar", "lerp.ScalarList",
                                "neg",        "zero",           "clone",       "copy"};
  std::string name = schema.name().substr(kForeach.size());
  if (name.ends_with('_')) name.pop_back();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  return names->contains(name);
}

bool is_elementwise(std::string_view name) {
  for (const auto other : {"norm", "powsum", "max", "mm"}) {
    if (name.substr(kForeach.size()) == other) return false;
  }
  return true;
}

// Calls the operator as LibTorch composes it on the CPU, of operators on DistTensors.
void call_composed(const c10::OperatorHandle& op, Stack arguments, Stack* stack) {
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

at::Tensor as_result(const at::Tensor& part, const DistSpecPtr& spec, const at::Tensor& like) {
  return spec ? make_dist_like(part, spec, like) : part;
}

void call_elementwise(const c10::OperatorHandle& op, Stack arguments, Stack* stack) {
  ListCall call(op, arguments, {.keeps_sums = is_linear(op.schema())});
  if (!call.has_equal_sizes() || call.writes_twice())
    return call_composed(op, std::move(arguments), stack);
  const Stack results = call.run();
  for (const c10::IValue& result : results) {
    auto list = result.toTensorVector();
    for (size_t i = 0; i < list.size(); ++i)
      list[i] = as_result(list[i], call.row(i), call.first(i));
    stack->emplace_back(std::move(list));
  }
}

void call_norm(const c10::OperatorHandle& op, Stack arguments, Stack* stack) {
  const ListCall call(op, arguments, {});
  const double order = arguments[1].toScalar().toDouble();
  // An empty part has no smallest element.
  if (order < 0) return call_composed(op, std::move(arguments), stack);
  std::vector<at::Tensor> parts;
  std::vector<DistSpecPtr> specs;
  for (size_t i = 0; i < call.size(); ++i) {
    specs.push_back(call.row(i));
    const at::Tensor part =
        specs[i] ? placed(call.first(i), *specs[i], op.schema().name()) : call.first(i);
    // Kernels need at least one element to find the largest.
    parts.push_back(part.numel() == 0 ? at::zeros({1}, part.options()) : part);
  }
  arguments[0] = std::move(parts);
  op.callBoxed(arguments);
  auto norms = arguments[0].toTensorVector();
  for (const NormFamily& family : families_of(specs)) combine(family, norms, order);
  for (size_t i = 0; i < norms.size(); ++i) {
    if (!specs[i]) continue;
    const DeviceMesh& mesh = specs[i]->mesh;
    norms[i] = make_dist(norms[i], intern(mesh, replicated(mesh)), {});
  }
  stack->emplace_back(std::move(norms));
}

void call_fused_step(const c10::OperatorHandle& op, Stack arguments) {
  const auto& described = op.schema().arguments();
  const auto scale = std::find_if(described.begin(), described.end(),
                                  [](const c10::Argument& a) { return a.name() == "grad_scale"; });
  // Gradients are written to only where they are scaled.
  const bool scales = scale != described.end() && !arguments[scale - described.begin()].isNone();
  ListCall(op, std::move(arguments), {.needs_memory = true, .writes_grads = scales}).run();
}

// Shares the findings with all ranks of the meshes: each rank has checked its own parts only. Ranks
// of one mesh alone, whose tensors are whole on each, have checked the same.
void share_findings(const ListCall& call, const at::Tensor& found) {
  const DeviceMesh* mesh = nullptr;
  std::set<int> ranks;
  bool is_member = false, is_shared = false;
  for (size_t i = 0; i < call.size(); ++i) {
    const DistSpecPtr& spec = call.row(i);
    if (!spec) continue;
    is_member = is_member || spec->mesh.is_member();
    ranks.insert(spec->mesh.ranks().begin(), spec->mesh.ranks().end());
    is_shared = is_shared || std::ranges::any_of(spec->placements, [](const Placement& placement) {
                  return is_shard(placement);
                });
    if (!mesh) mesh = &spec->mesh;
    is_shared = is_shared || std::cmp_not_equal(ranks.size(), spec->mesh.size()) ||
                std::cmp_not_equal(ranks.size(), mesh->size());
  }
  if (!is_shared || !is_member || ranks.size() == 1) return;
  const DistMeta* const meta = find_dist_meta(found);
  at::Tensor own = meta ? meta->local : found;
  at::Tensor largest = own.contiguous();
  mesh->process_group_of({ranks.begin(), ranks.end()})
      ->all_reduce(largest, ReduceOp::kMax, {"check of gradients"})
      ->wait();
  if (!largest.is_same(own)) own.copy_(largest);
}

void check_gradients(const c10::OperatorHandle& op, Stack arguments) {
  const at::Tensor found = arguments[1].toTensor();
  ListCall call(op, std::move(arguments), {.needs_memory = true});
  call.run();
  share_findings(call, found);
}

}  // namespace

bool takes_lists(const c10::FunctionSchema& schema) {
  return is_foreach(schema.name()) || is_fused_step(schema.name()) ||
         schema.name().starts_with("aten::_amp_foreach_non_finite_check_and_unscale");
}

void call_on_lists(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.schema().name();
  Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  if (name == kCheckGradients) return check_gradients(op, std::move(arguments));
  if (is_fused_step(name) && name.ends_with('_')) return call_fused_step(op, std::move(arguments));
  if (name == "aten::_foreach_norm") return call_norm(op, std::move(arguments), stack);
  if (is_foreach(name) && is_elementwise(name))
    return call_elementwise(op, std::move(arguments), stack);
  call_composed(op, std::move(arguments), stack);
}

}  // namespace tessera
