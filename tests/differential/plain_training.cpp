#include "differential/plain_training.h"

#include <tessera/base/generator.h>

#include <cmath>

namespace tessera::differential {

using torch::Tensor;

PlainTraining::PlainTraining(const Program& program, std::span<const Trace> traces, int first)
    : program_(program), traces_(traces), first_(first), seen_(traces.size(), 0) {
  for (int rank = 0; rank < ranks(); ++rank) {
    replicas_.push_back(make_model(program, program.seed));
    replicas_.back()->rank = first + rank;
    names_.clear();
    params_.emplace_back();
    for (const NamedTensor& item : replicas_.back()->distinct()) {
      names_.push_back(item.name);
      params_.back().push_back(item.tensor);
    }
    if (rank == 0) {
      for (const Tensor& param : params_[0]) {
        made_.push_back(param.scalar_type());
        is_trained_.push_back(param.requires_grad() && !program.is_ignored(is_trained_.size()));
      }
      for (size_t i = 0; i < made_.size(); ++i)
        main_.push_back(params_[0][i].detach().to(main_dtype(i), false, /*copy=*/true));
    }
    for (Tensor& param : params_.back())
      param.set_data(param.detach().to(used_dtype(param.scalar_type())));
    for (Tensor& buffer : replicas_.back()->buffers()) {
      if (buffer.is_floating_point() && program.plan.precision.buffer_dtype)
        buffer.set_data(buffer.to(*program.plan.precision.buffer_dtype));
    }
    manual_seed(random_seed_of(program, first + rank));
    random_.push_back(default_generator().get_state());
  }
  waiting_.assign(ranks(), std::vector<Tensor>(main_.size()));
  losses_.resize(ranks());
  if (const auto dtype = narrow_sums(program)) narrow_.emplace(*dtype, ranks());
  if (program.scale > 0) scaler_.emplace(program.scale, program.optimizers.size());
  check_accepted();
  for (size_t i = 0; i < program.optimizers.size(); ++i) {
    optimizers_.push_back(make_optimizer(program.optimizers[i], parameters_of_optimizer(i)));
    schedules_.push_back(make_schedule(program.optimizers[i], *optimizers_.back()));
  }
  for (size_t i = 0; i < main_.size(); ++i) publish(i);
}

std::vector<Tensor> PlainTraining::parameters_of_optimizer(size_t index) const {
  std::vector<Tensor> own;
  for (const size_t number : parameters_of(program_, index, main_.size()))
    own.push_back(main_[number]);
  return own;
}

// Those of frozen parameters are asked for when they are trained.
bool PlainTraining::can_sum(size_t param) const {
  const auto is_narrow = [](at::ScalarType dtype) {
    return dtype == at::kBFloat16 || dtype == at::kHalf;
  };
  const auto sent = program_.plan.precision.reduce_dtype;
  const at::ScalarType main = main_dtype(param);
  const at::ScalarType from = narrow_ ? main : sent.value_or(used_dtype(made_[param]));
  return from == main || (is_narrow(from) && main == at::kFloat) ||
         (from == at::kFloat && is_narrow(main));
}

// See docs/guide/errors.md.
void PlainTraining::check_accepted() const {
  const ShardPlan& plan = program_.plan;
  const auto sent = plan.precision.reduce_dtype;
  if ((narrow_ || narrow_gathers(program_)) && program_.simulated)
    throw Refused("[fully_shard]");  // one of several
  if (narrow_ && program_.shard_size > 0 && !plan.outer)
    throw Refused("can't go with replicate_group");
  if (narrow_ && plan.precision.error_feedback && plan.bucket_bytes > 0)
    throw Refused("can't go with bucket_bytes");
  for (const CutRule& rule : plan.cuts) {
    bool fits = false;
    for (size_t i = 0; i < main_.size(); ++i)
      fits |= !program_.is_ignored(i) && params_[0][i].dim() >= rule.min_dim;
    if (!fits) throw Refused("fits no parameter");
  }
  std::vector<bool> is_whole;
  for (size_t i = 0; i < main_.size(); ++i) {
    const Tensor& param = params_[0][i];
    const auto rule = std::ranges::find_if(
        plan.cuts, [&](const CutRule& cut) { return cut.min_dim <= param.dim(); });
    const bool has_rule = rule != plan.cuts.end();
    is_whole.push_back(has_rule ? rule->cut == Cut::kWhole
                                : plan.partition == Partition::kWholeParam);
    if (has_rule && rule->cut == Cut::kRows && !param.is_contiguous() && !program_.is_ignored(i))
      throw Refused("don't lie one after another in memory");
  }
  const auto has_blocks = [](at::ScalarType dtype) {
    return dtype == at::kFloat || dtype == at::kBFloat16;
  };
  bool gathers = true;  // in the dtype of the plan
  for (size_t i = 0; i < main_.size(); ++i)
    if (narrow_gathers(program_) && is_trained_[i]) gathers &= has_blocks(used_dtype(made_[i]));
  for (size_t i = 0; i < main_.size(); ++i) {
    if (narrow_ && !program_.is_ignored(i) &&
        !(has_blocks(used_dtype(made_[i])) && has_blocks(main_dtype(i))))
      throw Refused("is for elements of float and bfloat16");
    if (program_.is_ignored(i) || (!params_[0][i].requires_grad() && !sent)) continue;
    if (!can_sum(i))
      throw Refused(gathers ? "can't sum tensors of dtype" : "[fully_shard]");  // one of two
  }
  if (!gathers) throw Refused("is for elements of float and bfloat16");
  for (size_t index = 0; index < program_.optimizers.size(); ++index) {
    const Optimizer& optimizer = program_.optimizers[index];
    if (optimizer.kind == "LBFGS") throw Refused("must be elementwise; got LBFGS");
    const bool is_elementwise =
        (optimizer.kind != "Lion" && !optimizer.is_own_whole()) || optimizer.declared;
    for (const size_t i : parameters_of(program_, index, main_.size())) {
      if (!is_elementwise && !is_whole[i]) throw Refused("declare that: elementwise = true");
      if (optimizer.state != at::kFloat && main_dtype(i) == at::kDouble)
        throw Refused("is not for '");
    }
  }
}

// Frozen parameters get masters of the plan's dtype when they are trained.
at::ScalarType PlainTraining::main_dtype(size_t param) const {
  const auto wider = [](at::ScalarType a, at::ScalarType b) {
    return c10::elementSize(b) > c10::elementSize(a) ? b : a;
  };
  const at::ScalarType own = wider(made_[param], used_dtype(made_[param]));
  const auto master = program_.plan.precision.master_dtype;
  const bool has_master = params_[0][param].requires_grad() && !program_.is_ignored(param);
  if (program_.plan.precision.round_frozen && !params_[0][param].requires_grad() &&
      !program_.is_ignored(param))
    return used_dtype(made_[param]);
  return master && has_master ? wider(own, *master) : own;
}

// The loss of a rank's batch.
Tensor PlainTraining::run(int rank, const Op& op) {
  auto [x, y] = batch_of(program_, op.value, first_ + rank);
  const auto& precision = program_.plan.precision;
  if (op.how & kByHandle && precision.param_dtype && precision.cast_inputs)
    x = x.to(*precision.param_dtype);
  return loss_of(replicas_[rank]->forward(x), y, op);
}

// Does not move the versions of buffers: no backward reads a running statistic.
void PlainTraining::sync_buffers() {
  if (!program_.plan.sync_buffers) return;
  const auto first = replicas_[0]->buffers();
  for (const auto& replica : replicas_)
    for (size_t i = 0; i < first.size(); ++i) write(replica->buffers()[i].data(), first[i]);
}

void PlainTraining::forward(const Op& op) {
  if (op.how & kByHandle && !(op.how & kNoSync)) sync_buffers();
  for_each_rank([&](int rank) {
    losses_[rank] = run(rank, op);
    compare(rank, "loss", losses_[rank]);
  });
}

// Moves a gradient of a rank's replica to those that wait to be sent, in the dtype of messages.
void PlainTraining::wait_to_send(int rank, size_t param) {
  Tensor& grad = params_[rank][param].mutable_grad();
  if (program_.is_ignored(param)) grad.reset();
  if (!grad.defined()) return;
  const ShardPlan& plan = program_.plan;
  const auto sent =
      narrow_ ? grad.scalar_type() : plan.precision.reduce_dtype.value_or(grad.scalar_type());
  const bool widens = c10::elementSize(sent) > c10::elementSize(grad.scalar_type());
  if (plan.predivide != 1) grad = (widens ? grad.to(sent) : grad).div(plan.predivide);
  Tensor& waiting = waiting_[rank][param];
  if (!waiting.defined()) waiting = torch::zeros_like(grad, at::dtype(sent));
  waiting.add_(grad);
  grad.reset();
}

void PlainTraining::backward(const Op& op) {
  for_each_rank([&](int rank) {
    const Tensor loss = std::exchange(losses_[rank], {});
    (scaler_ ? scaler_->scaled(loss) : loss).backward();
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < main_.size(); ++i) wait_to_send(rank, i);
  });
  if ((op.how & 1) == 0) reduce();
}

// The sum of some ranks' gradients.
Tensor PlainTraining::sum(size_t param, int first, int count, bool is_live) const {
  Tensor total;
  at::ScalarType sent = params_[0][param].scalar_type();
  for (int rank = first; rank < first + count; ++rank) {
    const Tensor& own = waiting_[rank][param];
    const Tensor term = own.defined() ? own : torch::zeros_like(params_[0][param]);
    if (own.defined()) sent = own.scalar_type();
    const auto dtype = at::promoteTypes(term.scalar_type(), at::kFloat);
    total = total.defined() ? total.add(term.to(dtype)) : term.to(dtype);
  }
  // Messages of devices have sums in their own dtype.
  if (program_.simulated) total = total.to(sent).to(total.scalar_type());
  const ShardPlan& plan = program_.plan;
  const double factor = plan.predivide / (plan.average ? ranks() : 1);
  if (factor != 1) total = total.mul(factor);
  if (is_live) total = main_[param].grad().to(total.scalar_type()).add(total);
  return total.to(main_[param].scalar_type());
}

void PlainTraining::sum_ranks(size_t param) {
  Tensor& grad = main_[param].mutable_grad();
  const int group = program_.plan.outer ? ranks() : program_.shard_size;
  const bool is_live = grad.defined();
  if (group == 0 || group == ranks()) {
    grad = sum(param, 0, ranks(), is_live);
    return;
  }
  const auto wide = at::promoteTypes(main_[param].scalar_type(), at::kFloat);
  Tensor total;
  for (int first = 0; first < ranks(); first += group) {
    const Tensor part = sum(param, first, group, false).to(wide);
    total = total.defined() ? total.add(part) : part;
  }
  total = total.to(main_[param].scalar_type());
  grad = is_live ? grad.add(total) : total;
}

void PlainTraining::reduce() {
  torch::NoGradGuard no_grad;
  std::vector<size_t> used;
  for (size_t i = 0; i < main_.size(); ++i) {
    if (std::any_of(waiting_.begin(), waiting_.end(), [&](auto& own) { return own[i].defined(); }))
      used.push_back(i);
  }
  for (const size_t i : used) {
    if (!can_sum(i)) throw Refused("can't sum tensors of dtype");
    sum_ranks(i);
  }
  if (!used.empty()) is_zeroed_ = false;
  if (narrow_) take_narrow_sums(used);
  for (auto& own : waiting_)
    for (Tensor& grad : own) grad.reset();
}

// The largest magnitude; infinite if a value is infinite or NaN, as of a block with one of these
// nothing is left.
double PlainTraining::largest(const Tensor& values) {
  if (!values.defined() || values.numel() == 0) return 0;
  return values.detach().abs().nan_to_num(INFINITY, INFINITY).max().item<double>();
}

// What the ranks have is taken over.
void PlainTraining::take_narrow_sums(const std::vector<size_t>& params) {
  const ShardPlan& plan = program_.plan;
  double off = 0, most_sum = 0;
  at::ScalarType sent = at::kFloat, kept = at::kFloat;  // the coarsest
  for (const size_t i : params) {
    if (used_dtype(made_[i]) == at::kBFloat16) sent = at::kBFloat16;
    if (main_dtype(i) == at::kBFloat16) kept = at::kBFloat16;
  }
  for (int rank = 0; rank < ranks(); ++rank) {
    double most = 0;
    for (const Tensor& grad : waiting_[rank]) most = std::max(most, largest(grad));
    off += narrow_->add(rank, most, sent);
  }
  off *= plan.predivide / (plan.average ? ranks() : 1);
  for (const size_t i : params) most_sum = std::max(most_sum, largest(main_[i].grad()) + off);
  if (plan.level == ShardLevel::kNone) off += narrow_->add(ranks(), most_sum, kept);
  off += 4 * ranks() * 0x1p-24 * most_sum;                  // of sums of rounded numbers, in float
  if (kept == at::kBFloat16) off += 2 * 0x1p-8 * most_sum;  // both runs round them
  for (size_t i = 0; i < main_.size(); ++i) {
    if (!main_[i].grad().defined()) continue;
    const Tensor got =
        compare_all("gradient", main_[i].grad(), torch::full_like(main_[i], off, torch::kDouble));
    main_[i].mutable_grad() = got.clone();
  }
}

void PlainTraining::zero_grad(const Op& op) {
  if (op.how == 2) is_zeroed_ = true;
  std::vector<size_t> numbers;
  if (op.how == 0 || op.how == 4) {
    numbers = parameters_of(program_, op.value, main_.size());
  } else {
    for (size_t i = 0; i < main_.size(); ++i) numbers.push_back(i);
  }
  for (const size_t i : numbers) clear(i, op.how == 2);
}

void PlainTraining::clear(size_t param, bool to_zeros) {
  Tensor& grad = main_[param].mutable_grad();
  if (to_zeros && grad.defined()) {
    grad = torch::zeros_like(grad);
  } else {
    grad.reset();
  }
  for (auto& own : waiting_) {
    if (to_zeros && own[param].defined()) {
      own[param].zero_();
    } else {
      own[param].reset();
    }
  }
}

void PlainTraining::clamp_grad(const Op& op) {
  torch::NoGradGuard no_grad;
  const size_t param = op.value % main_.size();
  if (op.how >= 2) return clear(param, op.how == 2);
  Tensor& grad = main_[param].mutable_grad();
  if (grad.defined()) grad.clamp_(-0.125, 0.125);
}

void PlainTraining::clip(const Op& op) {
  torch::NoGradGuard no_grad;
  if (scaler_) scaler_->unscale(op.value, parameters_of_optimizer(op.value), has_gradient());
  const double type = norm_type_of(op);
  double total = 0;
  int64_t most = 1, all = 0;
  for (const Tensor& param : main_) {
    if (!param.grad().defined() || param.numel() == 0) continue;
    most = std::max(most, param.numel());
    all += param.numel();
    const Tensor size = param.grad().to(torch::kDouble).abs();
    if (std::isinf(type)) {
      const double own = size.max().item<double>();
      total = std::isnan(own) || std::isnan(total) ? NAN : std::max(total, own);
    } else {
      total += size.pow(type).sum().item<double>();
    }
  }
  const double bound = norm_bound(total, type, most, all);
  if (!std::isinf(type)) total = std::pow(total, 1 / type);
  double norm = 0;
  for (int rank = 0; rank < ranks(); ++rank)
    if (!is_done(program_, rank, *at_))
      norm = compare(rank, "norm", number(total), number(bound)).item<double>();
  const double factor = kMaxNorm / (norm + 1e-6);
  for (Tensor& param : main_) {
    if (param.grad().defined() && !(factor >= 1)) param.mutable_grad().mul_(factor);
  }
}

// In which a parameter is sent when it was updated: all use the values that have come.
at::ScalarType PlainTraining::gathered_dtype(size_t param) const {
  const auto dtype = program_.plan.precision.gather_dtype;
  const at::ScalarType used = used_dtype(made_[param]);
  const bool is_narrower = dtype && c10::elementSize(*dtype) < c10::elementSize(used);
  return is_narrower && is_trained_[param] && c10::elementSize(*dtype) > 1 ? *dtype : used;
}

void PlainTraining::publish(size_t param) {
  const Tensor sent = main_[param].detach().to(gathered_dtype(param));
  for (auto& replica : params_) write(replica[param], sent);
}

// Messages of 8 bits, which have scales that depend on the shards: what the ranks have is taken
// over.
void PlainTraining::see_used() {
  double most = 0;
  for (size_t i = 0; i < main_.size(); ++i)
    if (is_trained_[i]) most = std::max(most, largest(main_[i]));
  std::map<std::string, Tensor> bounds;
  for (size_t i = 0; i < main_.size(); ++i) {
    if (!is_trained_[i]) continue;
    write_used(i, main_[i].detach().to(used_dtype(made_[i])));
    NarrowSums sent(*narrow_gathers(program_), 1);
    bounds[names_[i]] =
        torch::full_like(main_[i], sent.add(0, most, used_dtype(made_[i])), torch::kDouble);
  }
  const auto used = compare_used(bounds);
  for (size_t i = 0; i < main_.size(); ++i) write_used(i, used.at(names_[i]));
}

void train_plain(const Program& program, const std::vector<Trace>& ranks, int limit, int& at) {
  at = -1;
  const size_t size = program.plan.outer ? program.shard_size : program.ranks;
  std::vector<std::unique_ptr<PlainTraining>> replicas;
  std::vector<Training*> trainings;
  for (size_t first = 0; first < ranks.size(); first += size) {
    const auto own = std::span(ranks).subspan(first, size);
    replicas.push_back(std::make_unique<PlainTraining>(program, own, static_cast<int>(first)));
    replicas.back()->set_position(at);
    trainings.push_back(replicas.back().get());
  }
  train(program, trainings, 0, limit, at, [&](const Op& op) {
    if (program.plan.outer && op.kind == OpKind::kStep) PlainTraining::step_outer(replicas, op);
  });
}

}  // namespace tessera::differential
