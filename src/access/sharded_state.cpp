#include "access/sharded_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <tessera/deferred_init.h>
#include <tessera/page_heap.h>
#include <tessera/world.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "access/dist_parameters.h"
#include "access/join_scope.h"
#include "access/live_memory.h"
#include "access/memory_budget.h"
#include "init/recorder.h"
#include "memory/trim.h"
#include "unit/agreement.h"

namespace tessera {
namespace {

// Bytes of each unit's master copy on this rank, if all units have one.
std::vector<int64_t> master_nbytes(const std::vector<UnitLayout>& layouts, int rank) {
  std::vector<int64_t> nbytes;
  for (const UnitLayout& layout : layouts) {
    const bool is_whole = layout.level == ShardLevel::kNone;
    const int64_t numel = is_whole ? layout.numel() : layout.shard_numel(rank);
    nbytes.push_back(numel * static_cast<int64_t>(c10::elementSize(layout.master_dtype)));
  }
  return nbytes;
}

void check_floating(const char* name, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_VALUE(!dtype || c10::isFloatingType(*dtype), "[fully_shard] plan.precision.", name,
                    " must be a floating dtype; got ", *dtype);
}

void check_precision(const Precision& precision) {
  check_floating("param_dtype", precision.param_dtype);
  check_floating("master_dtype", precision.master_dtype);
  check_floating("reduce_dtype", precision.reduce_dtype);
  check_floating("gather_dtype", precision.gather_dtype);
  check_floating("buffer_dtype", precision.buffer_dtype);
}

// Messages should be long. In shared memory there are none, and a short unit is summed while its
// gradients are in the caches.
constexpr int64_t kMessageUnitBytes = int64_t{10} << 20;
constexpr int64_t kSharedUnitBytes = int64_t{1} << 20;

ShardPlan with_defaults(ShardPlan plan, const ShardMesh& mesh) {
  const bool is_shared = mesh.shard().sends_to().empty();
  if (!plan.unit_bytes) plan.unit_bytes = is_shared ? kSharedUnitBytes : kMessageUnitBytes;
  return plan;
}

void check_plan(const ShardPlan& plan) {
  TORCH_CHECK_VALUE(plan.unit_bytes.value_or(0) >= 0,
                    "[fully_shard] plan.unit_bytes must not be negative; got ", *plan.unit_bytes);
  TORCH_CHECK_VALUE(plan.whole_numel >= 0, "[fully_shard] plan.whole_numel must not be negative; got ",
                    plan.whole_numel);
  TORCH_CHECK_VALUE(plan.resident_bytes >= -1,
                    "[fully_shard] plan.resident_bytes must be -1 (no limit) or more; got ",
                    plan.resident_bytes);
  TORCH_CHECK_VALUE(plan.prefetch >= 0, "[fully_shard] plan.prefetch must not be negative; got ",
                    plan.prefetch);
  TORCH_CHECK_VALUE(plan.memory_budget.value_or(1) > 0,
                    "[fully_shard] plan.memory_budget must be positive; got ", *plan.memory_budget);
  TORCH_CHECK_VALUE(!plan.memory_budget || plan.resident_bytes == 0,
                    "[fully_shard] plan.memory_budget chooses plan.resident_bytes, which must be 0 then; got ",
                    plan.resident_bytes);
  check_precision(plan.precision);
  TORCH_CHECK_VALUE(plan.owners.empty() || plan.partition == Partition::kWholeParam,
                    "[fully_shard] plan.owners needs Partition::kWholeParam; otherwise parameters are cut over all ranks");
  if (plan.reduce_gradients) return;
  TORCH_CHECK_VALUE(plan.level < ShardLevel::kGradients,
                    "[fully_shard] plan.reduce_gradients can be false for levels below kGradients only");
  const Precision& precision = plan.precision;
  TORCH_CHECK_VALUE(!precision.param_dtype && !precision.master_dtype && !precision.reduce_dtype,
                    "[fully_shard] without plan.reduce_gradients the dtypes of parameters, masters and "
                    "reductions can't be chosen: gradients stay as autograd makes them");
}

// Moves the parameters that the plan ignores, under any of their names, out of `parameters`.
std::vector<NamedTensor> take_ignored(std::vector<NamedTensor>& parameters, const ShardPlan& plan) {
  std::set<std::string> names(plan.ignored.begin(), plan.ignored.end());
  std::set<const c10::TensorImpl*> impls;
  for (const NamedTensor& parameter : parameters) {
    if (names.erase(parameter.name) > 0) impls.insert(parameter.tensor.unsafeGetTensorImpl());
  }
  TORCH_CHECK_VALUE(names.empty(), "[fully_shard] plan.ignored names '", names.empty() ? "" : *names.begin(),
                    "', which the model does not have");
  const auto ignored = std::stable_partition(
      parameters.begin(), parameters.end(), [&](const NamedTensor& parameter) {
        return !impls.contains(parameter.tensor.unsafeGetTensorImpl());
      });
  std::vector<NamedTensor> taken(ignored, parameters.end());
  parameters.erase(ignored, parameters.end());
  return taken;
}

std::string to_bytes(const UseOrder& order) {
  return {reinterpret_cast<const char*>(order.data()), order.size() * sizeof(int)};
}

UseOrder to_order(const std::string& bytes) {
  UseOrder order(bytes.size() / sizeof(int));
  if (!order.empty()) std::memcpy(order.data(), bytes.data(), bytes.size());
  return order;
}

UseOrder merge_over_ranks(const ShardMesh& mesh, const UseOrder& order) {
  std::vector<UseOrder> orders;
  for (const std::string& bytes :
       mesh.all_gather_bytes(to_bytes(order), {"order of use", Channel::kControl})) {
    orders.push_back(to_order(bytes));
  }
  return merge_orders(orders);
}

// Units by their last use in backward; those that it does not use come last, in reverse
// registration.
std::vector<int> reduction_order(const UseOrder& backward, int units) {
  std::vector<int> order(units);
  for (int unit = 0; unit < units; ++unit) order[unit] = units - 1 - unit;
  auto last_use = [&](int unit) {
    const auto it = std::find(backward.rbegin(), backward.rend(), unit);
    return it == backward.rend() ? backward.size() : backward.rend() - it;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return last_use(a) < last_use(b); });
  return order;
}

}  // namespace

std::shared_ptr<ShardedState> ShardedState::create(std::vector<NamedTensor> parameters,
                                                   std::vector<NamedTensor> buffers,
                                                   const ShardPlan& wanted) {
  use_page_heap();
  const ShardMesh mesh = shard_mesh_of(parameters, wanted);
  mesh.check();
  const ShardPlan plan = with_defaults(wanted, mesh);
  std::vector<ParamSlot> params;
  std::vector<UnitLayout> layouts;
  std::shared_ptr<StateMemory> offload;
  std::vector<NamedTensor> ignored;
  check_on_all_ranks(mesh, [&] {
    check_plan(plan);
    ignored = take_ignored(parameters, plan);
    TORCH_CHECK(!in_deferred_init(), "[fully_shard] must be called after the DeferredInit scope, "
                "not in it: build the model in the scope, shard it outside");
    params = collect_parameters(parameters);
    if (plan.mesh_dim) sum_gradients_along(params, *plan.mesh_dim);
    layouts = lay_out(params, plan, mesh.shard().size());
    offload = make_state_memory(plan);
    if (offload) offload->reserve(master_nbytes(layouts, mesh.shard().rank()));
    TORCH_CHECK(!plan.memory_budget || live_memory(layouts.front().device),
                "[fully_shard] plan.memory_budget needs an allocator that counts tensors; the process "
                "has set one of its own");
  });
  check_same_model(mesh, params, plan);
  std::shared_ptr<ShardedState> state(new ShardedState(
      std::move(buffers), plan, {.mesh = mesh, .offload = offload}, std::move(layouts)));
  for (const NamedTensor& param : parameters) state->parameter_names_.push_back(param.name);
  state->buffers_.insert(state->buffers_.end(), ignored.begin(), ignored.end());
  state->adopt();
  if (plan.memory_budget)
    state->budget_ = std::make_unique<MemoryBudget>(*state, *plan.memory_budget);
  return state;
}

ShardedState::ShardedState(std::vector<NamedTensor> buffers, const ShardPlan& plan,
                           UnitContext context, std::vector<UnitLayout> layouts)
    : plan_(plan), synced_(std::move(buffers)), buffers_(synced_), context_(std::move(context)) {
  std::vector<Unit*> units;
  for (UnitLayout& layout : layouts) {
    const int index = static_cast<int>(units_.size());
    units_.push_back(std::make_unique<Unit>(std::move(layout), index, context_, *this));
    units.push_back(units_.back().get());
  }
  residency_ = std::make_unique<Residency>(units, plan_.resident_bytes, plan_.prefetch);
  const double scale = plan_.average && !plan_.mesh_dim ? 1.0 / mesh().size() : 1.0;
  reducer_ = std::make_unique<Reducer>(
      units, mesh(), scale, plan_.reduce_gradients,
      Reducer::Callbacks{
          .backward_ends = [this] { residency_->end_pass(); },
          .settles =
              [this] {
                if (join_scope_) join_scope_->announce(JoinCall::kSettle);
              },
          .reductions_end =
              [this](bool has_earlier) {
                if (join_scope_)
                  join_scope_->announce(JoinCall::kBackward, {has_earlier ? 1. : 0.});
              },
          .wants_attention =
              [this] {
                return residency_->wants_to_learn() || (budget_ && budget_->wants_attention());
              },
          .backward_ended = [this](bool synced, bool learn) { on_backward_end(synced, learn); }});
}

ShardedState::~ShardedState() = default;

void ShardedState::adopt() {
  const bool broadcast = plan_.start_values == StartValues::kBroadcast;
  for (const auto& unit : units_) unit->adopt(shared_from_this(), broadcast);
  if (context_.offload) context_.offload->rest();
  for (const NamedTensor& buffer : buffers_) materialize(buffer.tensor);
  convert_buffers();
  reducer_->install();
  if (plan_.sync_buffers) TakenFromFirst(mesh(), synced_).finish();
  if (broadcast) {
    // What is ignored comes after the model's buffers.
    const auto ignored = buffers_.begin() + static_cast<ptrdiff_t>(synced_.size());
    TakenFromFirst(mesh(), {ignored, buffers_.end()}).finish();
  }
  // The whole parameters are gone; where they lay, the heap would keep the pages.
  trim_heaps();
}

void ShardedState::give_back() {
  reducer_->uninstall();
  const auto keep_alive = shared_from_this();
  wait_until_unread(stop_reading());
  for (const auto& unit : units_) unit->give_back();
  // The memory may go when no peer reads it any more.
  wait_until_unread(stop_reading());
}

void ShardedState::on_use(const std::vector<Unit*>& units) { residency_->on_use(units); }

void ShardedState::on_write(const std::vector<Unit*>& units) {
  for (Unit* unit : units) unit->write_back();
}

void ShardedState::check_no_join(const char* what) const {
  TORCH_CHECK(!join_scope_, "[join] ", what, " can't be called under join(), where ranks that are done take part in "
              "training only");
}

WorkPtr ShardedState::stop_reading() {
  const bool any =
      std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->is_shared(); });
  return any ? process_group().arrive({"step", Channel::kControl}) : nullptr;
}

void ShardedState::wait_until_unread(const WorkPtr& stopped) {
  for (const auto& unit : units_) unit->wait_until_unread();
  if (stopped) stopped->wait();
}

void ShardedState::on_backward_end(bool synced, bool learn) {
  if (synced && learn) learn_order();
  if (budget_) budget_->end_pass(synced && learn);
  // Only a pass that ends in a reduction is learned from: of several, the record would be all
  // forwards, then all backwards.
  residency_->forget_pass();
}

std::string ShardedState::fit_memory() { return budget_ ? budget_->choose() : ""; }

void ShardedState::learn_order() {
  PassOrder pass = residency_->used();
  if (mesh().size() > 1) {
    pass.forward = merge_over_ranks(mesh(), pass.forward);
    // Merged from its end, so that of two branches backward meets first the one that forward meets
    // last.
    std::reverse(pass.backward.begin(), pass.backward.end());
    pass.backward = merge_over_ranks(mesh(), pass.backward);
    std::reverse(pass.backward.begin(), pass.backward.end());
  }
  residency_->learn(pass);
  reducer_->set_order(reduction_order(pass.backward, static_cast<int>(units_.size())));
}

void ShardedState::convert_buffers() {
  if (!plan_.precision.buffer_dtype) return;
  at::NoGradGuard no_grad;
  for (const NamedTensor& buffer : synced_) {
    if (buffer.tensor.defined() && buffer.tensor.is_floating_point())
      buffer.tensor.set_data(buffer.tensor.to(*plan_.precision.buffer_dtype));
  }
}

void ShardedState::start_sync_buffers() {
  finish_sync_buffers();
  arriving_.emplace(mesh(), synced_);
}

void ShardedState::finish_sync_buffers() {
  if (arriving_) std::exchange(arriving_, std::nullopt)->finish();
}

at::Tensor ShardedState::full_grad(const ParamPlace& place) {
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

std::optional<ParamPlace> ShardedState::find(const std::string& name) const {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const auto& slots = units_[unit]->layout().slots;
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const auto& names = slots[slot].names;
      if (std::find(names.begin(), names.end(), name) != names.end()) return ParamPlace{unit, slot};
    }
  }
  return std::nullopt;
}

std::optional<ParamPlace> ShardedState::find(const at::Tensor& tensor) const {
  const Unit* unit = unit_of(tensor);
  if (!unit || &unit->listener() != this) return std::nullopt;
  const auto& slots = unit->layout().slots;
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    for (size_t i = 0; i < slots[slot].handles.size(); ++i) {
      if (slots[slot].tensor(i).is_same(tensor)) {
        return ParamPlace{static_cast<size_t>(unit->index()), slot};
      }
    }
  }
  return std::nullopt;
}

}  // namespace tessera
