#include "engine/model/sharded_state.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <span>

#include "base/memory/tensor_allocator.h"
#include "engine/grad/capture_watch.h"
#include "engine/model/join_scope.h"

namespace tessera {
namespace {

bool is_of(const ParamSlot& slot, const at::Tensor& tensor) {
  for (size_t i = 0; i < slot.handles.size(); ++i)
    if (slot.tensor(i).is_same(tensor)) return true;
  return false;
}

// The slots that may be at the place of `tensor` in the unit's buffer. None if it was given other
// data: the place is a guess, and whoever finds nothing there must look at all slots.
std::span<const ParamSlot> slots_near(const std::vector<ParamSlot>& slots,
                                      const at::Tensor& tensor) {
  const at::Tensor first = slots.empty() ? at::Tensor() : slots.front().tensor();
  if (!first.defined() || !first.has_storage() || !tensor.has_storage()) return {};
  const int64_t offset = tensor.storage_offset() - first.storage_offset() + slots.front().offset;
  return std::ranges::equal_range(slots, offset, {}, &ParamSlot::offset);
}

std::optional<ParamIndex> find_in(const Unit& unit, const at::Tensor& tensor) {
  const auto& slots = unit.layout().slots;
  for (const std::span<const ParamSlot> some : {slots_near(slots, tensor), std::span(slots)}) {
    for (const ParamSlot& slot : some)
      if (is_of(slot, tensor))
        return ParamIndex{static_cast<size_t>(unit.index()),
                          static_cast<size_t>(&slot - slots.data())};
  }
  return std::nullopt;
}

}  // namespace

ShardedState::ShardedState(std::vector<NamedTensor> buffers,
                           const std::vector<NamedTensor>& ignored, const ShardPlan& plan,
                           UnitContext context, std::vector<UnitLayout> layouts)
    : plan_(plan),
      buffers_(std::move(buffers), ignored),
      context_(std::move(context)),
      ends_(*this) {
  std::vector<Unit*> units;
  for (UnitLayout& layout : layouts) {
    const int index = static_cast<int>(units_.size());
    units_.push_back(std::make_unique<Unit>(std::move(layout), index, context_, *this));
    units.push_back(units_.back().get());
  }
  // Without reductions there is no agreement at the end of a backward.
  const bool may_ask = mesh().size() > 1 && plan_.reduce_gradients;
  residency_ = std::make_unique<Residency>(
      units, Residency::Limits{.resident_bytes = plan_.resident_bytes, .prefetch = plan_.prefetch},
      may_ask ? [this](int unit) { reducer_->ask(unit); } : Residency::Ask());
  const double ranks = plan_.average && !plan_.mesh_dim ? mesh().size() : 1;
  reducer_ = std::make_unique<Reducer>(units, mesh(),
                                       ReducerOptions{.scale = plan_.predivide / ranks,
                                                      .predivide = plan_.predivide,
                                                      .bucket_bytes = plan_.bucket_bytes,
                                                      .reduces = plan_.reduce_gradients},
                                       ends_);
}

ShardedState::~ShardedState() = default;

// `all`: the ranks that have equal start values, replicas that train by themselves included.
void ShardedState::adopt(const ShardMesh& all) {
  const bool broadcast = plan_.start_values == StartValues::kBroadcast;
  const ShardMesh training = std::exchange(context_.mesh, all);
  for (const auto& unit : units_) unit->adopt(shared_from_this(), broadcast);
  context_.mesh = training;
  if (context_.offload) context_.offload->rest();
  buffers_.convert(plan_);
  reducer_->install();
  if (plan_.sync_buffers) buffers_.broadcast(all);
  if (broadcast) buffers_.broadcast_ignored(all);
  // The whole parameters have been freed, but the heap would keep their pages.
  trim_heaps();
}

std::shared_ptr<UseListener> ShardedState::on_use(const std::vector<Unit*>& units, bool writes) {
  if (writes) check_no_join("an operator that writes to a parameter");
  note_use_in_backward();
  residency_->on_use(units, writes);
  return shared_from_this();
}

void ShardedState::on_used() noexcept { residency_->on_used(); }

void ShardedState::on_write(const std::vector<Unit*>& units) {
  const auto guard = residency_->lock();
  for (Unit* unit : units) {
    unit->write_back();
    residency_->on_written(*unit);
  }
}

void ShardedState::check_no_join(const char* what) const {
  TORCH_CHECK(
      !join_scope_, "[join] ", what,
      " can't be called under join(), where ranks that are done take part in training only");
}

void ShardedState::check_replicated(const char* what) const {
  for (const auto& unit : units_) {
    const UnitLayout& layout = unit->layout();
    TORCH_CHECK_NOT_IMPLEMENTED(
        layout.is_replicated(), "[", what, "] parameters must be the same on all ranks; '",
        layout.slots.front().name(),
        "' is each rank's own (plan.unreplicated), and would be kept of one rank only");
    for (const ParamSlot& slot : layout.slots)
      TORCH_CHECK_NOT_IMPLEMENTED(
          slot.dist || unit->mesh().size() == mesh().size(), "[", what,
          "] parameters must be the same on all ranks, or DistTensors; '", slot.name(),
          "' is an ordinary tensor of each process group (plan.groups), and would be kept of one "
          "only. Make it a DistTensor, of which each process group has a part");
  }
}

WorkPtr ShardedState::stop_reading() {
  residency_->end_evaluation();
  const bool any =
      std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->is_shared(); });
  return any ? process_group().arrive({"step", Channel::kControl}) : nullptr;
}

void ShardedState::wait_until_unread(const WorkPtr& stopped) {
  for (const auto& unit : units_) unit->wait_until_unread();
  if (stopped) stopped->wait();
}

void ShardedState::end_reading() {
  const WorkPtr stopped = stop_reading();
  for (const auto& unit : units_) unit->wait();
  wait_until_unread(stopped);
}

void ShardedState::thaw_trained() {
  for (const auto& unit : units_) {
    const UnitLayout& layout = unit->layout();
    if (layout.thawed_dtype != layout.master_dtype && is_trained(layout)) unit->thaw();
  }
}

void ShardedState::announce(JoinCall call, const std::vector<double>& values) {
  if (!join_scope_) return;
  if (call != JoinCall::kBackward) reducer_->settle_earlier();  // that did so at its begin
  std::vector<double> all = reducer_->clears();
  reducer_->forget_clears();
  all.insert(all.end(), values.begin(), values.end());
  join_scope_->announce(call, all);
}

std::vector<double> ShardedState::follow(const std::vector<double>& heard) {
  reducer_->clear_as(heard);
  return {heard.begin() + std::ssize(reducer_->clears()), heard.end()};
}

std::optional<ParamIndex> ShardedState::find(const std::string& name) const {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const auto& slots = units_[unit]->layout().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const auto& names = slots[slot].names;
      if (std::find(names.begin(), names.end(), name) != names.end()) return ParamIndex{unit, slot};
    }
  }
  return std::nullopt;
}

std::optional<ParamIndex> ShardedState::find(const at::Tensor& tensor) const {
  if (const Unit* unit = unit_of(tensor))
    return &unit->listener() == this ? find_in(*unit, tensor) : std::nullopt;
  // The tensor may have been given other data.
  for (const auto& unit : units_)
    if (const auto place = find_in(*unit, tensor)) return place;
  return std::nullopt;
}

}  // namespace tessera
