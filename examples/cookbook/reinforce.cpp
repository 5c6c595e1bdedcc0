// Reinforcement learning: each rank plays episodes of its own, of different lengths, so that the
// ranks make different numbers of steps, inside tessera::join().
//   ./dev example cookbook/reinforce
// balances a pole on a cart by policy gradients (REINFORCE with a learned baseline), on two ranks.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <array>

namespace nn = torch::nn;
using torch::Tensor;

// The cart and pole of Barto, Sutton and Anderson (1983), in steps of 0.02 s: the episode ends when
// the pole leans by 12 degrees, the cart has moved by 2.4 m, or after 200 steps.
class CartPole {
 public:
  Tensor reset() {
    const auto start = torch::rand({4}) * 0.1 - 0.05;
    std::copy_n(start.const_data_ptr<float>(), 4, state_.begin());
    steps_ = 0;
    return observe();
  }
  Tensor observe() const { return torch::tensor({state_[0], state_[1], state_[2], state_[3]}); }
  bool step(bool to_right) {  // returns true if the episode goes on
    auto& [x, speed, angle, turn] = state_;
    const float force = to_right ? 10 : -10, sine = std::sin(angle), cosine = std::cos(angle);
    const float push = (force + 0.05F * turn * turn * sine) / 1.1F;
    const float turning =
        (9.8F * sine - cosine * push) / (0.5F * (4.0F / 3 - 0.1F * cosine * cosine / 1.1F));
    x += 0.02F * speed;
    speed += 0.02F * (push - 0.05F * turning * cosine / 1.1F);
    angle += 0.02F * turn;
    turn += 0.02F * turning;
    return std::abs(x) < 2.4F && std::abs(angle) < 0.2095F && ++steps_ < 200;
  }

 private:
  std::array<float, 4> state_{};
  int steps_ = 0;
};

struct PolicyImpl : nn::Module {
  // Returns the log-probabilities of both actions, and the expected return.
  std::pair<Tensor, Tensor> forward(const Tensor& x) {
    const auto hidden = torch::tanh(body(x));
    return {torch::log_softmax(actions(hidden), -1), value(hidden).squeeze(-1)};
  }
  nn::Linear body = register_module("body", nn::Linear(4, 64));
  nn::Linear actions = register_module("actions", nn::Linear(64, 2));
  nn::Linear value = register_module("value", nn::Linear(64, 1));
};
TORCH_MODULE(Policy);

struct Episode {
  Tensor states, actions, returns;  // (T, 4), (T), (T)
};

Episode play(Policy& policy) {
  torch::NoGradGuard no_grad;
  CartPole game;
  std::vector<Tensor> states;
  std::vector<int64_t> actions;
  Tensor state = game.reset();
  bool goes_on = true;
  while (goes_on) {
    actions.push_back(policy->forward(state).first.exp().multinomial(1).item<int64_t>());
    states.push_back(state);
    goes_on = game.step(actions.back() == 1);
    state = game.observe();
  }
  auto returns = torch::empty({std::ssize(actions)});
  for (int64_t t = returns.size(0) - 1, later = 0; t >= 0; --t, later = 1)
    returns[t] = 1 + (later ? 0.99 * returns[t + 1].item<float>() : 0);
  return {torch::stack(states), torch::tensor(actions), returns};
}

int main(int argc, char** argv) {
  std::string runs = "runs/reinforce";
  int64_t rounds = 40, moves = 1500;
  CLI::App app{"Balances a pole on a cart by policy gradients"};
  app.add_option("--runs", runs, "directory of checkpoints and logs");
  app.add_option("--rounds", rounds, "in all")->check(CLI::PositiveNumber);
  app.add_option("--moves", moves, "that each rank makes in a round, in whole episodes")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  const auto world = tessera::init();
  tessera::manual_seed(1 + world.rank());  // other games on each rank
  Policy policy;
  // Not kParameters: ranks play by themselves, and parameters that are gathered need all ranks.
  auto model = tessera::fully_shard(policy, {.level = tessera::ShardLevel::kGradients});
  torch::optim::AdamW adamw(policy->parameters(), torch::optim::AdamWOptions(5e-3));
  tessera::ShardedOptimizer optimizer(model, adamw);
  tessera::LambdaLR schedule(adamw,
                             tessera::warmup_linear({.steps = rounds + 1, .final_factor = 0.1}));

  int64_t round = 0;
  if (const auto latest = tessera::latest_checkpoint(runs)) {
    const auto loaded =
        tessera::load_checkpoint(*latest, model, &optimizer, {.schedulers = {&schedule}});
    round = static_cast<int64_t>(loaded.numbers.at("round"));
  }
  tessera::MetricsLog log(runs, {.first_step = round + 1});
  tessera::ProgressLine progress(rounds);
  double mean = 0;
  while (round < rounds) {
    std::vector<Episode> episodes;  // good players need fewer episodes for as many moves
    for (int64_t made = 0; made < moves; made += episodes.back().actions.size(0))
      episodes.push_back(play(policy));
    // A step per episode. A rank that has no more takes part in the steps of the others.
    tessera::join(model, {&optimizer}, [&] {
      for (const Episode& episode : episodes) {
        const auto [log_probabilities, values] = policy->forward(episode.states);
        const auto chosen = log_probabilities.gather(1, episode.actions.unsqueeze(1)).squeeze(1);
        const auto better = (episode.returns - values).detach() / 20;
        optimizer.zero_grad();
        (torch::mse_loss(values, episode.returns) * 1e-3 - (chosen * better).mean()).backward();
        optimizer.clip_grad_norm_(1);
        optimizer.step();
      }
    });
    schedule.step();
    double total = 0;
    for (const Episode& episode : episodes) total += static_cast<double>(episode.actions.size(0));
    const auto count = static_cast<double>(episodes.size());
    mean = tessera::mean_over_ranks(total / count, count);
    log.write(++round, {{"moves per episode", mean}, {"episodes", tessera::sum_over_ranks(count)}});
    progress.show(round, fmt::format("{:.0f} moves per episode", mean));
    if (round % 10 == 0 || round == rounds)
      tessera::save_checkpoint(
          fmt::format("{}/round-{}", runs, round), model, &optimizer,
          {.numbers = {{"round", double(round)}}, .schedulers = {&schedule}, .keep_last = 2});
  }
  if (world.rank() == 0)
    fmt::print("after round {}: {:.0f} of 200 moves per episode\n", round, mean);
}
