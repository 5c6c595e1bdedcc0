// Evaluation and early stopping: every rank evaluates its part of the held-out data, training ends
// when the result has not improved for some time, and the best checkpoint is what remains.
//   ./dev example cookbook/early_stopping
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <limits>

namespace nn = torch::nn;
using torch::Tensor;

struct Rows {
  Tensor x, y;

  Rows at(const Tensor& rows) const { return {x.index({rows}), y.index({rows})}; }
  int64_t size() const { return x.size(0); }
};

// Friedman's regression problem (1991): 5 of 10 inputs matter, and there is noise.
Rows friedman(int64_t count, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto x = torch::rand({count, 10}, generator);
  const auto of = [&](int64_t column) { return x.select(1, column); };
  const auto y =
      10 * torch::sin(M_PI * of(0) * of(1)) + 20 * (of(2) - 0.5).square() + 10 * of(3) + 5 * of(4);
  return {x, y + torch::randn({count}, generator)};
}

struct NetImpl : nn::Module {
  Tensor forward(const Tensor& x) { return layers->forward(x).squeeze(1); }
  nn::Sequential layers =
      register_module("layers", nn::Sequential(nn::Linear(10, 256), nn::GELU(), nn::Dropout(0.1),
                                               nn::Linear(256, 256), nn::GELU(), nn::Dropout(0.1),
                                               nn::Linear(256, 1)));
};
TORCH_MODULE(Net);

int main(int argc, char** argv) {
  std::string runs = "runs/early_stopping";
  int64_t epochs = 200, batch = 32, patience = 15;
  CLI::App app{"Stops when the held-out error no longer falls"};
  app.add_option("--runs", runs, "directory of checkpoints and logs");
  app.add_option("--epochs", epochs, "at most")->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "rows per step and rank")->check(CLI::PositiveNumber);
  app.add_option("--patience", patience, "epochs without improvement")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  const auto world = tessera::init();
  tessera::manual_seed(1 + world.rank());
  const Rows learned = friedman(1000, 1), held_out = friedman(333, 2);
  Net net;
  auto model = tessera::fully_shard(net);
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(3e-3).weight_decay(0.01));
  tessera::ShardedOptimizer optimizer(model, adamw);
  // A scheduler of LibTorch that looks at the held-out error: a tenth after 5 epochs without a
  // better one.
  torch::optim::ReduceLROnPlateauScheduler schedule(
      adamw, torch::optim::ReduceLROnPlateauScheduler::min, 0.1, 5);

  // The mean over all rows; ranks have different numbers of them, and call the model equally often.
  const auto error = [&](const Rows& rows) {
    torch::NoGradGuard no_grad;
    net->eval();
    const Rows mine = rows.at(torch::arange(rows.size()) % world.size() == world.rank());
    const double own = torch::mse_loss(net->forward(mine.x), mine.y).item<double>();
    net->train();
    return tessera::mean_over_ranks(own, static_cast<double>(mine.size()));
  };

  int64_t epoch = 0, best_epoch = 0;
  double best = std::numeric_limits<double>::infinity();
  if (const auto latest = tessera::latest_checkpoint(runs)) {
    const auto loaded =
        tessera::load_checkpoint(*latest, model, &optimizer, {.schedulers = {&schedule}});
    epoch = static_cast<int64_t>(loaded.numbers.at("epoch"));
    best_epoch = static_cast<int64_t>(loaded.numbers.at("best epoch"));
    best = loaded.numbers.at("best");
  }
  tessera::MetricsLog log(runs, {.first_step = epoch + 1});
  tessera::ProgressLine progress(epochs);
  const auto rows = learned.size() / world.size() / batch * batch;  // whole batches of each rank
  while (epoch < epochs && epoch - best_epoch < patience) {
    // All ranks shuffle alike, and each takes its part.
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + epoch);
    const auto order = torch::randperm(learned.size(), generator, torch::kLong);
    double sum = 0;
    for (int64_t begin = 0; begin < rows; begin += batch) {
      const Rows part = learned.at(order.narrow(0, world.rank() * rows + begin, batch));
      optimizer.zero_grad();
      const auto loss = torch::mse_loss(net->forward(part.x), part.y);
      loss.backward();
      optimizer.step();
      sum += loss.item<double>() * static_cast<double>(batch);
    }
    const double trained = tessera::mean_over_ranks(sum / static_cast<double>(rows)),
                 now = error(held_out);
    schedule.step(static_cast<float>(now));
    ++epoch;
    if (now < best) best = now, best_epoch = epoch;
    log.write(epoch, {{"error", trained},
                      {"held-out error", now},
                      {"lr", adamw.param_groups()[0].options().get_lr()}});
    progress.show(epoch, fmt::format("error {:.3f}  held-out {:.3f}", trained, now));
    tessera::save_checkpoint(fmt::format("{}/epoch-{}", runs, epoch), model, &optimizer,
                             {.numbers = {{"epoch", double(epoch)},
                                          {"held-out error", now},
                                          {"best", best},
                                          {"best epoch", double(best_epoch)}},
                              .schedulers = {&schedule},
                              .keep_last = 2,
                              .keep_best = tessera::BestBy{"held-out error"}});
  }
  const auto path = tessera::best_checkpoint(runs, {"held-out error"});
  tessera::load_checkpoint(*path, model, nullptr);
  const double of_best = error(held_out), tested = error(friedman(2000, 3));
  if (world.rank() == 0)
    fmt::print(
        "stopped after epoch {}; the best is that of epoch {}: held-out error {:.4f}, error on new "
        "data {:.4f}\n",
        epoch, best_epoch, of_best, tested);
}
