#include "tensor/placed.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/dispatch/dry_run.h"
#include "base/dispatch/each_tensor.h"
#include "tensor/redistribute.h"
#include "tensor/view_source.h"

namespace tessera {
namespace {

thread_local bool keeps_terms = false;

DistMeta* meta_of(const at::Tensor& tensor) {
  return const_cast<DistMeta*>(
      find_dist_meta(tensor));  // NOLINT: the meta of a tensor is no constant
}

// True if pending reductions are all that changes from one to the other, and they get done.
bool only_reduces(const Placements& from, const Placements& to) {
  if (from == to) return false;
  for (size_t i = 0; i < from.size(); ++i) {
    if (from[i] != to[i] && (!is_partial(from[i]) || is_partial(to[i]))) return false;
  }
  return true;
}

bool can_reduce(const DistMeta& meta, const at::Tensor& tensor, const DistSpec& wanted) {
  if (keeps_terms || !meta.reduces_once) return false;
  return only_reduces(meta.spec->placements, wanted.placements);
}

}  // namespace

at::Tensor placed(const at::Tensor& tensor, const DistSpec& wanted, std::string_view subject) {
  if (const DistMeta* const meta = find_dist_meta(tensor)) {
    const at::Tensor& local = local_part(*meta);
    if (meta->spec.get() == &wanted) return local;
    return convert(local, *meta->spec, wanted.placements, tensor.sizes(),
                   {subject, meta->identity});
  }
  const DistSpec whole{wanted.mesh, replicated(wanted.mesh)};
  return convert(tensor, whole, wanted.placements, tensor.sizes(), subject);
}

at::Tensor placed_argument(const at::Tensor& tensor, const DistSpecPtr& wanted,
                           std::string_view subject) {
  DistMeta* const meta = meta_of(tensor);
  if (!meta) return placed(tensor, *wanted, subject);
  if (meta->spec == wanted) return local_part(*meta);
  const at::Tensor part = placed(tensor, *wanted, subject);
  if (!can_reduce(*meta, tensor, *wanted)) return part;
  if (meta->is_shown) meta->source = std::make_shared<ViewSource>(tensor, wanted, part);
  meta->reduce_to(part, wanted);
  return part;
}

void note_placed_argument(const at::Tensor& tensor, const DistSpecPtr& wanted) {
  DistMeta* const meta = meta_of(tensor);
  if (meta && can_reduce(*meta, tensor, *wanted)) meta->reduce_to(meta->local, wanted);
}

void reduce_once(const at::Tensor& made) {
  DistMeta* const meta = meta_of(made);
  meta->reduces_once = std::ranges::any_of(meta->spec->placements, is_partial);
}

void reduce_once(const at::Tensor& view, const at::Tensor& base, const DistSpecPtr& given) {
  DistMeta *const meta = meta_of(view), *const shown = meta_of(base);
  if (!shown) return;
  shown->is_shown = meta->is_shown = true;
  if (!shown->writes.enabled()) shown->writes = c10::VariableVersion(0);
  meta->writes = shown->writes;
  meta->reduces_once = shown->reduces_once;
  meta->shown_parameter = shown->parameter ? shown->parameter : shown->shown_parameter;
  meta->shows_expanded =
      shown->shows_expanded ||
      (given != shown->spec && at::has_internal_overlap(base) == at::MemOverlap::Yes);
}

void check_writable(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* const alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite()) continue;
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      TORCH_CHECK(!meta || !meta->shows_expanded,
                  "unsupported operation: a view of an expanded DistTensor is a copy here, and "
                  "more than one element of the written-to tensor refers to a single memory "
                  "location. Please clone() the tensor before performing the operation");
    });
  }
}

KeepTerms::KeepTerms() : before_(std::exchange(keeps_terms, true)) {}
KeepTerms::~KeepTerms() { keeps_terms = before_; }

const DeviceMesh& mesh_of_arguments(const c10::OperatorHandle& op,
                                    at::ArrayRef<c10::IValue> arguments) {
  const DistMeta* first = nullptr;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      if (meta && !first) first = meta;
      if (meta) {
        TORCH_CHECK_VALUE(
            meta->spec->mesh.is_same(first->spec->mesh) || meta->spec->mesh == first->spec->mesh,
            "[", op.schema().name(), "] all DistTensors must lie on one mesh; got ",
            first->spec->mesh.to_string(), " and ", meta->spec->mesh.to_string(),
            "; redistribute() moves a tensor to another mesh");
        return;
      }
      TORCH_CHECK_VALUE(
          !(at::GradMode::is_enabled() && tensor.requires_grad()), "[", op.schema().name(),
          "] an ordinary tensor that requires a gradient can't be used together with a DistTensor, "
          "because its gradient would be a DistTensor; got a tensor of sizes ",
          tensor.sizes(), "; distribute() it first");
    });
  }
  TORCH_INTERNAL_ASSERT(first);
  return first->spec->mesh;
}

c10::Device device_of(at::ArrayRef<c10::IValue> arguments) {
  c10::Device device(c10::kCPU);
  for (const c10::IValue& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) { device = tensor.device(); });
  return device;
}

std::optional<size_t> written_index(const c10::FunctionSchema& schema, size_t result) {
  const auto* const alias = schema.returns()[result].alias_info();
  if (!alias || !alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* const own = schema.arguments()[i].alias_info();
    if (own && own->isWrite() && own->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

void check_known_outside(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments,
                         const DeviceMesh& mesh) {
  const bool are_tensors = std::ranges::all_of(op.schema().returns(), [](const auto& result) {
    return result.type()->isSubtypeOf(*c10::TensorType::get()) ||
           result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
  TORCH_CHECK_NOT_IMPLEMENTED(are_tensors && !has_sizes_by_values(op, arguments), "[",
                              op.schema().name(),
                              "] only ranks of the mesh can call this operator, because ",
                              are_tensors ? "the sizes of its result depend on values"
                                          : "it returns a value that is not a tensor",
                              "; this rank is not in ", mesh.to_string());
}

}  // namespace tessera
