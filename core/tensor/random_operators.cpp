#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <tessera/tensor/operator_rules.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/dispatch/each_tensor.h"
#include "comm/start/rank_generator.h"
#include "tensor/chunks.h"
#include "tensor/dist_dispatch.h"
#include "tensor/dist_meta.h"
#include "tensor/generators.h"
#include "tensor/placed.h"
#include "tensor/view_source.h"

namespace tessera {

// [Note: Random numbers of DistTensors]
//
// A generator yields numbers one after the other, so the numbers of a rank's part depend on all
// numbers before them. Each rank therefore draws the numbers of the whole tensor, into memory that
// it frees at once, and keeps those of its part: they are the numbers that one process would draw,
// for any placements; nothing is sent; and the generators of all ranks stay in step, also of ranks
// that are not in the mesh. They must start in the same state; this is checked once.
namespace {

using torch::jit::Stack;

enum class Kind {
  kFills,    // overwrites a tensor with numbers
  kMakes,    // makes a tensor of numbers like another one
  kChanges,  // changes each element, with a number of its own
};

const Kind* kind_of(const std::string& name) {
  static const auto* const kinds = new std::unordered_map<std::string, Kind>{
      {"aten::normal_", Kind::kFills},          {"aten::uniform_", Kind::kFills},
      {"aten::random_", Kind::kFills},          {"aten::exponential_", Kind::kFills},
      {"aten::log_normal_", Kind::kFills},      {"aten::cauchy_", Kind::kFills},
      {"aten::geometric_", Kind::kFills},       {"aten::bernoulli_", Kind::kFills},
      {"aten::rand_like", Kind::kMakes},        {"aten::randn_like", Kind::kMakes},
      {"aten::randint_like", Kind::kMakes},     {"aten::bernoulli", Kind::kChanges},
      {"aten::native_dropout", Kind::kChanges}, {"aten::normal_functional", Kind::kMakes},
      {"aten::uniform", Kind::kMakes},          {"aten::exponential", Kind::kMakes},
      {"aten::log_normal", Kind::kMakes},       {"aten::cauchy", Kind::kMakes},
      {"aten::geometric", Kind::kMakes},        {"aten::random", Kind::kMakes},
  };
  const auto found = kinds->find(name);
  return found == kinds->end() ? nullptr : &found->second;
}

at::Generator generator_of(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments,
                           c10::Device device) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_generator(schema.arguments()[i]) || !arguments[i].isGenerator()) continue;
    const at::Generator named = arguments[i].toGenerator();
    if (named.defined() && named != at::globalContext().defaultGenerator(c10::kCPU)) return named;
  }
  return generator_on(device);
}

// An operator that has such an argument draws nothing outside of training.
bool is_in_training(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  const c10::IValue* const training = NamedArguments{schema, arguments}.find("training");
  return !training || training->toBool();
}

// Uninitialized memory, laid out as that of the whole tensor would be.
at::Tensor room_for(const at::Tensor& tensor) {
  const auto& options = find_dist_meta(tensor)->local.options();
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// This rank's part of a whole tensor, as a view, in which the blocks of a split dim are a dim of
// their own.
at::Tensor own_view(at::Tensor whole, const DistSpec& spec) {
  Placements boxes = spec.placements;
  std::vector<std::pair<Shard, size_t>> splits;  // and their mesh dims
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (!is_split(boxes[i])) continue;
    splits.emplace_back(std::get<Shard>(std::exchange(boxes[i], Replicate{})), i);
  }
  const auto& coordinate = *spec.mesh.coordinate();
  const auto box = local_box(whole.sizes(), boxes, spec.mesh.shape(), coordinate);
  for (size_t d = 0; d < box.size(); ++d)
    whole = whole.narrow(static_cast<int64_t>(d), box[d].begin, box[d].size());
  std::ranges::sort(splits, [](const auto& a, const auto& b) { return a.first.dim > b.first.dim; });
  for (const auto& [split, i] : splits)
    whole = part_of_blocks(whole, split, spec.mesh.shape()[i], coordinate[i]);
  return whole;
}

// The whole tensor, with zeros in the parts of other ranks.
at::Tensor with_own_part(const at::Tensor& tensor, const DistSpec& spec) {
  const at::Tensor own = placed(tensor, spec, "drawn tensor");
  at::Tensor whole = room_for(tensor).zero_();
  if (!spec.mesh.is_member()) return whole;
  const at::Tensor part = own_view(whole, spec);
  part.copy_(own.reshape(part.sizes()));
  return whole;
}

at::Tensor part_of(const at::Tensor& whole, const DistSpec& spec) {
  if (!spec.mesh.is_member()) return at::empty_strided({0}, {1}, whole.options());
  return placed(whole, spec, "drawn tensor");
}

// Makes a DistTensor that does not keep the memory of the whole alive.
at::Tensor make_result(const at::Tensor& whole, const DistSpecPtr& spec) {
  const at::Tensor part = part_of(whole, *spec);
  return make_dist(part.numel() < whole.numel() ? part.clone() : part, spec, whole.sizes(),
                   whole.strides());
}

// Replaces the operator's first tensor and others, probabilities and bounds, by whole tensors.
Stack whole_arguments(const c10::FunctionSchema& schema, Kind kind, const Stack& arguments,
                      const DistSpec& spec) {
  Stack whole;
  const DistSpec everywhere{spec.mesh, replicated(spec.mesh)};
  for (size_t i = 0; i < arguments.size(); ++i)
    whole.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (i > 0) return placed(tensor, everywhere, schema.name());
      return kind == Kind::kChanges ? with_own_part(tensor, spec) : room_for(tensor);
    }));
  return whole;
}

void draw(const c10::OperatorHandle& op, Kind kind, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  const at::Tensor& first = arguments[0].toTensor();
  const DistMeta& meta = *find_dist_meta(first);
  const DistSpecPtr spec = kind == Kind::kFills
                               ? meta.spec
                               : intern(meta.spec->mesh, without_partial(meta.spec->placements));
  Stack whole = whole_arguments(schema, kind, arguments, *spec);
  op.callBoxed(whole);
  if (kind == Kind::kFills) {
    local_part(meta).copy_(part_of(whole[0].toTensor(), *spec));
    wrote_to(meta);
    stack->push_back(arguments[0]);
    return;
  }
  for (const c10::IValue& result : whole)
    stack->push_back(
        map_tensors(result, [&](const at::Tensor& tensor) { return make_result(tensor, spec); }));
}

// Normal numbers with a mean and a deviation for each element, as LibTorch makes them of numbers
// with mean 0 and deviation 1. Returns false for calls without a tensor of either.
bool draw_normal(const c10::FunctionSchema& schema, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  const c10::IValue &mean = arguments[0], &deviation = arguments[1];
  if (!mean.isTensor() && !deviation.isTensor()) return false;
  const at::Tensor like = !deviation.isTensor() ? mean.toTensor()
                          : !mean.isTensor()    ? deviation.toTensor()
                                                : at::add(mean.toTensor(), deviation.toTensor());
  const auto generator = arguments[2].toOptional<at::Generator>();
  at::Tensor numbers = at::empty_like(like, at::MemoryFormat::Contiguous);
  numbers.normal_(0, deviation.isTensor() ? 1 : deviation.toDouble(), generator);
  if (deviation.isTensor()) numbers.mul_(deviation.toTensor());
  mean.isTensor() ? numbers.add_(mean.toTensor()) : numbers.add_(mean.toScalar());
  torch::jit::drop(*stack, schema.arguments().size());
  stack->emplace_back(numbers);
  return true;
}

}  // namespace

bool draws_numbers(const c10::FunctionSchema& schema) {
  return kind_of(schema.name()) || std::ranges::any_of(schema.arguments(), is_generator);
}

bool call_random(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.name() == "aten::normal" && draw_normal(schema, stack)) return true;
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  const DeviceMesh& mesh = mesh_of_arguments(op, arguments);
  if (is_in_training(schema, arguments))
    check_generators_agree(mesh, generator_of(schema, arguments, device_of(arguments)),
                           schema.name());
  const Kind* const kind = kind_of(schema.name());
  if (!kind || !find_dist_meta(arguments[0].toTensor())) return false;
  draw(op, *kind, stack);
  return true;
}

}  // namespace tessera
