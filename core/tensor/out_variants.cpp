#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/dispatch/each_tensor.h"
#include "tensor/dist_dispatch.h"
#include "tensor/dist_meta.h"
#include "tensor/placed.h"

namespace tessera {
namespace {

using torch::jit::Stack;

bool has_out(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.arguments(), &c10::Argument::is_out);
}

bool changes_shape(const std::string& name) {
  static const auto* const names = new std::set<std::string>{
      "aten::t_",          "aten::transpose_", "aten::squeeze_", "aten::unsqueeze_",
      "aten::as_strided_", "aten::resize_",    "aten::set_"};
  return names->contains(name);
}

// True if the schemas are equal except for the arguments that are written to.
bool is_functional_of(const c10::FunctionSchema& functional, const c10::FunctionSchema& schema) {
  std::vector<c10::Argument> inputs;
  for (const c10::Argument& argument : schema.arguments()) {
    if (!argument.is_out()) inputs.push_back(argument);
  }
  const auto& own = functional.arguments();
  return !has_out(functional) && std::equal(own.begin(), own.end(), inputs.begin(), inputs.end(),
                                            [](const c10::Argument& a, const c10::Argument& b) {
                                              return a.name() == b.name() && *a.type() == *b.type();
                                            });
}

// "aten::add.Tensor" for "aten::add.out", "aten::t" for "aten::t_"; nullopt if there is none.
std::optional<c10::OperatorHandle> find_functional(const c10::FunctionSchema& schema) {
  std::string name = schema.name();
  if (name.ends_with('_')) name.pop_back();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& candidate : dispatcher.getAllOpNames()) {
    if (candidate.name != name) continue;
    const auto op = dispatcher.findSchema(candidate);
    if (op && is_functional_of(op->schema(), schema)) return op;
  }
  return std::nullopt;
}

const std::optional<c10::OperatorHandle>& functional_of(const c10::FunctionSchema& schema) {
  thread_local std::unordered_map<const c10::FunctionSchema*, std::optional<c10::OperatorHandle>>
      known;
  const auto found = known.find(&schema);
  if (found != known.end()) return found->second;
  return known.emplace(&schema, find_functional(schema)).first->second;
}

// Gives `tensor` the sizes, strides, placements and local part of `result`.
void become(const at::Tensor& tensor, const at::Tensor& result) {
  at::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
  impl->set_backend_meta(result.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

// An ordinary tensor gets the whole result, on the ranks that have one.
void write_ordinary(const at::Tensor& out, const at::Tensor& result, const std::string& name) {
  const DistMeta* const meta = find_dist_meta(result);
  if (meta && !meta->spec->mesh.is_member()) return;
  const at::Tensor whole =
      meta ? placed(result, *intern(meta->spec->mesh, replicated(meta->spec->mesh)), name) : result;
  if (out.sizes() != whole.sizes()) out.resize_(whole.sizes());
  out.copy_(whole);
}

void write(const at::Tensor& out, const at::Tensor& result, const std::string& name) {
  TORCH_CHECK_VALUE(out.sizes() == result.sizes() || out.numel() == 0, "[", name,
                    "] `out` must be empty or have the sizes of the result; expected ",
                    result.sizes(), ", got ", out.sizes());
  TORCH_CHECK_VALUE(out.sizes() == result.sizes() || !out.is_view() || !find_dist_meta(out), "[",
                    name,
                    "] `out` must be empty or have the sizes of the result, and no empty view: its "
                    "base would be written to; expected ",
                    result.sizes(), ", got ", out.sizes());
  TORCH_CHECK(c10::canCast(result.scalar_type(), out.scalar_type()), "[", name,
              "] the result must be of a type that `out` can hold; got ", result.scalar_type(),
              " for ", out.scalar_type());
  if (!find_dist_meta(out)) return write_ordinary(out, result, name);
  if (out.sizes() != result.sizes() && find_dist_meta(result)) {
    become(out, result.to(out.scalar_type()));
  } else {
    TORCH_CHECK_VALUE(out.sizes() == result.sizes(), "[", name,
                      "] an empty DistTensor can't become an ordinary tensor of sizes ",
                      result.sizes());
    out.copy_(result);
  }
}

// For operators that use the dtype of `out` if none is asked for.
void ask_for_dtype(const c10::FunctionSchema& functional, const at::Tensor& out, Stack& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool is_dtype = functional.arguments()[i].name() == "dtype" && inputs[i].isNone();
    if (is_dtype) inputs[i] = static_cast<int64_t>(out.scalar_type());
  }
}

// For an operator without a functional form: it writes to ordinary tensors, on every rank.
Stack run_whole(const c10::OperatorHandle& op, const Stack& arguments, const DeviceMesh& mesh) {
  const c10::FunctionSchema& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(
      mesh.is_member(), "[", schema.name(),
      "] into a DistTensor can't be called by a rank that is not in the mesh ", mesh.to_string());
  const DistSpecPtr whole = intern(mesh, replicated(mesh));
  Stack local;
  for (size_t i = 0; i < arguments.size(); ++i)
    local.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      return schema.arguments()[i].is_out() ? at::empty({0}, tensor.options().requires_grad(false))
                                            : placed(tensor, *whole, schema.name());
    }));
  op.callBoxed(local);
  Stack results;
  for (const c10::IValue& result : local)
    results.push_back(map_tensors(result, [&](const at::Tensor& part) {
      return make_dist(part, whole, part.sizes(), part.strides());
    }));
  return results;
}

void write_all(const std::vector<at::Tensor>& outs, const Stack& results, const std::string& name) {
  std::vector<at::Tensor> made;
  for (const c10::IValue& result : results)
    each_tensor(result, [&](const at::Tensor& tensor) { made.push_back(tensor); });
  TORCH_INTERNAL_ASSERT(made.size() == outs.size(), name);
  for (size_t i = 0; i < outs.size(); ++i) write(outs[i], made[i], name);
}

void call_with_out(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  const DeviceMesh& mesh = mesh_of_arguments(op, arguments);
  Stack inputs, returned;
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_out = schema.arguments()[i].is_out();
    (is_out ? returned : inputs).push_back(arguments[i]);
    if (is_out) each_tensor(arguments[i], [&](const at::Tensor& out) { outs.push_back(out); });
  }
  const auto& functional = functional_of(schema);
  if (functional) {
    ask_for_dtype(functional->schema(), outs[0], inputs);
    functional->callBoxed(inputs);
  } else {
    inputs = run_whole(op, arguments, mesh);
  }
  write_all(outs, inputs, schema.name());
  if (!schema.returns().empty()) stack->insert(stack->end(), returned.begin(), returned.end());
}

void call_changing_shape(const c10::OperatorHandle& op, Stack* stack) {
  Stack arguments = torch::jit::pop(*stack, op.schema().arguments().size());
  const at::Tensor tensor = arguments[0].toTensor();
  const std::string& name = op.schema().name();
  const auto& functional = functional_of(op.schema());
  const bool keeps_sizes = name == "aten::resize_" && arguments[1].toIntVector() == tensor.sizes();
  TORCH_CHECK_NOT_IMPLEMENTED(
      keeps_sizes || (functional && name != "aten::resize_" && name != "aten::set_"), "[", name,
      "] a DistTensor has no memory of its own that could be changed; got one of sizes ",
      tensor.sizes());
  if (!keeps_sizes) {
    functional->callBoxed(arguments);
    become(tensor, arguments[0].toTensor());
  }
  stack->emplace_back(tensor);
}

}  // namespace

bool replaces_tensor(const c10::FunctionSchema& schema) {
  return has_out(schema) || changes_shape(schema.name());
}

void call_replacing(const c10::OperatorHandle& op, Stack* stack) {
  if (changes_shape(op.schema().name())) return call_changing_shape(op, stack);
  call_with_out(op, stack);
}

}  // namespace tessera
