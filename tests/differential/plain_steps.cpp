#include "differential/plain_training.h"

namespace tessera::differential {

using torch::Tensor;
namespace optim = torch::optim;

// Where the program reduces, Tessera can't know that there is none.
bool PlainTraining::has_gradient() const {
  if (!program_.plan.reduce_gradients) return true;
  return !is_zeroed_ && std::any_of(main_.begin(), main_.end(),
                                    [](auto& param) { return param.grad().defined(); });
}

// LibTorch's optimizers do nothing without gradients.
void PlainTraining::check_backward() const {
  if (!has_gradient()) throw Refused(kNoBackward);
}

// Returns whether the optimizer is to be stepped.
bool PlainTraining::begins_step(const Op& op) {
  if (!scaler_) {
    check_backward();
    return true;
  }
  const bool steps =
      scaler_->begin_step(op.value, parameters_of_optimizer(op.value), has_gradient());
  if (steps) check_backward();
  if (op.value + 1 == static_cast<int>(optimizers_.size())) scaler_->update();
  compare_all("stepped", number(steps));
  compare_all("scale", number(scaler_->scale()));
  return steps;
}

void PlainTraining::step_fused(const Op& op) {
  optim::Optimizer& optimizer = *optimizers_[op.value];
  OptimizerStateDict state = state_dict_of(optimizer);
  const auto value_of = [&](int64_t place, const char* name) {
    const auto& values = state.state[place];
    const auto it = values.find(name);
    return it == values.end() || !it->second.isTensor() ? Tensor() : it->second.toTensor();
  };
  const auto second = program_.optimizers[op.value].kind == "Adagrad" ? "sum" : "exp_avg_sq";
  const auto first = program_.optimizers[op.value].kind == "SGD" ? "momentum_buffer" : "exp_avg";
  std::vector<std::tuple<Tensor, int64_t, StepResult>> results;
  int64_t place = -1;
  for (const auto& group : optimizer.param_groups()) {
    for (const Tensor& param : group.params()) {
      ++place;
      if (!param.grad().defined()) continue;
      StepState from{param, param.grad(), value_of(place, first), value_of(place, second),
                     value_of(place, "max_exp_avg_sq")};
      const auto step = state.state[place].find("step");
      if (step != state.state[place].end()) from.step = step->second.toScalar().toDouble();
      results.emplace_back(
          param, place,
          step_approximately(program_.optimizers[op.value], group.options().get_lr(), from));
    }
  }
  optimizer.step();
  state = state_dict_of(optimizer);
  std::map<std::string, Tensor> bounds;
  for (auto& [param, place, result] : results) {
    const size_t i = index_of(main_, param);
    write(param, result.param.value);
    publish(i);
    bounds[names_[i]] = result.param.error;
    for (const auto& [name, value] :
         {std::pair(first, result.first), std::pair(second, result.second),
          std::pair("max_exp_avg_sq", result.most)}) {
      if (!value.value.defined() || param.numel() == 0) continue;
      state.state[place][name] = value.value.to(param.scalar_type());
      bounds[state_prefix(op.value, place) + name] = value.error;
    }
  }
  load_state_dict(optimizer, state);
  compare_state(bounds);
}

void PlainTraining::step(const Op& op) {
  const bool is_fused = program_.optimizers[op.value].fused;
  if (program_.plan.outer) begin_round(op.value);
  if (!begins_step(op)) return is_fused ? compare_state() : void();
  if (is_fused) return step_fused(op);
  optimizers_[op.value]->step();
  for (const size_t i : parameters_of(program_, op.value, main_.size())) {
    if (main_[i].grad().defined()) publish(i);
  }
}

// A round begins with the values of its first step.
void PlainTraining::begin_round(size_t optimizer) {
  for (const size_t i : parameters_of(program_, optimizer, main_.size()))
    if (params_[0][i].requires_grad())
      starts_.try_emplace({optimizer, i}, main_[i].detach().clone());
}

// By the formula of docs/design/averaging.md.
void PlainTraining::step_outer(std::span<const std::unique_ptr<PlainTraining>> replicas,
                               const Op& op) {
  PlainTraining& first = *replicas[0];
  const OuterStep& outer = *first.program_.plan.outer;
  if (++first.outer_steps_[op.value] % outer.every != 0) return;
  torch::NoGradGuard no_grad;
  const bool is_mean = outer.learning_rate == 1 && outer.momentum == 0;
  for (const auto& [place, start] : first.starts_) {
    if (place.first != static_cast<size_t>(op.value)) continue;
    const size_t i = place.second;
    const auto wide = at::promoteTypes(first.main_[i].scalar_type(), at::kFloat);
    Tensor sum;
    for (const auto& replica : replicas) {
      Tensor own = replica->main_[i].to(wide);
      if (!is_mean) own = replica->starts_[place].to(wide) - own;
      sum = sum.defined() ? sum + own : own;
    }
    const Tensor mean = sum / static_cast<double>(replicas.size());
    Tensor direction = mean;
    if (outer.momentum > 0) {
      Tensor& momentum = first.momenta_[place];
      if (!momentum.defined()) momentum = torch::zeros_like(mean);
      momentum.mul_(outer.momentum).add_(mean);
      direction = outer.nesterov ? mean.add(momentum, outer.momentum) : momentum;
    }
    for (const auto& replica : replicas) {
      const Tensor begin = replica->starts_[place].to(wide);
      write(replica->main_[i], is_mean ? mean : begin.sub(direction, outer.learning_rate));
      replica->publish(i);
    }
  }
  for (const auto& replica : replicas)
    std::erase_if(replica->starts_, [&](const auto& item) {
      return item.first.first == static_cast<size_t>(op.value);
    });
}

void PlainTraining::evaluate(const Op& op) {
  torch::NoGradGuard no_grad;
  for_each_rank([&](int rank) {
    replicas_[rank]->eval();
    const Tensor out = replicas_[rank]->forward(batch_of(program_, op.value, first_ + rank).first);
    compare(rank, "evaluation", out);
    replicas_[rank]->train();
  });
}

// Master weights change where the parameter does.
void PlainTraining::edit_parameter(const Op& op) {
  const size_t i = op.value % main_.size();
  const Tensor before = params_[0][i].detach().clone();
  for (auto& replica : params_) edit(replica[i], op.how);
  const Tensor after = params_[0][i].detach();
  write(main_[i], torch::where(before.eq(after), main_[i], after.to(main_[i].scalar_type())));
  write_used(i, main_[i].detach().to(gathered_dtype(i)));
}

void PlainTraining::average(const Op& op) {
  torch::NoGradGuard no_grad;
  const auto wide = [](const Tensor& values) {
    return values.detach().to(at::promoteTypes(values.scalar_type(), at::kFloat), false, true);
  };
  averages_.resize(main_.size());
  if (op.how == 0) {
    for (size_t i = 0; i < main_.size(); ++i) {
      if (averages_[i].defined())
        averages_[i].lerp_(wide(main_[i]), 0.25);
      else if (params_[0][i].requires_grad())
        averages_[i] = wide(main_[i]);
    }
  } else {
    for (auto& replica : params_)
      for (size_t i = 0; i < main_.size(); ++i)
        if (!program_.is_ignored(i) && averages_[i].defined())
          write(replica[i], averages_[i].to(main_[i].scalar_type()).to(gathered_dtype(i)));
    evaluate(op);
    for (size_t i = 0; i < main_.size(); ++i) publish(i);
  }
}

void PlainTraining::thaw() {
  for (auto& replica : params_)
    for (Tensor& param : replica) param.requires_grad_(true);
  for (size_t i = 0; i < main_.size(); ++i) main_[i].set_data(main_[i].to(main_dtype(i)));
  for (const auto& optimizer : optimizers_)
    for (const Tensor& param : main_) {  // LibTorch made the state with the optimizer
      const auto it = optimizer->state().find(param.unsafeGetTensorImpl());
      if (it == optimizer->state().end()) continue;
      auto* const own = dynamic_cast<optim::AdagradParamState*>(it->second.get());
      if (own) own->sum(own->sum().to(param.scalar_type()));
    }
}

void PlainTraining::save(const Op&) {
  saved_.emplace();
  for (const Tensor& param : main_) saved_->main.push_back(param.detach().clone());
  for (const auto& replica : replicas_) {
    saved_->buffers.emplace_back();
    for (const Tensor& buffer : replica->buffers())
      saved_->buffers.back().push_back(buffer.clone());
  }
  if (optimizers_.size() == 1) saved_->optimizer = state_dict_of(*optimizers_[0]);
  for (const Tensor& state : random_) saved_->random.push_back(state.clone());
  saved_->scaler = scaler_;
  for (const auto& schedule : schedules_)
    saved_->schedule_steps.push_back(schedule ? schedule->step_count_ : 0);
}

void PlainTraining::load() {
  for (size_t i = 0; i < main_.size(); ++i) {
    write(main_[i], saved_->main[i]);
    publish(i);
  }
  for (size_t rank = 0; rank < replicas_.size(); ++rank)
    for (size_t i = 0; i < saved_->buffers[rank].size(); ++i)
      write(replicas_[rank]->buffers()[i], saved_->buffers[rank][i]);
  if (saved_->optimizer) load_state_dict(*optimizers_[0], *saved_->optimizer);
  random_.clear();
  for (const Tensor& state : saved_->random) random_.push_back(state.clone());
  if (scaler_) scaler_->load(*saved_->scaler);
  for (size_t i = 0; i < schedules_.size(); ++i)
    if (schedules_[i]) schedules_[i]->step_count_ = saved_->schedule_steps[i];
}

// Gradients of a backward that failed are dropped, and so are those before it.
void PlainTraining::throw_in(const Op& op) {
  sync_buffers();
  for_each_rank([&](int rank) {
    (op.how == 0 ? replicas_[rank]->throws_forward : replicas_[rank]->throws_backward) = op.value;
    try {
      run(rank, {OpKind::kForward, 0, kByHandle}).backward();
    } catch (const UserError&) {
    }
    replicas_[rank]->throws_forward = replicas_[rank]->throws_backward = -1;
    for (Tensor& param : params_[rank]) param.mutable_grad().reset();
  });
}

}  // namespace tessera::differential
