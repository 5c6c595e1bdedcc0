// Trains the GPT of train_gpt.cpp in one process, with LibTorch alone and OMP_NUM_THREADS threads.
// Its steps are the same: initial values, batches, schedule, clipping, optimizer. `./dev demo
// --compare` compares the two.
#include <fmt/format.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>

#include "gpt.h"

// The fastest step that LibTorch has: one call for all parameters, by vector instructions.
class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_) {
      averages_.push_back(torch::zeros_like(parameter));
      squares_.push_back(torch::zeros_like(parameter));
      steps_.push_back(torch::zeros({}));
    }
  }

  void step(const torch::optim::AdamWOptions& options) {
    torch::NoGradGuard no_grad;
    std::vector<Tensor> gradients;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      gradients.push_back(parameters_[i].grad());
      steps_[i] += 1;
    }
    const auto [beta1, beta2] = options.betas();
    at::_fused_adamw_(parameters_, gradients, averages_, squares_, {}, steps_, options.lr(), beta1,
                      beta2, options.weight_decay(), options.eps(), /*amsgrad=*/false,
                      /*maximize=*/false);
  }

 private:
  std::vector<Tensor> parameters_, averages_, squares_, steps_;
};

int main(int argc, char** argv) {
  TrainingOptions o;
  bool fused = false;
  CLI::App app{"Trains a byte-level GPT on a text in one process, by LibTorch alone"};
  app.option_defaults()->always_capture_default();
  o.add_to(app);
  app.add_option("--device", o.device, "where it computes, such as cuda");
  app.add_flag("--fused", fused, "step with at::_fused_adamw_, in place of torch::optim::AdamW");
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);

  torch::manual_seed(o.seed);
  const auto bytes = read_bytes(o.data);
  const auto train = bytes.narrow(0, 0, bytes.size(0) - bytes.size(0) / 10);
  Gpt gpt(o);
  torch::optim::AdamW adamw(gpt->parameters(), torch::optim::AdamWOptions(o.lr));
  FusedAdamW fused_adamw(fused ? gpt->parameters() : std::vector<Tensor>());
  Pace pace;
  for (int64_t step = 0; step < o.steps; ++step) {
    auto& options = static_cast<torch::optim::AdamWOptions&>(adamw.param_groups()[0].options());
    options.lr(learning_rate(o, step));
    adamw.zero_grad();
    const auto starts = random_starts(train, o.seq, o.batch, o.seed, step);
    const auto loss = gpt->loss(windows(train, starts, o.seq));
    loss.backward();
    if (o.clip > 0) torch::nn::utils::clip_grad_norm_(gpt->parameters(), o.clip);
    if (fused) {
      fused_adamw.step(options);
    } else {
      adamw.step();
    }
    const double value = loss.item<double>();
    pace.step_done();
    if ((step + 1) % 10 == 0 || step + 1 == o.steps)
      fmt::print("step {}/{}  loss {:.4f}\n", step + 1, o.steps, value);
  }
  const double seconds = pace.seconds_per_step();
  fmt::print("speed: {:.0f} bytes per second on {} threads (median step: {:.4f} s)\n",
             o.batch * o.seq / seconds, torch::get_num_threads(), seconds);
}
