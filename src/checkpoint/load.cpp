#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <tessera/checkpoint.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "checkpoint/chunk_reader.h"
#include "checkpoint/fail_together.h"
#include "checkpoint/fit.h"
#include "checkpoint/optimizer_options.h"
#include "optim/param_state.h"
#include "optim/sharded_optimizer_access.h"

namespace tessera {
namespace {

constexpr CollectiveTag kTag{"checkpoint", Channel::kControl};

// A range of a stored tensor, and the memory that it goes to.
struct Target {
  const TensorRecord* source;
  std::vector<int64_t> strides;  // whose order of memory the elements are counted in
  int64_t begin, end;
  at::Tensor out;
};

struct StateTarget {
  at::Tensor param;  // the optimizer's
  ParamState state;  // empty if the checkpoint has none
};

// Plans a load, which can fail, before it changes anything.
class Loader {
 public:
  Loader(const std::filesystem::path& path, ShardedState& state, ShardedOptimizer* optimizer)
      : reader_(path), table_(reader_.index()), state_(state), optimizer_(optimizer) {
    for (const auto& unit : state.units()) unit->check_views();
    TORCH_CHECK_VALUE(
        !optimizer || optimizer->module().state().get() == &state,
        "[load_checkpoint] the optimizer must be that of the module; it was made for another one");
    check_fit(reader_.index(), table_, state, optimizer, path.string());
    plan_params();
    plan_buffers();
    if (optimizer) plan_optimizer();
    for (const Target& target : targets_) {
      const bool reordered = target.strides != target.source->strides;
      reader_.check(*target.source, reordered ? 0 : target.begin,
                    reordered ? target.source->numel() : target.end);
    }
  }

  const CheckpointIndex& index() const { return reader_.index(); }

  void load() {
    for (const Target& target : targets_) {
      reader_.read(*target.source, target.strides, target.begin, target.end, target.out);
    }
    if (optimizer_) set_optimizer();
  }

 private:
  void plan_params() {
    for (const auto& unit : state_.units()) {
      for (const ParamSlot& slot : unit->layout().slots) {
        const int64_t begin = std::max(slot.offset, unit->updated_begin());
        const int64_t end = std::min(slot.offset + slot.numel, unit->updated_end());
        if (begin >= end) continue;
        targets_.push_back({table_.find("param", slot.name()), slot.strides, begin - slot.offset,
                            end - slot.offset,
                            unit->updated().narrow(0, begin - unit->updated_begin(), end - begin)});
      }
    }
  }

  void plan_buffers() {
    for (const NamedTensor& buffer : state_.buffers()) {
      if (!buffer.tensor.defined() || buffer.tensor.numel() == 0) continue;
      const TensorRecord* source = table_.find("buffer", buffer.name);
      targets_.push_back({source, source->strides, 0, source->numel(), buffer.tensor});
    }
  }

  void plan_optimizer() {
    for (const Segment& segment : segments_of(*optimizer_)) {
      if (!segment.tensor.defined()) continue;
      const ParamSlot& slot = state_.slot(segment.place);
      const TensorRecord& param = *table_.find("param", slot.name());
      ParamState state{.tensors = {}, .counts = table_.counts_of(param)};
      for (const TensorRecord* source : table_.states_of(param)) {
        at::Tensor value = memory_for(segment, source->state, scalar_type_of(source->dtype));
        targets_.push_back({source, slot.strides, segment.begin - slot.offset,
                            segment.end - slot.offset,
                            at::as_strided(value, {value.numel()}, {1}, value.storage_offset())});
        state.tensors[source->state] = std::move(value);
      }
      states_.push_back({segment.tensor, std::move(state)});
    }
  }

  // The tensor that the optimizer has for this state, so that none is there twice, or a new one.
  at::Tensor memory_for(const Segment& segment, const std::string& state,
                        at::ScalarType dtype) const {
    const ParamState present = read_param_state(optimizer_->inner(), segment.tensor);
    const auto it = present.tensors.find(state);
    if (it != present.tensors.end() && it->second.sizes() == segment.tensor.sizes() &&
        it->second.strides() == segment.tensor.strides() && it->second.scalar_type() == dtype) {
      return it->second;
    }
    return at::empty_strided(segment.tensor.sizes(), segment.tensor.strides(),
                             segment.tensor.options().dtype(dtype).requires_grad(false));
  }

  void set_optimizer() {
    torch::optim::Optimizer& optimizer = optimizer_->inner();
    for (const StateTarget& target : states_) {
      if (target.state.tensors.empty() && target.state.counts.empty()) {
        optimizer.state().erase(target.param.unsafeGetTensorImpl());
      } else {
        write_param_state(optimizer, target.param, target.state);
      }
    }
    const OptimizerRecord& record = *index().optimizer;
    for (size_t group = 0; group < record.param_groups.size(); ++group) {
      write_options(record.kind, optimizer.param_groups()[group],
                    record.param_groups[group].options);
    }
  }

  ChunkReader reader_;
  TensorTable table_;
  ShardedState& state_;
  ShardedOptimizer* optimizer_;
  std::vector<Target> targets_;
  std::vector<StateTarget> states_;
};

void check_same_checkpoint(const ShardMesh& mesh, const std::string& id) {
  for (const std::string& other : mesh.all_gather_bytes(id, kTag)) {
    TORCH_CHECK_VALUE(
        other == id, "[load_checkpoint] all ranks must read the same checkpoint; got those of ids ",
        id, " and ", other, " (was it replaced, or is the path another one on some machine?)");
  }
}

}  // namespace

std::map<std::string, double> load_checkpoint(const std::filesystem::path& path,
                                              ShardedModule& module, ShardedOptimizer* optimizer) {
  at::NoGradGuard no_grad;
  ShardedState& state = *module.state();
  std::optional<Loader> loader;
  fail_together(state.mesh(), [&] { loader.emplace(path, state, optimizer); });
  check_same_checkpoint(state.mesh(), loader->index().id);
  for (const auto& unit : state.units()) {
    unit->wait();
    unit->wait_until_unread();
  }
  fail_together(state.mesh(), [&] { loader->load(); });
  state.residency().on_step(std::vector<bool>(state.units().size(), true));
  return loader->index().numbers;
}

}  // namespace tessera
