#include "mesh/placed.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "dispatch/each_tensor.h"
#include "mesh/redistribute.h"
#include "mesh/view_source.h"

namespace tessera {

at::Tensor placed(const at::Tensor& tensor, const DistSpec& wanted, std::string_view subject) {
  if (const DistMeta* const meta = find_dist_meta(tensor)) {
    const at::Tensor& local = local_part(*meta);
    if (meta->spec.get() == &wanted) return local;
    return convert(local, *meta->spec, wanted.placements, tensor.sizes(), subject);
  }
  const DistSpec whole{wanted.mesh, replicated(wanted.mesh)};
  return convert(tensor, whole, wanted.placements, tensor.sizes(), subject);
}

const DeviceMesh& mesh_of_arguments(const c10::OperatorHandle& op,
                                    at::ArrayRef<c10::IValue> arguments) {
  const DistMeta* first = nullptr;
  for (const c10::IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& tensor) {
      const DistMeta* const meta = find_dist_meta(tensor);
      if (meta && !first) first = meta;
      if (meta) {
        TORCH_CHECK_VALUE(meta->spec->mesh.is_same(first->spec->mesh) ||
                              meta->spec->mesh == first->spec->mesh,
                          "[", op.schema().name(), "] all DistTensors must lie on one mesh; got ",
                          first->spec->mesh.to_string(), " and ", meta->spec->mesh.to_string(),
                          "; redistribute() moves a tensor to another mesh");
        return;
      }
      TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && tensor.requires_grad()),
                        "[", op.schema().name(), "] an ordinary tensor that requires a gradient can't be used "
                        "together with a DistTensor, because its gradient would be one; got one of sizes ",
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

const c10::IValue* written_argument(const c10::FunctionSchema& schema, size_t result,
                                    at::ArrayRef<c10::IValue> arguments) {
  const auto index = written_index(schema, result);
  return index ? &arguments[*index] : nullptr;
}

}  // namespace tessera
