#include "differential/training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <tessera/base/generator.h>
#include <tessera/engine/activation_checkpoint.h>
#include <tessera/engine/cpu_adam.h>
#include <tessera/engine/muon.h>
#include <tessera/engine/optimizer_traits.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "support/test_device.h"

namespace tessera::differential {
namespace {

using torch::Tensor;
namespace optim = torch::optim;

const pid_t kProcess = ::getpid();  // that forks all others

}  // namespace

// clang-format off
// A user's own optimizer: elementwise, with state.
WITH_SOURCE(kLion, struct Lion : optim::SGD {
  using optim::SGD::SGD;
  Tensor step(LossClosure closure = nullptr) override {
    for (auto& group : param_groups()) {
      const double lr = group.options().get_lr();
      for (const Tensor& param : group.params()) {
        if (!param.grad().defined()) continue;
        at::NoGradGuard no_grad;
        Tensor& kept = momentum_of(param);
        const Tensor direction = (kept * 0.875 + param.grad() * 0.125).sign();
        kept.mul_(0.75).add_(param.grad() * 0.25);
        param.sub_(direction * lr);
      }
    }
    return {};
  }
  Tensor& momentum_of(const Tensor& param) {
    auto& state = this->state()[param.unsafeGetTensorImpl()];
    if (!state) {
      auto fresh = std::make_unique<optim::SGDParamState>();
      fresh->momentum_buffer(torch::zeros_like(param));
      state = std::move(fresh);
    }
    return static_cast<optim::SGDParamState&>(*state).momentum_buffer();
  }
};)

// Optimizers of a user's own that need whole parameters, and are described.
WITH_SOURCE(kWhole, struct Lamb : optim::SGD {
  using optim::SGD::SGD;
  using State = optim::AdamParamState;
  Tensor step(LossClosure closure = nullptr) override {
    at::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      for (const Tensor& param : group.params()) {
        if (!param.grad().defined()) continue;
        auto& own = this->state()[param.unsafeGetTensorImpl()];
        if (!own) own = std::make_unique<State>();
        auto& state = static_cast<State&>(*own);
        state.step(state.step() + 1);
        param.sub_(update(param, param.grad(), state) * group.options().get_lr());
      }
    }
    return {};
  }
  virtual Tensor update(const Tensor& param, const Tensor& grad, State& state) {
    if (!state.exp_avg().defined()) state.exp_avg(torch::zeros_like(param));
    if (!state.exp_avg_sq().defined()) state.exp_avg_sq(torch::zeros_like(param));
    state.exp_avg().mul_(0.75).add_(grad, 0.25);
    state.exp_avg_sq().mul_(0.875).addcmul_(grad, grad, 0.125);
    const Tensor direction = state.exp_avg() / (state.exp_avg_sq().sqrt() + 0.001);
    return direction * (param.norm() / (direction.norm() + 0.001));
  }
};
struct Factored : Lamb {
  using Lamb::Lamb;
  Tensor update(const Tensor& param, const Tensor& grad, State& state) override {
    const Tensor square = grad.square() + 0.001;
    if (param.dim() < 2) {
      if (!state.exp_avg_sq().defined()) state.exp_avg_sq(torch::zeros_like(param));
      return grad / state.exp_avg_sq().mul_(0.75).add_(square, 0.25).sqrt();
    }
    const Tensor row = square.mean(-1);
    const Tensor column = square.mean(-2);
    if (!state.exp_avg().defined()) state.exp_avg(torch::zeros_like(row));
    if (!state.max_exp_avg_sq().defined()) state.max_exp_avg_sq(torch::zeros_like(column));
    state.exp_avg().mul_(0.75).add_(row, 0.25);
    state.max_exp_avg_sq().mul_(0.75).add_(column, 0.25);
    const Tensor means = state.exp_avg() / state.exp_avg().mean(-1, true);
    return grad / (means.unsqueeze(-1) * state.max_exp_avg_sq().unsqueeze(-2)).sqrt();
  }
};
void describe_whole() {
  using Fields = tessera::OptimizerStateFields;
  const auto options = [](optim::SGDOptions& own) -> tessera::OptimizerOptionFields {
    return {{"lr", &own.lr()}};
  };
  const auto lamb = [](Lamb::State& own) -> Fields {
    return {.tensors = {{"average", &own.exp_avg()}, {"square", &own.exp_avg_sq()}},
            .counts = {{"step", &own.step()}}};
  };
  const auto factored = [](Lamb::State& own) -> Fields {
    return {.tensors = {{"square", &own.exp_avg_sq()}},
            .others = {{"row", &own.exp_avg()}, {"column", &own.max_exp_avg_sq()}},
            .counts = {{"step", &own.step()}}};
  };
  tessera::register_optimizer<Lamb, optim::SGDOptions, Lamb::State>(
      {.name = "Lamb", .state = lamb, .options = options});
  tessera::register_optimizer<Factored, optim::SGDOptions, Lamb::State>(
      {.name = "Factored", .state = factored, .options = options});
})
// clang-format on
const char* const kLionSource = kLion;
const char* const kWholeSource = kWhole;

namespace {

template <class Made, class Options>
std::unique_ptr<optim::Optimizer> make_groups(const Optimizer& spec, const Options& options,
                                              const std::vector<Tensor>& parameters) {
  std::vector<std::vector<Tensor>> members(spec.groups);
  for (size_t i = 0; i < parameters.size(); ++i) members[i % spec.groups].push_back(parameters[i]);
  std::vector<optim::OptimizerParamGroup> groups;
  double lr = spec.lr;
  for (auto& group : members) {
    auto own = std::make_unique<Options>(options);
    own->set_lr(lr);
    groups.emplace_back(std::move(group), std::move(own));
    lr /= 2;
  }
  return std::make_unique<Made>(std::move(groups), options);
}

std::unique_ptr<optim::Optimizer> make_muon(const Optimizer& spec,
                                            const std::vector<Tensor>& parameters) {
  const auto options =
      MuonOptions(spec.lr).momentum(spec.momentum).nesterov(spec.flag).weight_decay(spec.decay);
  std::vector<Tensor> matrices, others;
  for (const Tensor& param : parameters)
    (param.dim() == 2 || param.dim() == 3 ? matrices : others).push_back(param);
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(matrices, std::make_unique<MuonOptions>(options));
  groups.emplace_back(others, std::make_unique<MuonOptions>(
                                  MuonOptions(options).adamw(true).betas({0.9, spec.beta2})));
  return std::make_unique<Muon>(groups, options);
}

}  // namespace

Model::Model(const Program& program) : program(program) {
  for (const Layer& layer : program.layers) {
    blocks.push_back(block_classes().at(layer.kind)(program.width));
    blocks.back()->to(layer.dtype);
    for (Tensor& param : blocks.back()->parameters()) param.requires_grad_(!layer.frozen);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (program.layers[i].tied >= 0) blocks[i]->tie(*blocks[program.layers[i].tied]);
  }
  for (const int i : program.registration) register_module("l" + std::to_string(i), blocks[i]);
}

// A layer computes in the dtype of its parameters.
static Tensor input_of(const Block& block, const Tensor& x) {
  const auto parameters = block.parameters();
  return parameters.empty() ? x : x.to(parameters[0].scalar_type());
}

Tensor Model::forward(Tensor x) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Layer& layer = program.layers[i];
    if (throws_forward == static_cast<int>(i)) throw UserError();
    if ((layer.ranks >> rank & 1) == 0) continue;
    for (int time = 0; time < layer.times; ++time) {
      const Tensor in = input_of(*blocks[i], x);
      const auto call = [block = blocks[i]](Tensor x) { return block->forward(x); };
      const Tensor out = layer.checkpoint && recomputes ? checkpoint(call, in) : call(in);
      x = layer.residual ? x + out.to(x.scalar_type()) : out.to(x.scalar_type());
    }
    if (throws_backward == static_cast<int>(i) && x.requires_grad())
      x.register_hook([](const Tensor&) -> Tensor { throw UserError(); });
  }
  return x;
}

std::vector<NamedTensor> Model::distinct() const {
  std::vector<NamedTensor> result;
  for (const auto& item : named_parameters()) {
    const auto is_same = [&](const NamedTensor& other) {
      return other.tensor.is_same(item.value());
    };
    if (std::none_of(result.begin(), result.end(), is_same))
      result.push_back({item.key(), item.value()});
  }
  return result;
}

std::shared_ptr<Model> make_model(const Program& program, uint64_t start) {
  manual_seed(start);
  auto model = std::make_shared<Model>(program);
  if (program.simulated) model->to(testing::test_device());
  return model;
}

Tensor loss_of(const Tensor& out, Tensor target, const Op& forward) {
  if (forward.how & kInfinite) target.fill_(std::numeric_limits<float>::infinity());
  return torch::mse_loss(out.to(torch::kFloat), target);
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Optimizer& spec,
                                                 const std::vector<Tensor>& parameters) {
  const auto betas = std::make_tuple(spec.momentum, spec.beta2);
  const auto& [kind, lr, decay, momentum, beta2, eps, flag, groups, reversed, fused, schedule,
               declared, state] = spec;
  if (kind == "SGD" || kind == "Lion") {
    const auto options =
        optim::SGDOptions(lr).momentum(momentum).weight_decay(decay).nesterov(flag && momentum > 0);
    if (kind == "Lion") return make_groups<Lion>(spec, options, parameters);
    return make_groups<optim::SGD>(spec, options, parameters);
  }
  if (kind == "Adam")
    return make_groups<optim::Adam>(
        spec, optim::AdamOptions(lr).betas(betas).eps(eps).weight_decay(decay).amsgrad(flag),
        parameters);
  if (kind == "AdamW")
    return make_groups<optim::AdamW>(
        spec, optim::AdamWOptions(lr).betas(betas).eps(eps).weight_decay(decay).amsgrad(flag),
        parameters);
  if (kind == "CPUAdam")
    return make_groups<CPUAdam>(
        spec,
        CPUAdamOptions(lr).betas(betas).eps(eps).weight_decay(decay).adamw_mode(flag).state_dtype(
            state),
        parameters);
  if (kind == "Muon") return make_muon(spec, parameters);
  static const bool is_described = (describe_whole(), true);
  if (kind == "Lamb" && is_described)
    return make_groups<Lamb>(spec, optim::SGDOptions(lr), parameters);
  if (kind == "Factored") return make_groups<Factored>(spec, optim::SGDOptions(lr), parameters);
  if (kind == "Adagrad")
    return make_groups<optim::Adagrad>(
        spec, optim::AdagradOptions(lr).lr_decay(momentum).weight_decay(decay).eps(eps),
        parameters);
  if (kind == "RMSprop")
    return make_groups<optim::RMSprop>(spec,
                                       optim::RMSpropOptions(lr)
                                           .alpha(beta2)
                                           .eps(eps)
                                           .weight_decay(decay)
                                           .momentum(momentum)
                                           .centered(flag),
                                       parameters);
  return std::make_unique<optim::LBFGS>(parameters, optim::LBFGSOptions(lr));
}

std::unique_ptr<Schedule> make_schedule(const Optimizer& spec, optim::Optimizer& optimizer) {
  if (!spec.schedule) return nullptr;
  return std::make_unique<Schedule>(optimizer, warmup_cosine({.warmup = 2, .steps = 6}));
}

std::vector<size_t> parameters_of(const Program& program, size_t index, size_t count) {
  std::vector<size_t> numbers;
  for (size_t i = index; i < count; i += program.optimizers.size())
    if (!program.is_ignored(i)) numbers.push_back(i);
  if (program.optimizers[index].reversed) std::reverse(numbers.begin(), numbers.end());
  return numbers;
}

std::pair<Tensor, Tensor> batch_of(const Program& program, int number, int rank) {
  const auto generator = at::detail::createCPUGenerator(program.seed + 1000 * number + rank);
  const int64_t rows = program.rows + (program.uneven_rows ? rank : 0);
  const Tensor x = torch::randn({rows, program.width}, generator);
  const Tensor y = torch::randn({rows, program.width}, generator);
  if (!program.simulated) return {x.to(program.dtype), y};
  return {testing::on_test_device(x.to(program.dtype)), testing::on_test_device(y)};
}

// clang-format off
WITH_SOURCE(kEdit, void edit(Tensor parameter, int how) {
  torch::NoGradGuard no_grad;
  if (how == 0) parameter.mul_(0.5);
  if (how == 1) parameter.clamp_(-0.25, 0.25);
  if (how == 2) parameter.fill_(0.125);
  if (how == 3) parameter.copy_(parameter * 2);
  if (how == 4 && parameter.dim() > 0 && parameter.size(0) > 0) parameter.select(0, 0).zero_();
})
// clang-format on
const char* const kEditSource = kEdit;

double norm_type_of(const Op& clip) {
  constexpr double kTypes[] = {2, 1, std::numeric_limits<double>::infinity(), 3};
  return kTypes[clip.how];
}

uint64_t random_seed_of(const Program& program, int rank) { return 10 * program.seed + rank; }

std::string directory_of(const Program& program) {
  return c10::str(std::filesystem::temp_directory_path().string(), "/tessera_differential_",
                  kProcess, "_", program.seed);
}

std::optional<at::ScalarType> narrow_sums(const Program& program) {
  const auto dtype = program.plan.precision.reduce_dtype;
  return dtype && c10::elementSize(*dtype) == 1 ? dtype : std::nullopt;
}

std::optional<at::ScalarType> narrow_gathers(const Program& program) {
  const auto dtype = program.plan.precision.gather_dtype;
  const bool are_sent = program.plan.level != ShardLevel::kNone;
  return dtype && c10::elementSize(*dtype) == 1 && are_sent ? dtype : std::nullopt;
}

bool is_done(const Program& program, int rank, int op) {
  return program.joined > 0 && op < program.joined && op >= program.ends[rank];
}

Op op_at(const Program& program, int at) {
  Op op = program.ops[at];
  const bool is_of_optimizer = op.kind == OpKind::kZeroGrad || op.kind == OpKind::kClip ||
                               op.kind == OpKind::kStep || op.kind == OpKind::kSchedule;
  if (is_of_optimizer) op.value %= static_cast<int>(program.optimizers.size());
  return op;
}

void run(Training& training, const Op& op) {
  switch (op.kind) {
    case OpKind::kForward:
      training.forward(op);
      break;
    case OpKind::kBackward:
      training.backward(op);
      break;
    case OpKind::kZeroGrad:
      training.zero_grad(op);
      break;
    case OpKind::kClip:
      training.clip(op);
      break;
    case OpKind::kClampGrad:
      training.clamp_grad(op);
      break;
    case OpKind::kStep:
      training.step(op);
      break;
    case OpKind::kSchedule:
      training.advance_schedule(op);
      break;
    case OpKind::kEvaluate:
      training.evaluate(op);
      break;
    case OpKind::kFullState:
      training.rewrite_state();
      break;
    case OpKind::kEdit:
      training.edit_parameter(op);
      break;
    case OpKind::kAverage:
      training.average(op);
      break;
    case OpKind::kSave:
      training.save(op);
      break;
    case OpKind::kLoad:
      training.load();
      break;
    case OpKind::kThrow:
      training.throw_in(op);
      break;
    case OpKind::kThaw:
      training.thaw();
      break;
    case OpKind::kReduce:
      training.reduce();
      break;
  }
}

// Of the parameters in use.
static bool changes_values(OpKind kind) {
  return kind == OpKind::kStep || kind == OpKind::kEdit || kind == OpKind::kLoad ||
         kind == OpKind::kFullState;
}

void train(const Program& program, const std::vector<Training*>& trainings, int first, int limit,
           int& at, const std::function<void(const Op&)>& then) {
  const int count = static_cast<int>(program.ops.size());
  const bool sees_used = narrow_gathers(program).has_value();
  if (sees_used && first == 0)
    for (Training* training : trainings) training->see_used();
  for (at = first; at < count && at <= limit; ++at) {
    const Op op = op_at(program, at);
    for (Training* training : trainings) run(*training, op);
    then(op);
    if (sees_used && changes_values(op.kind))
      for (Training* training : trainings) training->see_used();
  }
  if (limit < count) return;
  for (Training* training : trainings) training->finish();
}

}  // namespace tessera::differential
