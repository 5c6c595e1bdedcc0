#include "mesh/list_call.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "mesh/op_plan.h"
#include "mesh/placed.h"
#include "mesh/redistribute.h"
#include "mesh/view_source.h"

namespace tessera {
namespace {

using torch::jit::Stack;

bool is_pending_other_than_sum(const Placement& placement) {
  const auto* const partial = std::get_if<Partial>(&placement);
  return partial && partial->op != PartialOp::kSum && partial->op != PartialOp::kAvg;
}

bool can_keep_sums(const Placements& placements) {
  return std::none_of(placements.begin(), placements.end(), is_pending_other_than_sum);
}

}  // namespace

ListCall::ListCall(const c10::OperatorHandle& op, Stack arguments, Options options)
    : op_(op), arguments_(std::move(arguments)), options_(options), lists_(arguments_.size()) {
  main_ = arguments_.size();
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!arguments_[i].isTensorList()) continue;
    lists_[i] = arguments_[i].toTensorVector();
    main_ = std::min(main_, i);
    TORCH_CHECK_VALUE(lists_[i].size() == lists_[main_].size() || lists_[i].empty(), "[", op.schema().name(), "] all lists must be of one length; expected ",
                      lists_[main_].size(), ", got ", lists_[i].size());
  }
  TORCH_INTERNAL_ASSERT(main_ < arguments_.size(), op.schema().name());
  for (size_t i = 0; i < lists_[main_].size(); ++i) rows_.push_back(find_row(i));
}

DistSpecPtr ListCall::find_row(size_t i) const {
  const DistMeta* first_meta = nullptr;
  bool wants_gradient = false;
  for (const auto& list : lists_) {
    if (list.empty()) continue;
    const DistMeta* const meta = find_dist_meta(list[i]);
    wants_gradient |= !meta && at::GradMode::is_enabled() && list[i].requires_grad();
    if (!meta) continue;
    if (!first_meta) first_meta = meta;
    TORCH_CHECK_VALUE(meta->spec->mesh == first_meta->spec->mesh, "[", op_.schema().name(), "] all DistTensors at one place of the lists must lie "
                      "on one mesh; got ", first_meta->spec->mesh.to_string(), " and ", meta->spec->mesh.to_string(), " at place ", i);
  }
  if (!first_meta) return nullptr;
  TORCH_CHECK_VALUE(!wants_gradient, "[", op_.schema().name(), "] an ordinary tensor that requires a gradient can't be used together "
                    "with a DistTensor; got them at place ", i, "; distribute() it first");
  const DeviceMesh& mesh = first_meta->spec->mesh;
  // A tensor that is written to keeps its placements; other ordinary tensors may be cut as needed.
  if (!find_dist_meta(first(i)) && is_written(main_)) return intern(mesh, replicated(mesh));
  const Placements& placements = first_meta->spec->placements;
  const bool keeps = options_.keeps_sums && can_keep_sums(placements);
  return keeps ? first_meta->spec : intern(mesh, without_partial(placements));
}

bool ListCall::is_written(size_t argument) const {
  const c10::Argument& described = op_.schema().arguments()[argument];
  const bool writes = described.alias_info() && described.alias_info()->isWrite();
  return writes && (options_.writes_grads || described.name() != "grads");
}

bool ListCall::is_member_of_all() const {
  return std::all_of(rows_.begin(), rows_.end(),
                     [](const DistSpecPtr& spec) { return !spec || spec->mesh.is_member(); });
}

bool ListCall::has_equal_sizes() const {
  for (const auto& list : lists_) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].sizes() != first(i).sizes()) return false;
    }
  }
  return true;
}

// A rank leaves out tensors of meshes that it is not in.
bool ListCall::is_used(size_t i) const { return !rows_[i] || rows_[i]->mesh.is_member(); }

// The operator writes to `part` in place of `tensor`.
void ListCall::note_written(const at::Tensor& tensor, const at::Tensor& part,
                            const DistSpecPtr& spec) {
  const DistMeta* const meta = find_dist_meta(tensor);
  if (part.is_same(meta ? meta->local : tensor)) {
    written_.push_back(tensor);
  } else {
    moved_.push_back({tensor, part, spec});
  }
}

at::Tensor ListCall::local_element(const at::Tensor& tensor, size_t i, bool is_written) {
  DistSpecPtr spec = rows_[i];
  // The number of steps, for example, is a single one for the whole tensor.
  if (spec && tensor.sizes() != first(i).sizes()) spec = intern(spec->mesh, replicated(spec->mesh));
  at::Tensor part = spec ? placed(tensor, *spec, op_.schema().name()) : tensor;
  if (options_.needs_memory) part = part.contiguous();
  if (is_written) note_written(tensor, part, spec);
  return part;
}

// Tensors that hold one number for the whole list may be on any mesh.
at::Tensor ListCall::local_number(const at::Tensor& tensor, bool is_written) {
  const DistMeta* const meta = find_dist_meta(tensor);
  if (!meta) return tensor;
  const DistSpecPtr whole = intern(meta->spec->mesh, replicated(meta->spec->mesh));
  const at::Tensor part = placed(tensor, *whole, op_.schema().name());
  if (is_written) note_written(tensor, part, whole);
  return part;
}

c10::IValue ListCall::local_list(size_t argument) {
  std::vector<at::Tensor> local;
  for (size_t i = 0; i < lists_[argument].size(); ++i) {
    // Collective where the tensor is placed anew: also done for tensors that are left out.
    const at::Tensor part = local_element(lists_[argument][i], i, is_written(argument));
    if (is_used(i)) local.push_back(part);
  }
  return local;
}

void ListCall::write_back() const {
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

Stack ListCall::run() {
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

}  // namespace tessera
