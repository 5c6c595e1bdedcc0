// A rank that trains a small model for many steps, with everything that a long run does besides.
//
//   soak_worker STEPS REPORT_EVERY DIRECTORY
//   soak_worker --elastic STEPS DIRECTORY
//
// With --elastic, rank R writes its process number to DIRECTORY/rank_R.pid, goes on from the last
// checkpoint there, and saves one every 50 steps; rank 0 appends "STEP LOSS" to DIRECTORY/losses. A
// step's data depends on its number alone. Otherwise:
//
// Each step accumulates two backwards, of which every third step keeps the first under no_sync().
// Every 100 steps the model is evaluated; every 500 steps a checkpoint is saved in DIRECTORY, which
// keeps two, and the forward of all ranks throws, after which training goes on. Every REPORT_EVERY
// steps each rank prints "step S resident KIB descriptors N threads N loss L", L in hexadecimal.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>

#include "faults/training.h"

namespace {

constexpr int64_t kEvaluateEvery = 100, kSaveEvery = 500, kThrowEvery = 500;

struct OutOfData : std::runtime_error {
  OutOfData() : std::runtime_error("out of data") {}
};

int64_t status_number(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key + ":")) return std::atoll(line.c_str() + key.size() + 1);
  }
  throw std::runtime_error("/proc/self/status lacks " + key);
}

void report(int64_t step, double loss) {
  const std::filesystem::directory_iterator descriptors("/proc/self/fd");
  std::printf("step %ld resident %ld descriptors %ld threads %ld loss %a\n",
              static_cast<long>(step), static_cast<long>(status_number("VmRSS")),
              static_cast<long>(std::distance(begin(descriptors), end(descriptors))),
              static_cast<long>(status_number("Threads")), loss);
  std::fflush(stdout);
}

void evaluate(tessera::Training& training) {
  const torch::NoGradGuard no_grad;
  training.model->eval();
  training.loss();
  training.model->train();
}

// A forward that ends in its middle.
void throw_and_catch(tessera::Training& training) {
  training.trap->in_forward = [] { throw OutOfData(); };
  try {
    training.loss();
  } catch (const OutOfData&) {
  }
  training.trap->in_forward = nullptr;
}

// Returns the second loss.
double train_step(tessera::Training& training, int64_t step) {
  training.optimizer.zero_grad();
  {
    std::optional<tessera::ShardedModule::NoSync> no_sync;
    if (step % 3 == 0) no_sync.emplace(training.sharded.state());
    training.loss().backward();
  }
  const auto loss = training.loss();
  loss.backward();
  training.optimizer.step();
  return loss.item<double>();
}

void train(int64_t steps, int64_t report_every, const std::filesystem::path& directory) {
  const auto world = tessera::init();
  std::printf("over %s\n", world.process_group()->backend_name().c_str());
  tessera::manual_seed(5);
  tessera::Training training;
  tessera::manual_seed(100 + world.rank());
  for (int64_t step = 1; step <= steps; ++step) {
    const double loss = train_step(training, step);
    if (step % kEvaluateEvery == 0) evaluate(training);
    if (step % kThrowEvery == kThrowEvery / 2) throw_and_catch(training);
    if (step % kSaveEvery == 0)
      tessera::save_checkpoint(directory / ("step-" + std::to_string(step)), training.sharded,
                               &training.optimizer, {.keep_last = 2});
    if (step % report_every == 0) report(step, loss);
  }
}

void train_on(int64_t steps, const std::filesystem::path& directory) {
  const auto world = tessera::init();
  std::ofstream(directory / ("rank_" + std::to_string(world.rank()) + ".pid")) << ::getpid();
  std::ofstream losses;
  if (world.rank() == 0) losses.open(directory / "losses", std::ios::app);
  losses << std::hexfloat;
  tessera::manual_seed(5);
  tessera::Training training;
  int64_t done = 0;
  if (const auto last = tessera::latest_checkpoint(directory))
    done = static_cast<int64_t>(
        tessera::load_checkpoint(*last, training.sharded, &training.optimizer).numbers.at("step"));
  for (int64_t step = done + 1; step <= steps; ++step) {
    tessera::manual_seed(step * 100 + world.rank());
    training.optimizer.zero_grad();
    const auto loss = training.loss();
    loss.backward();
    training.optimizer.step();
    losses << step << ' ' << loss.item<double>() << std::endl;
    if (step % 50 == 0)
      tessera::save_checkpoint(directory / ("step-" + std::to_string(step)), training.sharded,
                               &training.optimizer,
                               {.numbers = {{"step", static_cast<double>(step)}}, .keep_last = 2});
  }
  world.process_group()->barrier({.subject = "end"});
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return 2;
  try {
    if (std::string(arguments[1]) == "--elastic") {
      train_on(std::atoll(arguments[2]), arguments[3]);
    } else {
      train(std::atoll(arguments[1]), std::atoll(arguments[2]), arguments[3]);
    }
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "soak_worker: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "soak_worker: %s\n", error.what());
    return 1;
  }
  return 0;
}
