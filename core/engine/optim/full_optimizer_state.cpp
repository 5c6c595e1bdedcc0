#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/engine/optimizer_state_dict.h>

#include <exception>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "engine/model/sharded_state.h"
#include "engine/optim/master_digits.h"
#include "engine/optim/optimizer_archive.h"
#include "engine/optim/param_state.h"
#include "engine/optim/sharded_optimizer_access.h"
#include "engine/optim/small_state.h"
#include "engine/optim/state_replacement.h"
#include "engine/optim/state_shape.h"
#include "engine/unit/agreement.h"

namespace tessera {
namespace {

using Values = OptimizerStateDict::Values;

constexpr const char* kSave = "full_state_dict";
constexpr const char* kLoad = "load_full_state_dict";

void check_segments(const ShardedOptimizer& optimizer, const char* function) {
  const ShardedState& state = *optimizer.module().state();
  state.check_replicated(function);
  for (const Segment& segment : OptimizerAccess(optimizer).segments()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!state.slot(segment.place).dist, "[", function,
                                "] the parameters must not be DistTensors; use "
                                "DistOptimizer::state_dict() and load_state_dict() for those");
  }
}

// This rank's part of the state, and the facts about it that other ranks need.
struct Share {
  std::string archive;
  OptimizerStateDict options;    // without state
  std::set<std::string> others;  // see names_of_others()
};

Share read_share(ShardedOptimizer& optimizer) {
  check_segments(optimizer, kSave);
  Share share{save_optimizer(optimizer.inner()), {}, {}};
  share.options = parse_optimizer(share.archive, kSave);
  const ShardedState& state = *optimizer.module().state();
  const auto& segments = OptimizerAccess(optimizer).segments();
  std::vector<ParamValues> parts;
  for (const auto& [number, values] : share.options.state) {
    const Segment& segment = segments.at(number);
    if (segment.tensor.defined())
      parts.push_back({state.slot(segment.place).name(), segment.tensor.sizes().vec(), values});
  }
  share.others = names_of_others(parts);
  share.options.state.clear();
  return share;
}

// The sizes and names of the shares of the shard dim's ranks, exchanged before the shares are sent.
struct Shares {
  std::vector<int64_t> nbytes;
  std::set<std::string> others;
};

// Compares the arguments over all replicas: they continue together.
Shares compare_shares(const ShardMesh& mesh, const Share& own, int recipient) {
  std::string text = fmt::format("{} {}\n", recipient, own.archive.size());
  for (const std::string& name : own.others) text += name + "\n";
  const auto texts = mesh.all_gather_bytes(text, {"optimizer state", Channel::kControl});
  Shares shares;
  const int size = mesh.shard().size();
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::istringstream stream(texts[rank]);
    int given = 0;
    int64_t nbytes = 0;
    stream >> given >> nbytes;
    TORCH_CHECK_VALUE(given == recipient,
                      "[full_state_dict] `recipient` must be the same on all ranks; expected ",
                      recipient, " as on rank ", mesh.rank(), ", got ", given, " on rank ", rank);
    stream.ignore();
    for (std::string name; std::getline(stream, name);) shares.others.insert(name);
    if (static_cast<int>(rank) / size == mesh.replicate().rank()) shares.nbytes.push_back(nbytes);
  }
  return shares;
}

// Sends the archive of rank `from` to `recipient`, or to all for -1. Returns "" on ranks that have
// it already or do not need it.
std::string transfer(ProcessGroup& process_group, const std::string& own, int64_t nbytes, int from,
                     int recipient) {
  const int rank = process_group.rank();
  if (from == recipient || process_group.size() == 1) return {};
  const bool sends = rank == from;
  const bool receives = !sends && (recipient < 0 || recipient == rank);
  std::string received(receives ? nbytes : 0, '\0');
  at::Tensor bytes;
  if (sends || receives) {
    // The tensor over `own` is only read.
    void* const data = sends ? const_cast<char*>(own.data()) : received.data();
    bytes = at::from_blob(data, {nbytes}, at::kByte);
  }
  const CollectiveTag tag{"optimizer state", Channel::kControl};
  if (recipient < 0) {
    process_group.broadcast(bytes, from, tag)->wait_inputs();
  } else {
    // Empty ones of the host, and not undefined: they tell over which connection a rank without
    // messages takes part.
    const at::Tensor nothing = at::empty({0}, at::kByte);
    std::vector<at::Tensor> incoming(process_group.size(), nothing),
        outgoing(process_group.size(), nothing);
    if (receives) incoming[from] = bytes;
    if (sends) outgoing[recipient] = bytes;
    process_group.all_to_all(std::move(incoming), std::move(outgoing), tag)->wait_inputs();
  }
  return received;
}

// Joins the shares of the ranks.
class Join {
 public:
  Join(ShardedOptimizer& optimizer, std::set<std::string> others)
      : state_(*optimizer.module().state()),
        segments_(OptimizerAccess(optimizer).segments()),
        others_(std::move(others)),
        other_shapes_(other_shapes(optimizer.inner())) {}

  void add(int rank, const std::string& archive) {
    const OptimizerStateDict share = parse_optimizer(archive, kSave);
    for (const auto& [number, values] : share.state) {
      for (const auto& [name, value] : values)
        add_value(result_[number], name, value, segments_.at(number), rank);
      result_[number];  // also for a class that keeps no values
    }
  }
  std::map<int64_t, Values> take() { return std::move(result_); }

 private:
  void add_value(Values& whole, const std::string& name, const c10::IValue& value,
                 const Segment& segment, int rank) const {
    const Unit& unit = *state_.units()[segment.place.unit];
    const ParamSlot& slot = state_.slot(segment.place);
    const auto& layout = unit.layout();
    const auto [begin, end] = layout.level == ShardLevel::kNone
                                  ? std::pair(slot.offset, slot.offset + slot.numel)
                                  : overlap(slot, layout.bounds[rank], layout.bounds[rank + 1]);
    if ((end - begin == slot.numel && other_shapes_.contains(name)) ||
        !is_elementwise(name, value, part_sizes(slot, end - begin), others_)) {
      whole.emplace(name, value);
      return;
    }
    const at::Tensor part = value.toTensor();
    auto it = whole.find(name);
    if (it == whole.end()) {
      const at::Tensor empty = is_scale(name)
                                   ? at::empty(state_sizes(name, slot.sizes), part.options())
                                   : at::empty_strided(slot.sizes, slot.strides, part.options());
      it = whole.emplace(name, empty.zero_()).first;
    }
    const at::Tensor& all = it->second.toTensor();
    const int64_t first = begin - slot.offset;
    at::as_strided(all, {all.numel()}, {1})
        .narrow(0, is_scale(name) ? first / kStateBlock : first, part.numel())
        .copy_(is_scale(name) ? part : flat_part(slot, part));
  }

  const ShardedState& state_;
  const std::vector<Segment>& segments_;
  std::set<std::string> others_;
  OtherShapes other_shapes_;
  std::map<int64_t, Values> result_;
};

// Returns the values in the state for each parameter of the optimizer.
std::vector<ParamValues> values_of_params(ShardedOptimizer& optimizer,
                                          const OptimizerStateDict& state_dict,
                                          const std::vector<int64_t>& numbers) {
  std::vector<ParamValues> params;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto values = state_dict.state.find(numbers[i]);
    if (values == state_dict.state.end()) continue;
    const ParamSlot& slot =
        optimizer.module().state()->slot(OptimizerAccess(optimizer).segments()[i].place);
    params.push_back({slot.name(), slot.sizes, values->second});
  }
  return params;
}

// Returns the state, in float where its blocks of 8 bits are not those of the parameter, or are
// cut.
Values decoded_if_cut(const ParamSlot& slot, const Segment& segment, Values values) {
  const bool is_cut =
      (segment.begin - slot.offset) % kStateBlock != 0 ||
      (segment.end != slot.offset + slot.numel && (segment.end - slot.offset) % kStateBlock != 0);
  for (const std::string name : {"exp_avg", "exp_avg_sq"}) {
    const auto codes = values.find(name), scales = values.find(name + "_scale");
    if (codes == values.end() || scales == values.end()) continue;
    const KeptMoment kept{codes->second.toTensor(), scales->second.toTensor()};
    if (!is_cut && kept.values.strides() == at::IntArrayRef(slot.strides)) continue;
    codes->second = converted(kept, name == "exp_avg", at::kFloat, kept.values).values;
    values.erase(scales);
  }
  return values;
}

// Returns this rank's part of a parameter's state. Tensors of other shapes stay as they are, also
// those that have the parameter's by chance: the order of their elements in memory matters, too.
std::optional<Values> cut(torch::optim::Optimizer& optimizer, const ParamSlot& slot,
                          const Segment& segment, const Values& values,
                          const std::set<std::string>& others, const OtherShapes& other_shapes) {
  if (!segment.tensor.defined()) return {};
  const bool is_whole = segment.end - segment.begin == slot.numel;
  Values parts;
  for (const auto& [name, value] : decoded_if_cut(slot, segment, values)) {
    c10::IValue& part = parts[name] = value;
    const bool is_other = is_whole && other_shapes.contains(name);
    if (is_other ? value.isTensor() : is_elementwise(name, value, slot.sizes, others)) {
      const at::Tensor own =
          is_other ? value.toTensor() : cut_state(slot, segment, name, value.toTensor());
      // State that was made for a narrow parameter would lose what the updated values keep.
      auto& param_group = optimizer.param_groups()[segment.param_group];
      const auto dtype = state_dtype(optimizer, param_group, slot.master_dtype);
      const bool is_narrow = own.scalar_type() == slot.dtype && !is_scale(name);
      part = is_narrow && c10::isFloatingType(dtype) ? own.to(dtype) : own;
    }
    part = move_to(part, segment.tensor);
  }
  return parts;
}

std::string text_of(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined()
             ? "values of hash " + hash_of(value.toTensor())
             : c10::str(value);
}

void check_same_state(const ShardMesh& mesh, const OptimizerStateDict& state_dict) {
  std::vector<std::string> lines = {fmt::format("state of {} parameters, and {} param groups",
                                                state_dict.state.size(),
                                                state_dict.param_groups.size())};
  const auto add = [&](const OptimizerStateDict::Values& values, const std::string& owner) {
    for (const auto& [name, value] : values)
      lines.push_back(fmt::format("'{}' of {}: {}", name, owner, text_of(value)));
  };
  for (const auto& [number, values] : state_dict.state)
    add(values, fmt::format("parameter {}", number));
  for (const auto& param_group : state_dict.param_groups) add(param_group.options, "a param group");
  check_same_lines(mesh, lines, "[load_full_state_dict] every rank must give the same state");
}

// Returns this rank's part of the master weights in the state.
std::vector<at::Tensor> load_part(ShardedOptimizer& optimizer, const OptimizerStateDict& state_dict,
                                  std::optional<PreviousState>& previous) {
  torch::optim::Optimizer& inner = optimizer.inner();
  check_segments(optimizer, kLoad);
  const std::vector<int64_t> numbers = match_params(inner, state_dict, kLoad);
  const auto params = values_of_params(optimizer, state_dict, numbers);
  const OtherShapes shapes = other_shapes(inner);
  check_shapes(params, kLoad, shapes.names, shapes.any);
  std::vector<at::Tensor> masters = cut_master_weights(optimizer, state_dict, numbers);
  const std::set<std::string> others = names_of_others(params);
  previous.emplace(inner, kLoad);
  const auto convert = [&](int64_t number, const Values& values) {
    const Segment& segment = OptimizerAccess(optimizer).segments()[number];
    return cut(inner, optimizer.module().state()->slot(segment.place), segment, values, others,
               shapes);
  };
  set_state(inner, state_dict, numbers, convert, kLoad);
  return masters;
}

}  // namespace

OptimizerStateDict full_state_dict(ShardedOptimizer& optimizer, int recipient) {
  if (const OuterSteps* const outer = OptimizerAccess(optimizer).outer_steps()) {
    outer->check_averaged("full_state_dict");
    TORCH_CHECK_NOT_IMPLEMENTED(optimizer.module().state()->plan().outer->momentum == 0,
                                "[full_state_dict] would leave out the momentum of plan.outer: use "
                                "save_checkpoint(), which keeps it");
  }
  return full_inner_state(optimizer, recipient);
}

OptimizerStateDict full_inner_state(ShardedOptimizer& optimizer, int recipient) {
  at::NoGradGuard no_grad;
  const auto state = optimizer.module().state();
  ProcessGroup& process_group = state->process_group();
  Share own;
  check_on_all_ranks(state->mesh(), [&] {
    TORCH_CHECK_VALUE(
        recipient >= -1 && recipient < process_group.size(),
        "[full_state_dict] `recipient` must be a rank of the process group or -1; expected -1 to ",
        process_group.size() - 1, ", got ", recipient);
    own = read_share(optimizer);
  });
  const Shares shares = compare_shares(state->mesh(), own, recipient);
  const bool receives = recipient < 0 || recipient == process_group.rank();
  Join join(optimizer, shares.others);
  std::exception_ptr failure;  // reported to all ranks when all shares have been sent
  const auto add = [&](int rank, const std::string& archive) {
    if (!receives || failure) return;
    try {
      join.add(rank, archive);
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  };
  for (int rank = 0; rank < process_group.size(); ++rank) {
    const bool is_own = rank == process_group.rank();
    if (state->plan().level == ShardLevel::kNone) {  // each rank has the whole state
      if (is_own) add(rank, own.archive);
      continue;
    }
    const std::string other =
        transfer(process_group, own.archive, shares.nbytes[rank], rank, recipient);
    add(rank, is_own ? own.archive : other);
  }
  check_on_all_ranks(state->mesh(), [&] {
    if (failure) std::rethrow_exception(failure);
  });
  own.options.state = join.take();
  add_master_weights(optimizer, receives, own.options);
  return std::move(own.options);
}

void load_full_state_dict(ShardedOptimizer& optimizer, const OptimizerStateDict& state_dict) {
  at::NoGradGuard no_grad;
  const ShardMesh& mesh = optimizer.module().state()->mesh();
  check_same_state(mesh, state_dict);
  std::optional<PreviousState> previous;
  std::vector<at::Tensor> masters;
  check_on_all_ranks(mesh, [&] { masters = load_part(optimizer, state_dict, previous); });
  previous->drop();
  OptimizerAccess(optimizer).set_master_digits(std::move(masters));
  check_on_all_ranks(mesh, [&] { OptimizerAccess(optimizer).offload_state(); });
}

}  // namespace tessera
