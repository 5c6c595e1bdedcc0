#pragma once

// Optimizers of a user's own whose steps need whole parameters: LAMB, Adafactor, SOAP; and a model.
#include <gtest/gtest.h>
#include <tessera/engine/muon.h>
#include <tessera/engine/optimizer_traits.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/distinct_parameters.h"
#include "support/models.h"
#include "support/sharded_job.h"

namespace tessera::testing {

/// Steps each parameter by itself, by `update()`.
template <class OptionsClass, class StateClass>
class EachWhole : public torch::optim::Optimizer {
 public:
  using Options = OptionsClass;
  using State = StateClass;
  explicit EachWhole(std::vector<torch::Tensor> params, Options options = {})
      : Optimizer(std::move(params), std::make_unique<Options>(options)) {}

  torch::Tensor step(LossClosure /*closure*/ = nullptr) override {
    torch::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      const auto& options = static_cast<const Options&>(group.options());
      for (auto& param : group.params()) {
        if (!param.grad().defined()) continue;
        auto& state = state_[param.unsafeGetTensorImpl()];
        if (!state) state = std::make_unique<State>();
        update(options, param, param.grad(), static_cast<State&>(*state));
      }
    }
    return {};
  }

 protected:
  virtual void update(const Options& options, torch::Tensor param, const torch::Tensor& grad,
                      State& state) const = 0;
};

struct RateOptions : torch::optim::OptimizerCloneableOptions<RateOptions> {
  RateOptions(double lr = 0.01) : lr(lr) {}
  double get_lr() const override { return lr; }
  void set_lr(double value) override { lr = value; }
  double lr, beta2 = 0.99;
  int64_t every = 2;  // of SOAP: steps between two bases
  bool flag = false;
};

struct LambState : torch::optim::OptimizerCloneableParamState<LambState> {
  torch::Tensor exp_avg, exp_avg_sq;
  int64_t step = 0;
};

/// Divides by norms of the parameter and of its update (arXiv 1904.00962).
class Lamb : public EachWhole<RateOptions, LambState> {
 public:
  using EachWhole::EachWhole;

 protected:
  void update(const RateOptions& options, torch::Tensor param, const torch::Tensor& grad,
              LambState& state) const override {
    if (!state.exp_avg.defined()) {
      state.exp_avg = torch::zeros_like(param);
      state.exp_avg_sq = torch::zeros_like(param);
    }
    ++state.step;
    state.exp_avg.lerp_(grad, 0.1);
    state.exp_avg_sq.lerp_(grad.square(), 1 - options.beta2);
    const torch::Tensor update = state.exp_avg / (state.exp_avg_sq.sqrt() + 1e-6) + 0.01 * param;
    param.sub_(update * (options.lr * param.norm() / (update.norm() + 1e-12)));
  }
};

struct AdafactorState : torch::optim::OptimizerCloneableParamState<AdafactorState> {
  torch::Tensor row, column;  // of matrices and stacks
  torch::Tensor exp_avg_sq;   // of others
  int64_t step = 0;
};

/// Keeps a moment for each row and each column of a matrix (arXiv 1804.04235).
class Adafactor : public EachWhole<RateOptions, AdafactorState> {
 public:
  using EachWhole::EachWhole;

 protected:
  void update(const RateOptions& options, torch::Tensor param, const torch::Tensor& grad,
              AdafactorState& state) const override {
    ++state.step;
    const torch::Tensor square = grad.square() + 1e-30;
    torch::Tensor moment;
    if (param.dim() < 2) {
      if (!state.exp_avg_sq.defined()) state.exp_avg_sq = torch::zeros_like(param);
      moment = state.exp_avg_sq.lerp_(square, 1 - options.beta2);
    } else {
      const torch::Tensor row = square.mean(-1), column = square.mean(-2);
      if (!state.row.defined()) {
        state.row = torch::zeros_like(row);
        state.column = torch::zeros_like(column);
      }
      state.row.lerp_(row, 1 - options.beta2);
      state.column.lerp_(column, 1 - options.beta2);
      moment = state.row.unsqueeze(-1) * state.column.unsqueeze(-2) /
               state.row.mean(-1, true).unsqueeze(-1);
    }
    const torch::Tensor update = grad / moment.sqrt();
    param.sub_(update * (options.lr / update.square().mean().sqrt().clamp_min(1)));
  }
};

struct SoapState : torch::optim::OptimizerCloneableParamState<SoapState> {
  torch::Tensor left, right;              // preconditioners of Shampoo
  torch::Tensor left_basis, right_basis;  // their eigenvectors
  torch::Tensor exp_avg, exp_avg_sq;      // of Adam; the latter in that basis
  int64_t step = 0;
};

/// Adam in the eigenbasis of Shampoo's preconditioners (arXiv 2409.11321) for matrices, and Adam
/// for all else.
class Soap : public EachWhole<RateOptions, SoapState> {
 public:
  using EachWhole::EachWhole;

 protected:
  static void follow(torch::Tensor& basis, const torch::Tensor& preconditioner) {
    basis = basis.defined() ? std::get<0>(torch::linalg_qr(preconditioner.mm(basis), "reduced"))
                            : std::get<1>(torch::linalg_eigh(preconditioner));
  }
  void update(const RateOptions& options, torch::Tensor param, const torch::Tensor& grad,
              SoapState& state) const override {
    const bool is_matrix = param.dim() == 2;
    if (!state.exp_avg.defined()) {
      state.exp_avg = torch::zeros_like(param);
      state.exp_avg_sq = torch::zeros_like(param);
      if (is_matrix) {
        state.left = torch::zeros({param.size(0), param.size(0)}, param.options());
        state.right = torch::zeros({param.size(1), param.size(1)}, param.options());
      }
    }
    if (is_matrix) {
      state.left.lerp_(grad.mm(grad.t()), 0.05);
      state.right.lerp_(grad.t().mm(grad), 0.05);
      if (state.step % options.every == 0) {
        follow(state.left_basis, state.left);
        follow(state.right_basis, state.right);
      }
    }
    ++state.step;
    const auto turn = [&](const torch::Tensor& x) {
      return is_matrix ? state.left_basis.t().mm(x).mm(state.right_basis) : x;
    };
    state.exp_avg.lerp_(grad, 0.1);
    state.exp_avg_sq.lerp_(turn(grad).square(), 1 - options.beta2);
    torch::Tensor update = turn(state.exp_avg) / (state.exp_avg_sq.sqrt() + 1e-8);
    if (is_matrix) update = state.left_basis.mm(update).mm(state.right_basis.t());
    param.sub_(update * options.lr);
  }
};

struct MomentState : torch::optim::OptimizerCloneableParamState<MomentState> {
  torch::Tensor moment;
  int64_t step = 0;
};

/// Steps each element by the sign of its moment.
struct Signs : EachWhole<RateOptions, MomentState> {
  using EachWhole::EachWhole;
  void update(const RateOptions& options, torch::Tensor param, const torch::Tensor& grad,
              MomentState& state) const override {
    if (!state.moment.defined()) state.moment = torch::zeros_like(param);
    ++state.step;
    param.sub_(state.moment.lerp_(grad, 0.1).sign() * options.lr);
  }
};
/// A model with matrices, a stack of them, vectors and a number, tied, frozen and unused ones, of
/// sizes that nothing divides.
struct Mixed : Net {
  Mixed() {
    up = register_module("up", torch::nn::Linear(13, 22));
    down = register_module("down", torch::nn::Linear(22, 13));
    square = register_module("square", torch::nn::Linear(13, 13));
    square_again = register_parameter("square_again", square->weight);
    experts = register_parameter("experts", torch::randn({5, 13, 7}) * 0.2);
    frozen = register_parameter("frozen", torch::randn({13, 13}), /*requires_grad=*/false);
    unused = register_parameter("unused", torch::ones({3, 4}));
    scale = register_parameter("scale", torch::full({}, 1.5));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({13})));
    head = register_module("head", torch::nn::Linear(13, 5));
  }
  torch::Tensor forward(torch::Tensor x) override {
    x = x + down(torch::tanh(up(x))) + torch::linear(torch::tanh(square(x)), square_again);
    x = x + torch::einsum("bi,eij,ekj->bk", {x, experts, experts}) / 5 + x.mm(frozen) / 13;
    return head(norm(x)) * scale;
  }
  torch::Dtype dtype() const override { return head->weight.scalar_type(); }
  torch::nn::Linear up{nullptr}, down{nullptr}, square{nullptr}, head{nullptr};
  torch::Tensor square_again, experts, frozen, unused, scale;
  torch::nn::LayerNorm norm{nullptr};
};

/// A run of it by an optimizer of one's own.
template <class Optimizer>
TrainingRun mixed_run(const typename Optimizer::Options& options = {}) {
  return {
      .make_net = [] { return seeded(7, [] { return std::make_shared<Mixed>(); }); },
      .make_optimizer =
          [=](Net& net) { return std::make_unique<Optimizer>(distinct_parameters(net), options); },
      .steps = 3,
      .in = 13};
}

inline OptimizerStateFields moment_fields(MomentState& own) {
  return {.tensors = {{"moment", &own.moment}}, .counts = {{"step", &own.step}}};
}
inline OptimizerOptionFields rate_fields(RateOptions& own) {
  return {{"lr", &own.lr}, {"beta2", &own.beta2}, {"every", &own.every}, {"flag", &own.flag}};
}

/// Describes the classes above to Tessera.
inline void register_whole_optimizers() {
  static const bool done = [] {
    register_optimizer<Lamb, RateOptions, LambState>(
        {.name = "LAMB",
         .state = [](LambState& own) -> OptimizerStateFields {
           return {.tensors = {{"exp_avg", &own.exp_avg}, {"exp_avg_sq", &own.exp_avg_sq}},
                   .counts = {{"step", &own.step}}};
         },
         .options = rate_fields});
    register_optimizer<Adafactor, RateOptions, AdafactorState>(
        {.name = "Adafactor",
         .state = [](AdafactorState& own) -> OptimizerStateFields {
           return {.tensors = {{"exp_avg_sq", &own.exp_avg_sq}},
                   .others = {{"row", &own.row}, {"column", &own.column}},
                   .counts = {{"step", &own.step}}};
         },
         .options = rate_fields});
    register_optimizer<Soap, RateOptions, SoapState>(
        {.name = "SOAP",
         .state = [](SoapState& own) -> OptimizerStateFields {
           return {.tensors = {{"exp_avg", &own.exp_avg}, {"exp_avg_sq", &own.exp_avg_sq}},
                   .others = {{"left", &own.left},
                              {"right", &own.right},
                              {"left_basis", &own.left_basis},
                              {"right_basis", &own.right_basis}},
                   .counts = {{"step", &own.step}}};
         },
         .options = rate_fields});
    register_optimizer<Signs, RateOptions, MomentState>(
        {.name = "Signs", .cut = Cut::kAnywhere, .state = moment_fields, .options = rate_fields});
    return true;
  }();
  EXPECT_TRUE(done);
}

inline const std::vector<std::string> kExceptions{"head*", "unused"};

inline TrainingRun muon_run(const std::vector<std::string>& exceptions) {
  TrainingRun run = mixed_run<Lamb>();
  run.make_optimizer = [=](Net& net) {
    return std::make_unique<Muon>(
        muon_groups(net, exceptions, MuonOptions(0.02).weight_decay(0.01), MuonOptions(3e-3)));
  };
  return run;
}

struct WholeOptimizer {
  std::string name;
  TrainingRun run;
  std::vector<CutRule> cuts;
};

inline const std::vector<CutRule> kAllWhole{{"*", Cut::kWhole}};

/// Optimizers that need whole parameters, and where a plan may cut these.
inline std::vector<WholeOptimizer> whole_optimizers() {
  register_whole_optimizers();
  auto muon = muon_cuts(Mixed(), {}), mixed = muon_cuts(Mixed(), kExceptions);
  mixed.push_back({"head.weight", Cut::kRows, 2});
  mixed.push_back({"*bias", Cut::kElements, 8});
  return {{"Muon", muon_run({}), muon},
          {"Muon with AdamW", muon_run(kExceptions), mixed},
          {"LAMB", mixed_run<Lamb>(), kAllWhole},
          {"Adafactor", mixed_run<Adafactor>(), kAllWhole},
          {"SOAP", mixed_run<Soap>(), kAllWhole}};
}

/// Trains on rows of the first rank: gradients, and so all bits, are those of any number of ranks,
/// if they are not averaged.
struct FirstRankJob : ShardedJob<Net> {
  using ShardedJob::ShardedJob;
  void train(int first, int last) {
    for (int step = first; step < last; ++step) {
      optimizer.zero_grad();
      const Batch batch = global_batch(step, run.rows, run.in, run.out);
      (rank_loss(*net, batch, 0, 1, step) * (world.rank() == 0 ? 1 : 0)).backward();
      optimizer.step();
    }
  }
};

}  // namespace tessera::testing
