#include "mesh/outside_mesh.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <utility>

#include "dispatch/dry_run.h"
#include "dispatch/each_tensor.h"
#include "mesh/pending.h"
#include "mesh/placed.h"

namespace tessera {
namespace {

using torch::jit::Stack;

Stack results_without_data(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  auto results = run_on_meta(op, arguments);
  return results ? std::move(*results) : run_on_constants(op, arguments);
}

// Follows the ranks of the mesh in placing the arguments of an operator that does not write to
// them.
void note_placed(at::ArrayRef<c10::IValue> arguments, const OpPlan* plan,
                 const DistSpecPtr& whole) {
  size_t input = 0;
  for (const c10::IValue& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      note_placed_argument(tensor, plan ? plan->inputs[input++] : whole);
    });
}

}  // namespace

void call_outside(const c10::OperatorHandle& op, const DeviceMesh& mesh, const OpPlan* plan,
                  std::optional<Stack>& results, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  const DistSpecPtr whole = intern(mesh, replicated(mesh));
  const c10::Device device = device_of(arguments);
  if (plan ? !plan->writes : !schema.is_mutable()) note_placed(arguments, plan, whole);
  const bool is_view =
      returns_views(schema) && arguments[0].isTensor() && find_dist_meta(arguments[0].toTensor());
  size_t output = 0;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (const c10::IValue* const written = written_argument(schema, i, arguments)) {
      each_tensor(*written, [&](const at::Tensor&) { ++output; });
      stack->push_back(*written);
      continue;
    }
    if (!results) results = results_without_data(op, arguments);
    const c10::IValue& result = (*results)[i];
    TORCH_CHECK_NOT_IMPLEMENTED(result.isTensor() || result.isTensorList(), "[", schema.name(), "] gives a value that a rank has "
                                "only if it is in the mesh ", mesh.to_string());
    stack->push_back(map_tensors(result, [&](const at::Tensor& like) {
      const DistSpecPtr& spec = plan ? plan->outputs[output++].spec : whole;
      const at::Tensor part = at::empty({0}, like.options().device(device));
      const at::Tensor made = make_dist(part, spec, like.sizes(), like.strides());
      is_view ? reduce_once(made, arguments[0].toTensor()) : reduce_once(made);
      return made;
    }));
  }
}

}  // namespace tessera
