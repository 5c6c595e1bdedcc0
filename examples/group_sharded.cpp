// The same training through Paddle's interface: `group_sharded_parallel` with the levels `os`,
// `os_g` and `p_g_os`.
//
//   tessera run -n 2 build/dev/examples/group_sharded p_g_os runs/points
//
// The second argument is a directory that the model is saved in; without it nothing is saved.
//
// Specific to Paddle: the names of the levels, `segment_size` and `buffer_max_size` in elements,
// and the wrapped optimizer that is returned, with `clear_grad()`, `get_lr()` and `set_lr()`.
#include <tessera/base/generator.h>
#include <tessera/comm/world.h>
#include <tessera/dialects/paddle_group_sharded.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace nn = torch::nn;

// An ordinary classifier. Nothing in it knows that it will be sharded.
struct ClassifierImpl : nn::Module {
  ClassifierImpl(int64_t features, int64_t width, int64_t classes)
      : in(register_module("in", nn::Linear(features, width))),
        hidden(register_module("hidden", nn::Linear(width, width))),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        out(register_module("out", nn::Linear(width, classes))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = torch::gelu(in(x));
    return out(norm(x + torch::gelu(hidden(x))));
  }

  nn::Linear in, hidden;
  nn::LayerNorm norm;
  nn::Linear out;
};
TORCH_MODULE(Classifier);

// Points around one centre per class: easy to learn, so a falling loss shows that training works.
struct Points {
  Points(int64_t features, int64_t classes, uint64_t rank)
      : centres([&] {
          auto shared = at::make_generator<at::CPUGeneratorImpl>(7);
          return torch::randn({classes, features}, shared);
        }()),
        generator(at::make_generator<at::CPUGeneratorImpl>(1000 + rank)) {}

  std::pair<torch::Tensor, torch::Tensor> batch(int64_t rows) {
    auto labels = torch::randint(0, centres.size(0), {rows}, generator, torch::kLong);
    auto noise = torch::randn({rows, centres.size(1)}, generator);
    return {centres.index({labels}) + 2 * noise, labels};
  }

  torch::Tensor centres;
  at::Generator generator;
};

void train(const tessera::World& world, const std::string& level, const std::string& output) {
  constexpr int64_t kFeatures = 32, kClasses = 10, kSteps = 60;
  tessera::manual_seed(0);
  Classifier net(kFeatures, 512, kClasses);
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(1e-3));

  // `segment_size`: parameters of at most this many elements stay whole at `p_g_os`. Paddle's
  // default of 2^20 is larger than anything in this small model.
  auto [model, optimizer, scaler] = tessera::paddle::group_sharded_parallel(
      net.ptr(), adamw, level, {.sync_buffers = true, .segment_size = 4096});

  Points points(kFeatures, kClasses, world.rank());
  for (int64_t step = 1; step <= kSteps; ++step) {
    optimizer.clear_grad();
    auto [x, labels] = points.batch(64);
    auto loss = torch::cross_entropy_loss(model(x), labels);
    loss.backward();
    optimizer.step();
    if (step == kSteps / 2) {
      optimizer.set_lr(optimizer.get_lr() / 10);
    }
    if (world.rank() == 0 && (step == 1 || step % 10 == 0)) {
      std::printf("step %2lld  loss %.4f  lr %g\n", static_cast<long long>(step),
                  loss.item<double>(), optimizer.get_lr());
    }
  }
  if (!output.empty()) {
    tessera::paddle::save_group_sharded_model(model, output, &optimizer);
  }
  const auto kept = optimizer.memory();
  std::printf(
      "rank %d keeps %lld bytes of parameters, %lld of gradients, %lld of optimizer state\n",
      world.rank(), static_cast<long long>(kept.parameters), static_cast<long long>(kept.gradients),
      static_cast<long long>(kept.optimizer_state));
}

int main(int argc, char** argv) {
  try {
    auto world = tessera::init();
    train(world, argc > 1 ? argv[1] : "p_g_os", argc > 2 ? argv[2] : "");
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "group_sharded: %s\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
