#include "engine/model/sharded_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/init/deferred_init.h>

#include <algorithm>
#include <set>

#include "base/memory/tensor_allocator.h"
#include "comm/group/progress.h"
#include "engine/grad/capture_watch.h"
#include "engine/grad/clip_grad.h"
#include "engine/model/join_scope.h"
#include "engine/model/memory_budget.h"

namespace tessera {
namespace {

std::optional<ParamIndex> find_in(const Unit& unit, const at::Tensor& tensor) {
  const auto& slots = unit.layout().slots;
  for (size_t slot = 0; slot < slots.size(); ++slot)
    for (size_t i = 0; i < slots[slot].handles.size(); ++i)
      if (slots[slot].tensor(i).is_same(tensor))
        return ParamIndex{static_cast<size_t>(unit.index()), slot};
  return std::nullopt;
}

// Returns each rank's `order`.
std::vector<UseOrder> orders_of_ranks(const ShardMesh& mesh, const UseOrder& order) {
  if (mesh.size() == 1) return {order};
  const std::string own(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(int));
  std::vector<UseOrder> orders;
  for (const auto& bytes : mesh.all_gather_bytes(own, {"order of use", Channel::kControl})) {
    orders.emplace_back(bytes.size() / sizeof(int));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(orders.back().data()));
  }
  return orders;
}

// Starts to give tensors that every rank has whole the values that rank 0 has. Returns a function
// that waits until these have arrived. Collective.
std::function<void()> take_from_first(const ShardMesh& mesh, c10::ArrayRef<NamedTensor> tensors) {
  at::NoGradGuard no_grad;
  std::vector<std::string> names;
  std::vector<at::Tensor> own, packed;
  for (const NamedTensor& item : tensors) {
    if (!item.tensor.defined()) continue;
    names.push_back(item.name);
    own.push_back(local_of(item.tensor).detach());
    packed.push_back(own.back().contiguous());
  }
  std::vector<WorkPtr> works;
  // The second dim broadcasts the values that the first one has brought.
  for (ProcessGroup* process_group : {&mesh.shard(), &mesh.replicate()}) {
    if (process_group->size() == 1) continue;
    for (const WorkPtr& work : works) work->wait();
    works.clear();
    for (size_t i = 0; i < packed.size(); ++i)
      works.push_back(process_group->broadcast(packed[i], 0, {names[i], Channel::kControl}));
  }
  return [own, packed, works] {
    at::NoGradGuard no_grad;
    for (const WorkPtr& work : works) work->wait();
    for (size_t i = 0; i < own.size(); ++i)
      if (!packed[i].is_same(own[i])) own[i].copy_(packed[i]);
  };
}

}  // namespace

ShardedState::ShardedState(std::vector<NamedTensor> buffers, const ShardPlan& plan,
                           UnitContext context, std::vector<UnitLayout> layouts)
    : plan_(plan),
      synced_(std::move(buffers)),
      buffers_(synced_),
      context_(std::move(context)),
      own_context_{.mesh = ShardMesh(single_process_group(), nullptr),
                   .offload = context_.offload,
                   .progress = context_.progress,
                   .shared_watch = context_.shared_watch} {
  std::vector<Unit*> units;
  for (UnitLayout& layout : layouts) {
    const int index = static_cast<int>(units_.size());
    UnitContext& used = layout.is_replicated ? context_ : own_context_;
    units_.push_back(std::make_unique<Unit>(std::move(layout), index, used, *this));
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
                                       *this);
}

ShardedState::~ShardedState() = default;

// `all`: the ranks that have equal start values, replicas that train by themselves included.
void ShardedState::adopt(const ShardMesh& all) {
  const bool broadcast = plan_.start_values == StartValues::kBroadcast;
  const ShardMesh training = std::exchange(context_.mesh, all);
  for (const auto& unit : units_) unit->adopt(shared_from_this(), broadcast);
  context_.mesh = training;
  if (context_.offload) context_.offload->rest();
  for (const NamedTensor& buffer : buffers_) materialize(buffer.tensor);
  convert_buffers();
  reducer_->install();
  if (plan_.sync_buffers) take_from_first(all, synced_)();
  if (broadcast) take_from_first(all, ignored_parameters())();
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
  TORCH_CHECK_NOT_IMPLEMENTED(
      plan_.unreplicated.empty(), "[", what, "] parameters must be the same on all ranks; '",
      plan_.unreplicated.empty() ? "" : plan_.unreplicated.front(),
      "' is each rank's own (plan.unreplicated), and would be kept of one rank only");
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
    if (layout.thawed_dtype == layout.master_dtype) continue;
    const bool is_trained =
        std::any_of(layout.slots.begin(), layout.slots.end(), [](const ParamSlot& slot) {
          const at::Tensor tensor = slot.tensor();
          return tensor.defined() && tensor.requires_grad();
        });
    if (is_trained) unit->thaw();
  }
}

void ShardedState::on_settle() {
  if (join_scope_) join_scope_->announce(JoinCall::kSettle);
}

void ShardedState::on_backward_end() { residency_->end_pass(); }

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

PassVote ShardedState::vote() {
  PassVote vote;
  if (residency_->wants_to_learn() || (budget_ && budget_->wants_attention()))
    vote.attention = Attention::kLearn;
  if (!replaced().empty()) vote.attention = Attention::kTakeIn;
  const int64_t uses = residency_->uses_in_evaluation();
  vote.uses_in_evaluation = static_cast<uint8_t>(std::min<int64_t>(uses, PassVote::kMostUses));
  return vote;
}

// Where ranks share memory, no rank waits for one that does not evaluate, and so that could go
// unnoticed until the program runs elsewhere.
void ShardedState::warn_of_lone_evaluation(const PassVote& most) {
  const bool took_part = vote().uses_in_evaluation >= most.uses_in_evaluation;
  if (took_part || std::exchange(warned_, true)) return;
  TORCH_WARN(
      "[tessera] another rank has used parameters outside of training (as in an evaluation) more "
      "often than rank ",
      mesh().rank(),
      ". That goes well only where all ranks share the memory of one host: over messages, or on "
      "several hosts, ranks wait for each other in every forward. Evaluate on all ranks, equally "
      "often, or on a copy of the model that has full_state(). This warning is shown once per "
      "model");
}

void ShardedState::on_pass_end(bool synced, const PassVote& most) {
  const Attention attention = most.attention;
  if (synced) warn_of_lone_evaluation(most);
  const auto guard = residency_->lock();
  const bool learn = attention != Attention::kNone;
  if (synced && attention == Attention::kTakeIn) take_in_replaced();
  if (learn) learn_order();
  if (budget_) budget_->end_pass(learn);
  // The record of several passes would be all forwards, then all backwards.
  residency_->forget_pass();
}

std::string ShardedState::fit_memory() { return budget_ ? budget_->choose() : ""; }

void ShardedState::learn_order() {
  const std::vector<UseOrder> forward = orders_of_ranks(mesh(), residency_->used().forward);
  const std::vector<UseOrder> backward = orders_of_ranks(mesh(), residency_->used().backward);
  std::vector<PassOrder> passes;
  for (size_t rank = 0; rank < forward.size(); ++rank)
    passes.push_back({forward[rank], backward[rank]});
  residency_->learn(std::move(passes));
  // Of all units, so that a unit which some rank did not complete comes last on all. A rank without
  // gradients, as one that is done, has no say.
  const int count = static_cast<int>(units_.size());
  UseOrder completed = reducer_->completed();
  if (!completed.empty()) completed = reduction_order(completed, count);
  completed = merge_orders(orders_of_ranks(mesh(), completed));
  reducer_->set_order(reduction_order(completed, count));
}

void ShardedState::convert_buffers() {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const at::Tensor& buffer = buffers_[i].tensor;
    if (!buffer.defined()) continue;
    const auto dtype = plan_.precision.buffer_dtype;
    const bool converts = dtype && buffer.is_floating_point() && i < synced_.size();  // not ignored
    const at::ScalarType new_dtype = converts ? *dtype : buffer.scalar_type();
    const at::Device device = plan_.device.value_or(buffer.device());
    if (new_dtype != buffer.scalar_type() || device != buffer.device())
      buffer.set_data(buffer.to(device, new_dtype));
  }
}

void ShardedState::start_sync_buffers() {
  finish_sync_buffers();
  arriving_ = take_from_first(mesh(), synced_);
}

void ShardedState::finish_sync_buffers() {
  if (arriving_) std::exchange(arriving_, nullptr)();
}

at::Tensor ShardedState::full_grad(const ParamIndex& place) {
  at::NoGradGuard no_grad;
  if (!plan_.reduce_gradients) return slot(place).tensor().grad();
  check_no_join("full_grad()");
  reducer_->settle();
  const UnitGradients& gradients = *reducer_->gradients()[place.unit];
  if (!gradients.is_live(place.slot)) return {};
  Unit& unit = *units_[place.unit];
  const ParamSlot& param = slot(place);
  at::Tensor full = gradients.reduced();
  if (unit.layout().level != ShardLevel::kNone) {
    full = at::empty({unit.layout().numel()}, gradients.reduced().options());
    const auto work = process_group().all_gather(full, gradients.reduced(), unit.layout().bounds,
                                                 {unit.layout().name, Channel::kControl});
    work->wait();
    work->wait_inputs();
  }
  return global_value(param, view_param(param, full)).clone();
}

at::Tensor ShardedState::local_grad(const ParamIndex& place) {
  check_no_join("local_grad()");
  at::NoGradGuard no_grad;
  reducer_->settle();
  const UnitGradients& gradients = *reducer_->gradients()[place.unit];
  const ParamSlot& param = slot(place);
  const Unit& unit = *units_[place.unit];
  const auto [begin, end] = unit.updated_range(param);
  if (begin == end || !gradients.is_live(place.slot)) return {};
  const at::Tensor part = gradients.reduced(begin, end);
  const bool is_whole =
      unit.layout().partition == Partition::kWholeParam && part.numel() == param.numel;
  return is_whole ? at::as_strided(part, param.sizes, param.strides, part.storage_offset()) : part;
}

bool ShardedState::has_grad(const ParamIndex& place) {
  reducer_->settle_earlier();
  const UnitGradients& gradients = *reducer_->gradients()[place.unit];
  return gradients.is_live(place.slot) || gradients.has_arrived(place.slot);
}

std::vector<double> ShardedState::clip_call(double max_norm, const ClipOptions& options) const {
  TORCH_CHECK_VALUE(max_norm >= 0, "[clip_grad_norm_] max_norm must not be negative; got ",
                    max_norm);
  TORCH_CHECK_VALUE(options.norm_type > 0,
                    "[clip_grad_norm_] norm_type must be positive or infinity; got ",
                    options.norm_type);
  TORCH_CHECK_VALUE(options.epsilon >= 0, "[clip_grad_norm_] epsilon must not be negative; got ",
                    options.epsilon);
  std::set<ParamIndex> excluded;
  for (const std::string& name : options.exclude) {
    const auto place = find(name);
    TORCH_CHECK_VALUE(place, "[clip_grad_norm_] options.exclude names '", name,
                      "', which the model does not have");
    excluded.insert(*place);
  }
  std::vector<double> call = {max_norm, options.norm_type, options.epsilon};
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    for (size_t slot = 0; slot < units_[unit]->layout().slots.size(); ++slot)
      call.push_back(excluded.contains({unit, slot}) ? 0 : 1);
  }
  return call;
}

double ShardedState::clip(const std::vector<double>& call) {
  const PhaseScope phase(context_.progress, Phase::kStep);
  const double max_norm = call[0], norm_type = call[1], epsilon = call[2];
  std::vector<size_t> begins = {3};  // of the units, in `call`
  for (const auto& unit : units_) begins.push_back(begins.back() + unit->layout().slots.size());
  const auto is_counted = [&](size_t unit, size_t slot) { return call[begins[unit] + slot] != 0; };
  reducer_->settle();
  reducer_->record([&] {
    return fmt::format("clipping to norm {} of order {}, epsilon {}, {} parameters", max_norm,
                       norm_type, epsilon, std::count(call.begin() + 3, call.end(), 1.0));
  });
  const double norm = grad_norm(reducer_->gradients(), mesh(), norm_type, is_counted);
  const double factor = max_norm / (norm + epsilon);
  if (!(factor >= 1)) scale_gradients(reducer_->gradients(), factor, is_counted);
  return norm;
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
