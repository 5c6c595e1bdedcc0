// A GAN: two models with an optimizer each, the average of the generator, and one checkpoint of
// all.
//   ./dev example cookbook/gan
// learns 8 clouds of points on a circle, on two ranks. A second call goes on where the first ended.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <numbers>

namespace nn = torch::nn;
using torch::Tensor;

constexpr int64_t kClouds = 8, kNoise = 8;
constexpr double kSpread = 0.05;

nn::Sequential mlp(int64_t in, int64_t out) {
  const auto leaky = nn::LeakyReLUOptions().negative_slope(0.2);
  return nn::Sequential(nn::Linear(in, 128), nn::LeakyReLU(leaky), nn::Linear(128, 128),
                        nn::LeakyReLU(leaky), nn::Linear(128, out));
}

Tensor centers() {
  const auto angle = torch::arange(kClouds) * (2 * std::numbers::pi / kClouds);
  return torch::stack({angle.cos(), angle.sin()}, 1);
}

Tensor real_points(int64_t count) {
  return centers().index_select(0, torch::randint(kClouds, {count})) +
         kSpread * torch::randn({count, 2});
}

// The part of the points that lie in a cloud, and the number of clouds that have some.
std::pair<double, int64_t> quality(const Tensor& points) {
  const auto [distance, cloud] = torch::cdist(points, centers()).min(1);
  const auto near = distance < 4 * kSpread;
  const auto found = torch::bincount(cloud.masked_select(near), {}, kClouds);
  return {near.to(torch::kDouble).mean().item<double>(),
          (found > points.size(0) / 100).sum().item<int64_t>()};
}

int main(int argc, char** argv) {
  std::string runs = "runs/gan";
  int64_t steps = 3000, batch = 128, save_every = 500;
  CLI::App app{"A GAN that learns clouds of points"};
  app.add_option("--runs", runs, "directory of checkpoints and logs");
  app.add_option("--steps", steps, "in all")->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "points per step and rank")->check(CLI::PositiveNumber);
  app.add_option("--save-every", save_every)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  const auto world = tessera::init();
  tessera::manual_seed(1 + world.rank());
  auto make_points = mlp(kNoise, 2), judge = mlp(2, 1);
  auto generator = tessera::fully_shard(make_points), critic = tessera::fully_shard(judge);
  const auto options = torch::optim::AdamOptions(1e-3).betas({0.5, 0.9});
  torch::optim::Adam adam_g(make_points->parameters(), options),
      adam_c(judge->parameters(), options);
  tessera::ShardedOptimizer for_generator(generator, adam_g), for_critic(critic, adam_c);
  tessera::LambdaLR schedule_g(adam_g, tessera::warmup_cosine({.warmup = 100, .steps = steps}));
  tessera::LambdaLR schedule_c(adam_c, tessera::warmup_cosine({.warmup = 100, .steps = steps}));
  tessera::ExponentialAverage average(generator, 0.995);
  const std::vector<tessera::CheckpointModel> models = {{"generator", generator, &for_generator},
                                                        {"critic", critic, &for_critic},
                                                        {"average", average}};
  const std::vector<tessera::SchedulerPtr> schedules = {&schedule_g, &schedule_c};

  int64_t step = 0;
  if (const auto latest = tessera::latest_checkpoint(runs)) {
    const auto loaded = tessera::load_checkpoint(*latest, models, {.schedulers = schedules});
    step = static_cast<int64_t>(loaded.numbers.at("step"));
  }
  tessera::MetricsLog log(runs, {.first_step = step + 1});
  tessera::ProgressLine progress(steps);
  const auto noise = [&] { return torch::randn({batch, kNoise}); };
  while (step < steps) {
    // The critic tells real points from made ones.
    for_critic.zero_grad();
    const auto made = make_points->forward(noise()).detach();
    const auto critic_loss = torch::softplus(-judge->forward(real_points(batch))).mean() +
                             torch::softplus(judge->forward(made)).mean();
    critic_loss.backward();
    for_critic.step();
    schedule_c.step();
    // The generator makes points that the critic takes for real. The critic's gradients of this
    // backward are not sent, and its next zero_grad() drops them.
    for_generator.zero_grad();
    const auto unsent = critic.no_sync();
    const auto loss = torch::softplus(-judge->forward(make_points->forward(noise()))).mean();
    loss.backward();
    for_generator.step();
    schedule_g.step();
    average.update();
    ++step;
    const auto mean = tessera::mean_over_ranks(
        {{"critic", critic_loss.item<double>()}, {"generator", loss.item<double>()}});
    log.write(step, mean);
    progress.show(step, fmt::format("critic {:.3f}  generator {:.3f}", mean.at("critic"),
                                    mean.at("generator")));
    if (step % save_every == 0 || step == steps)
      tessera::save_checkpoint(
          fmt::format("{}/step-{}", runs, step), models,
          {.numbers = {{"step", double(step)}}, .schedulers = schedules, .keep_last = 2});
  }
  torch::NoGradGuard no_grad;
  const auto evaluate = [&] {
    const auto [part, clouds] = quality(make_points->forward(torch::randn({2000, kNoise})));
    return std::pair(tessera::mean_over_ranks(part), clouds);
  };
  const auto [last, last_clouds] = evaluate();
  const auto [averaged, clouds] = average.evaluate(evaluate);
  if (world.rank() == 0)
    fmt::print(
        "after step {}: {:.1f} % of the points in {} of 8 clouds; by the average: {:.1f} %, {}\n",
        step, 100 * last, last_clouds, 100 * averaged, clouds);
}
