// Ranks that fork while they train, as loaders with workers do.
//
//   fork_probe [read | workers | programs | leave | collective]
//
// Trains a small model for four steps. After the second one each rank, depending on the mode:
//   read        has a child read, write and allocate tensors while it goes on with its own memory
//   workers     has two children make batches of a data set that existed before, for each step
//   programs    runs programs by system(), popen() and std::async() in a child
//   leave       has a child return from main(), where its parent's world ends
//   collective  has a child call a collective, which must throw
// At the end each rank prints "rank R sum HEX" with the bits of a sum over all parameters.

#include <sys/wait.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr int64_t kNumel = 1'000'000;
constexpr int kSteps = 4;

struct ReturnFromMain {};

int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

pid_t fork_child(const std::function<void()>& fn) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::alarm(30);
  try {
    fn();
  } catch (const ReturnFromMain&) {
    throw;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fork_probe: in a child: %s\n", error.what());
    ::_exit(1);
  }
  ::_exit(0);
}

void expect(bool holds, const char* what) { TORCH_CHECK(holds, "expected that ", what); }

int64_t sum_of(const torch::Tensor& tensor) { return tensor.sum().item<int64_t>(); }

void read_and_write(const torch::Tensor& made, const torch::nn::Sequential& model, double sum) {
  const int64_t expected = kNumel * (kNumel - 1) / 2;
  expect(sum_of(made) == expected, "a child reads what its parent had made");
  double seen = 0;
  for (const auto& parameter : model->parameters())
    seen += parameter.detach().to(torch::kDouble).sum().item<double>();
  expect(seen == sum, "a child reads parameters");
  for (int round = 0; round < 50; ++round) {
    expect(sum_of(torch::full({kNumel}, round)) == kNumel * round, "a child makes tensors");
    expect(sum_of(made) == expected, "what its parent frees stays with a child");
  }
  made.fill_(1);
  expect(sum_of(made) == kNumel, "a child writes to what its parent had made");
}

// The parent frees tensors that the child reads, and reuses their memory.
void read_in_child(const torch::nn::Sequential& model) {
  double sum = 0;
  for (const auto& parameter : model->parameters())
    sum += parameter.detach().to(torch::kDouble).sum().item<double>();
  auto made = torch::arange(kNumel), kept = torch::arange(kNumel);
  const pid_t child = fork_child([&] {
    read_and_write(made, model, sum);
    read_and_write(kept, model, sum);
  });
  made = torch::Tensor();
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    std::vector<torch::Tensor> others;
    for (int i = 0; i < 8; ++i) others.push_back(torch::full({kNumel}, -1));
  }
  expect(status == 0, "the child is content");
  expect(sum_of(kept) == kNumel * (kNumel - 1) / 2, "writes of a child stay its own");
}

class Workers {
 public:
  Workers() {
    for (int worker = 0; worker < 2; ++worker) {
      std::array<int, 2> ends{};
      expect(::pipe(ends.data()) == 0, "a pipe can be made");
      children_.push_back(fork_child([&] { work(worker, ends[1]); }));
      ::close(ends[1]);
      pipes_.push_back(ends[0]);
    }
  }
  ~Workers() {
    for (const int pipe : pipes_) ::close(pipe);
    for (const pid_t child : children_) wait_for(child);
  }

  // Returns the sum of the batch, as sent by the worker.
  int64_t batch(int step) {
    int64_t sum = 0;
    expect(::read(pipes_[step % 2], &sum, sizeof(sum)) == sizeof(sum), "a worker sends a batch");
    return sum;
  }
  int64_t expected(int step) const { return sum_of(data_[step]); }

 private:
  void work(int worker, int pipe) const {
    for (int step = worker; step < kSteps; step += 2) {
      const auto batch = std::async(std::launch::async, [&] { return data_[step].clone(); }).get();
      const int64_t sum = sum_of(batch);
      expect(::write(pipe, &sum, sizeof(sum)) == sizeof(sum), "its parent reads");
    }
  }

  const torch::Tensor data_ = torch::arange(kSteps * kNumel).view({kSteps, kNumel});
  std::vector<pid_t> children_;
  std::vector<int> pipes_;
};

void run_programs() {
  expect(WEXITSTATUS(std::system("exit 3")) == 3, "system() runs a program");
  std::FILE* const pipe = ::popen("echo heard", "r");
  std::array<char, 16> text{};
  expect(pipe && std::fgets(text.data(), text.size(), pipe), "popen() runs a program");
  expect(std::string(text.data()) == "heard\n" && ::pclose(pipe) == 0, "it is heard");
}

void call_collective(const tessera::World& world) {
  try {
    auto number = torch::ones({1});
    world.process_group()->all_reduce(number, tessera::ReduceOp::kSum, {.subject = "x"})->wait();
  } catch (const c10::DistBackendError& error) {
    const std::string text = error.what_without_backtrace();
    expect(text.find("this one was forked") != std::string::npos, "the error says why");
    return;
  }
  expect(false, "a collective of a child throws");
}

void fork_once(const std::string& mode, const tessera::World& world,
               const torch::nn::Sequential& model) {
  if (mode == "read") read_in_child(model);
  if (mode == "programs") {
    run_programs();
    expect(wait_for(fork_child([] { std::async(std::launch::async, run_programs).get(); })) == 0,
           "the child is content");
  }
  if (mode == "leave")
    expect(wait_for(fork_child([] { throw ReturnFromMain(); })) == 0, "the child is content");
  if (mode == "collective")
    expect(wait_for(fork_child([&] { call_collective(world); })) == 0, "the child is content");
}

void train(const tessera::World& world, const std::string& mode) {
  tessera::manual_seed(5);
  auto model = torch::nn::Sequential(torch::nn::Linear(64, 512), torch::nn::GELU(),
                                     torch::nn::Linear(512, 512), torch::nn::GELU(),
                                     torch::nn::Linear(512, 8));
  torch::optim::AdamW inner(model->parameters());
  auto sharded = tessera::fully_shard(model.ptr());
  tessera::ShardedOptimizer optimizer(sharded, inner);
  tessera::manual_seed(100 + world.rank());
  std::optional<Workers> workers;
  if (mode == "workers") workers.emplace();
  for (int step = 0; step < kSteps; ++step) {
    if (workers) expect(workers->batch(step) == workers->expected(step), "batches are right");
    optimizer.zero_grad();
    model->forward(torch::randn({16, 64})).pow(2).mean().backward();
    optimizer.step();
    if (step == 1) fork_once(mode, world, model);
  }
  double sum = 0;
  for (const auto& entry : sharded.full_state())
    sum += entry.tensor.to(torch::kDouble).sum().item<double>();
  std::printf("rank %d sum %a\n", world.rank(), sum);
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const auto world = tessera::init();
    std::printf("rank %d over %s\n", world.rank(), world.process_group()->backend_name().c_str());
    std::fflush(stdout);
    train(world, count > 1 ? arguments[1] : "");
  } catch (const ReturnFromMain&) {
    return 0;
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "fork_probe: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fork_probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
