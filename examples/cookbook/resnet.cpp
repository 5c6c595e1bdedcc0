// A ResNet on images, with augmentation, batch norm, momentum and a one-cycle schedule.
//   ./dev example cookbook/resnet
// trains it on scikit-learn's handwritten digits, on two ranks. A second call goes on where the
// first one ended; --epochs 0 only evaluates.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>

namespace nn = torch::nn;
using torch::Tensor;

// Images of scripts/export_digits.py: "digits N\n", N times 64 bytes from 0 to 16, N labels.
struct Digits : torch::data::Dataset<Digits> {
  explicit Digits(const std::string& path, bool held_out) {
    std::ifstream file(path, std::ios::binary);
    std::string word;
    int64_t count = 0;
    TORCH_CHECK_VALUE(file >> word >> count && word == "digits",
                      "[resnet] --data must be a file of scripts/export_digits.py; got '", path,
                      "'");
    file.get();
    auto bytes = torch::empty({65 * count}, torch::kByte);
    file.read(static_cast<char*>(bytes.data_ptr()), 65 * count);
    TORCH_CHECK_VALUE(file, "[resnet] '", path, "' is cut off");
    const auto mine = (torch::arange(count) % 5 == 0) == held_out;
    pixels = bytes.narrow(0, 0, 64 * count).view({count, 1, 8, 8}).index({mine}) / 16.0F;
    labels = bytes.narrow(0, 64 * count, count).index({mine}).to(torch::kLong);
  }
  torch::data::Example<> get(size_t i) override {
    return {pixels[static_cast<int64_t>(i)], labels[static_cast<int64_t>(i)]};
  }
  torch::optional<size_t> size() const override { return labels.size(0); }

  Tensor pixels, labels;
};

nn::Conv2d conv(int64_t in, int64_t out, int64_t size, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

struct BlockImpl : nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride) {
    body->push_back(conv(in, out, 3, stride));
    body->push_back(nn::BatchNorm2d(out));
    body->push_back(nn::ReLU());
    body->push_back(conv(out, out, 3, 1));
    body->push_back(nn::BatchNorm2d(out));
    if (in == out && stride == 1) return;
    shortcut->push_back(conv(in, out, 1, stride));
    shortcut->push_back(nn::BatchNorm2d(out));
  }
  Tensor forward(const Tensor& x) {
    return torch::relu(body->forward(x) + (shortcut->is_empty() ? x : shortcut->forward(x)));
  }
  nn::Sequential body = register_module("body", nn::Sequential());
  nn::Sequential shortcut = register_module("shortcut", nn::Sequential());
};
TORCH_MODULE(Block);

struct ResNetImpl : nn::Module {
  ResNetImpl() {
    stages->push_back(conv(1, 16, 3, 1));
    for (const int64_t width : {16, 32, 64}) {
      stages->push_back(Block(width == 16 ? 16 : width / 2, width, width == 16 ? 1 : 2));
      stages->push_back(Block(width, width, 1));
    }
  }
  Tensor forward(const Tensor& x) { return head(stages->forward(x).mean({2, 3})); }
  nn::Sequential stages = register_module("stages", nn::Sequential());
  nn::Linear head = register_module("head", nn::Linear(64, 10));
};
TORCH_MODULE(ResNet);

// Shifts all images of a batch by up to a pixel, and hides a square of 2 x 2 pixels in each.
Tensor augmented(const Tensor& images) {
  const auto shift = [] { return torch::randint(3, {}).item<int64_t>(); };
  const auto padded = torch::constant_pad_nd(images, {1, 1, 1, 1});
  const auto shifted = padded.narrow(2, shift(), 8).narrow(3, shift(), 8);
  const auto at = torch::randint(7, {2, images.size(0), 1, 1, 1}), line = torch::arange(8);
  const auto is_in = [&](int64_t dim) { return (line >= at[dim]) & (line < at[dim] + 2); };
  return shifted.masked_fill(is_in(0).transpose(2, 3) & is_in(1), 0);
}

int main(int argc, char** argv) {
  std::string data = "data/digits.bin", runs = "runs/resnet";
  int64_t epochs = 10, batch = 32;
  CLI::App app{"A ResNet on handwritten digits"};
  app.add_option("--data", data)->check(CLI::ExistingFile);
  app.add_option("--runs", runs, "directory of checkpoints and logs");
  app.add_option("--epochs", epochs, "in all")->check(CLI::PositiveNumber);
  app.add_option("--batch", batch, "per step and rank")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);

  const auto world = tessera::init();
  tessera::manual_seed(1 + world.rank());  // augmentation differs; the model is rank 0's
  ResNet net;
  // Batch norm computes with the rank's own rows; all evaluate with the statistics of rank 0.
  auto model = tessera::fully_shard(net, {.sync_buffers = true});
  torch::optim::SGD sgd(net->parameters(),
                        torch::optim::SGDOptions(0.2).momentum(0.9).weight_decay(5e-4));
  tessera::ShardedOptimizer optimizer(model, sgd);

  Digits learned(data, false), held_out(data, true);
  tessera::ResumableSampler sampler(
      torch::data::samplers::DistributedRandomSampler(*learned.size(), world.size(), world.rank()));
  auto loader = torch::data::make_data_loader(learned.map(torch::data::transforms::Stack<>()),
                                              sampler, torch::data::DataLoaderOptions(batch));
  const auto steps_per_epoch = (*learned.size() / world.size() + batch - 1) / batch;
  const int64_t steps = epochs * steps_per_epoch;
  tessera::OneCycleLR schedule(sgd, {.steps = steps});

  int64_t step = 0;
  if (const auto latest = tessera::latest_checkpoint(runs)) {
    const auto loaded =
        tessera::load_checkpoint(*latest, model, &optimizer, {.schedulers = {&schedule}});
    step = static_cast<int64_t>(loaded.numbers.at("step"));
    sampler.load_state(loaded.rank_state.at("sampler"));
  }
  tessera::MetricsLog log(runs, {.first_step = step + 1});
  tessera::ProgressLine progress(steps);
  for (auto epoch = static_cast<int64_t>(sampler.inner().epoch()); epoch < epochs; ++epoch) {
    sampler.inner().set_epoch(epoch);
    net->train();
    for (const auto& examples : *loader) {
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(model(augmented(examples.data)), examples.target);
      loss.backward();
      optimizer.step();
      const double mean = tessera::mean_over_ranks(loss.item<double>());
      log.write(++step, {{"loss", mean}, {"lr", sgd.param_groups()[0].options().get_lr()}});
      schedule.step();
      progress.show(step, fmt::format("loss {:.3f}", mean));
    }
    tessera::save_checkpoint(fmt::format("{}/step-{}", runs, step), model, &optimizer,
                             {.numbers = {{"step", double(step)}},
                              .schedulers = {&schedule},
                              .rank_state = {{"sampler", sampler.state()}},
                              .keep_last = 2});
  }
  net->eval();
  torch::NoGradGuard no_grad;
  const auto mine = torch::arange(held_out.labels.size(0)) % world.size() == world.rank();
  const auto right =
      model(held_out.pixels.index({mine})).argmax(1) == held_out.labels.index({mine});
  const double accuracy = tessera::sum_over_ranks(right.sum().item<double>()) / *held_out.size();
  if (world.rank() == 0)
    fmt::print("after step {}: held-out accuracy {:.2f} %\n", step, 100 * accuracy);
}
