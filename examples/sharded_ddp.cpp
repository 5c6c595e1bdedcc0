// Learns handwritten digits with FairScale's interface: the optimizer's work and state are divided
// among the ranks, and each gradient is averaged on the rank that needs it.
//   ./dev example sharded_ddp
// or, with images from `python scripts/export_digits.py data/digits.bin`,
//   tessera run -n 2 build/release/examples/sharded_ddp --data data/digits.bin
//
// Each batch is a pure function of seed and step and is cut over the ranks: losses and accuracy are
// those of one process. Batch norm would have statistics of each rank's own rows; the model has
// none.
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <fstream>

namespace nn = torch::nn;
using tessera::fairscale::OSS;
using tessera::fairscale::ShardedDataParallel;
using torch::Tensor;

struct Options {
  std::string data = "data/digits.bin", losses;
  int64_t epochs = 16, batch = 64, seed = 1;
  double lr = 0.05;
};

struct NetImpl : nn::Module {
  Tensor forward(Tensor x) {
    x = torch::max_pool2d(torch::relu(conv1(x)), 2);
    x = torch::max_pool2d(torch::relu(conv2(x)), 2);
    return out(x.flatten(1));
  }

  nn::Conv2d conv1 = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)));
  nn::Conv2d conv2 = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)));
  nn::Linear out = register_module("out", nn::Linear(2 * 2 * 32, 10));
};
TORCH_MODULE(Net);

struct Images {
  Tensor pixels, labels;  // (N, 1, 8, 8) from 0 to 1; (N)

  /// Returns the images of the given numbers, or those where a mask is true.
  Images at(const Tensor& rows) const { return {pixels.index({rows}), labels.index({rows})}; }
};

/// Reads a file of scripts/export_digits.py: "digits N
/// ", N images of 64 bytes, N labels.
Images read_images(const std::string& path) {
  const auto make = fmt::format(
      " (`./dev example sharded_ddp` makes data/digits.bin; with scikit-learn, `python "
      "scripts/export_digits.py {}` makes this file)",
      path);
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK_VALUE(file, "[sharded_ddp] --data must be a file that can be read; got '", path, "'",
                    make);
  std::string word;
  int count = 0;
  TORCH_CHECK_VALUE(file >> word >> count && word == "digits" && count > 0 && file.get() == '\n',
                    "[sharded_ddp] '", path, "' must begin with a line \"digits N\"", make);
  const std::vector<uint8_t> all((std::istreambuf_iterator<char>(file)), {});
  const int64_t pixels = int64_t{64} * count, expected = pixels + count;
  TORCH_CHECK_VALUE(std::ssize(all) == expected, "[sharded_ddp] '", path, "' must hold ", count,
                    " images; expected ", expected, " bytes after its first line, got ", all.size(),
                    make);
  const auto bytes = torch::tensor(all, torch::kByte);
  const auto images = bytes.narrow(0, 0, pixels), labels = bytes.narrow(0, pixels, count);
  const auto most = std::pair(images.max().item<int>(), labels.max().item<int>());
  TORCH_CHECK_VALUE(most.first <= 16 && most.second <= 9, "[sharded_ddp] '", path,
                    "' must have pixels up to 16 and labels up to 9; got ", most.first, " and ",
                    most.second, make);
  return {images.view({count, 1, 8, 8}).to(torch::kFloat) / 16, labels.to(torch::kLong)};
}

struct Job {
  Tensor sum_over_ranks(const Tensor& values) const {
    const auto& ranks = world.process_group();
    ranks->all_reduce(values, tessera::ReduceOp::kSum, {.subject = "report"})->wait();
    return values;
  }

  /// Returns the loss of each step of an epoch. Leaves out images beyond the last full batch.
  Tensor train(int64_t epoch) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(o.seed * 1'000'003 + epoch);
    const auto order = torch::randperm(learned.labels.size(0), generator, torch::kLong);
    const auto losses = torch::zeros({order.size(0) / o.batch});
    const auto rows = o.batch / world.size();
    model.train();
    for (int64_t step = 0; step < losses.size(0); ++step) {
      const auto batch = learned.at(order.narrow(0, step * o.batch + world.rank() * rows, rows));
      optimizer.zero_grad();
      const auto loss = torch::cross_entropy_loss(model.forward(batch.pixels), batch.labels);
      loss.backward();
      optimizer.step();
      losses[step] = loss.detach() / world.size();
    }
    return sum_over_ranks(losses);
  }

  /// Returns the percentage of held-out images that are recognized; each rank evaluates its part.
  double accuracy() {
    torch::NoGradGuard no_grad;
    model.eval();
    const auto count = held_out.labels.size(0);
    const auto part = held_out.at(torch::arange(count) % world.size() == world.rank());
    const auto right = model.forward(part.pixels).argmax(1) == part.labels;
    return 100.0 * sum_over_ranks(right.sum()).item<double>() / count;
  }

  void run() {
    std::ofstream file(world.rank() == 0 ? o.losses : "");
    torch::optim::StepLR schedule(optimizer, std::max<int64_t>(1, o.epochs * 3 / 4), 0.1);
    for (int64_t epoch = 0; epoch < o.epochs; ++epoch) {
      const auto losses = train(epoch);
      schedule.step();
      const double percent = accuracy();
      for (int64_t i = 0; i < losses.size(0); ++i)
        file << fmt::format("{:.9g}\n", losses[i].item<float>());
      if (world.rank() == 0)
        fmt::print("epoch {}/{}  loss {:.4f}  held-out accuracy {:.2f} %\n", epoch + 1, o.epochs,
                   losses.mean().item<float>(), percent);
    }
    fmt::print("rank {} keeps {} bytes of momentum\n", world.rank(),
               optimizer.memory().optimizer_state);
  }

  const Options& o;
  const tessera::World& world;
  Images learned, held_out;
  Net net;
  OSS<torch::optim::SGD> optimizer{net->parameters(), torch::optim::SGDOptions(o.lr).momentum(0.9)};
  ShardedDataParallel<Net> model{net, optimizer};
};

void learn(const Options& o) {
  const auto images = read_images(o.data);
  const auto fifth = torch::arange(images.labels.size(0)) % 5 == 0;  // held out
  const auto world = tessera::init();
  TORCH_CHECK_VALUE(o.batch % world.size() == 0, "[sharded_ddp] --batch is that of all ranks; ",
                    "expected a multiple of ", world.size(), ", got ", o.batch);
  const auto learned = images.at(~fifth);
  TORCH_CHECK_VALUE(o.batch <= learned.labels.size(0), "[sharded_ddp] --batch must be at most the ",
                    learned.labels.size(0), " images to learn; got ", o.batch);
  tessera::manual_seed(o.seed);
  Job{o, world, learned, images.at(fifth)}.run();
}

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"Learns handwritten digits; the ranks share the optimizer's work and state"};
  const CLI::Validator positive = CLI::PositiveNumber, natural = CLI::NonNegativeNumber;
  app.option_defaults()->always_capture_default();
  app.add_option("--data", o.data, "images, as scripts/export_digits.py writes them");
  app.add_option("--losses", o.losses, "file for the loss of each step, one per line");
  app.add_option("--lr", o.lr, "learning rate; a tenth of it in the last quarter");
  app.add_option("--epochs", o.epochs, "times to go through the images")->check(positive);
  app.add_option("--batch", o.batch, "images per step, over all ranks")->check(positive);
  app.add_option("--seed", o.seed, "of initial values and batches")->check(natural);
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    learn(o);
  } catch (const c10::Error& error) {
    fmt::print(stderr, "sharded_ddp: {}\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
