#pragma once

#include <tessera/engine/fully_shard.h>
#include <tessera/loop/lr_schedule.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "differential/layers.h"
#include "differential/program.h"

/// A program is run twice by one loop, `train()`, over two implementations of `Training`.
namespace tessera::differential {

/// What a rank has seen of a run: numbers in order, each with its name, and where the run ended.
struct Trace {
  struct Item {
    std::string name;
    torch::Tensor value;  // in host memory
  };
  std::vector<Item> items;
  int64_t state = 0;  // number of the first item of the state at the end
  int op = -1;        // the operation that is run, or failed; -1: none
  std::string error;  // with which it failed; empty: it did not
};

/// The fault that a comparison finds.
struct Difference : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// What Tessera must refuse, with this in the error's text, as the guide documents. LibTorch does
/// not.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// What `OpKind::kThrow` throws.
struct UserError : std::runtime_error {
  UserError() : std::runtime_error("the user's error") {}
};

/// A program's model.
struct Model : torch::nn::Module {
  explicit Model(const Program& program);
  torch::Tensor forward(torch::Tensor x);
  /// With their names, in the order of registration; each once, under its first name. (LibTorch's
  /// `parameters()` has a tied one several times, and its optimizers would step it as often.)
  std::vector<NamedTensor> distinct() const;

  const Program& program;
  std::vector<std::shared_ptr<Block>> blocks;  // by number of the layer
  int rank = 0;
  bool recomputes = false;                        // checkpointed layers do
  int throws_forward = -1, throws_backward = -1;  // layers that throw `UserError`
};

/// `start`: random seed of the values.
std::shared_ptr<Model> make_model(const Program& program, uint64_t start);
/// The mean squared error of a batch, which may have an infinity.
torch::Tensor loss_of(const torch::Tensor& out, torch::Tensor target, const Op& forward);
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const Optimizer& spec, const std::vector<torch::Tensor>& parameters);
/// The sources of the optimizer "Lion", of those that need whole parameters, of `edit()`, and of a
/// backward whose gradients the program reduces.
extern const char *const kLionSource, *const kWholeSource, *const kEditSource, *const kByHandSource;
/// A schedule whose number of steps can be set.
struct Schedule : LambdaLR {
  using LambdaLR::LambdaLR;
  using LRScheduler::step_count_;
};
std::unique_ptr<Schedule> make_schedule(const Optimizer& spec, torch::optim::Optimizer& optimizer);
/// The numbers of a model's parameters that optimizer `index` has, in its order.
std::vector<size_t> parameters_of(const Program& program, size_t index, size_t count);
/// A batch of rank `rank`: its rows, and what the model is to make of them.
std::pair<torch::Tensor, torch::Tensor> batch_of(const Program& program, int number, int rank);
/// An operator that changes a parameter in place.
void edit(torch::Tensor parameter, int how);
double norm_type_of(const Op& clip);
constexpr double kMaxNorm = 0.5;
uint64_t random_seed_of(const Program& program, int rank);
/// Where a program's checkpoint lies.
std::string directory_of(const Program& program);

/// One training, on this thread's rank or, in plain LibTorch, of all ranks one after another.
class Training {
 public:
  virtual ~Training() = default;
  virtual void forward(const Op& op) = 0;
  virtual void backward(const Op& op) = 0;
  virtual void zero_grad(const Op& op) = 0;
  virtual void clip(const Op& op) = 0;
  virtual void clamp_grad(const Op& op) = 0;
  virtual void step(const Op& op) = 0;
  virtual void advance_schedule(const Op& op) = 0;
  virtual void evaluate(const Op& op) = 0;
  virtual void rewrite_state() = 0;
  virtual void edit_parameter(const Op& op) = 0;
  virtual void average(const Op& op) = 0;
  virtual void save(const Op& op) = 0;
  virtual void load() = 0;
  virtual void throw_in(const Op& op) = 0;
  virtual void thaw() = 0;
  virtual void reduce() = 0;
  /// Passes on parameters and buffers as they are used.
  virtual void see_used() = 0;
  /// Passes on the whole state: parameters, buffers, states of optimizers, master weights.
  virtual void finish() = 0;
};

/// Returns operation `at`, with the number of an optimizer that there is after shrinking.
Op op_at(const Program& program, int at);
void run(Training& training, const Op& op);
/// Runs the operations of a program from `first` to `limit`, each in all trainings, then `then`.
/// `at` is set to the number of each before it is run, and to their count before `finish()`.
void train(
    const Program& program, const std::vector<Training*>& trainings, int first, int limit, int& at,
    const std::function<void(const Op&)>& then = [](const Op&) {});

/// Trains on the calling rank, a thread of `spawn()` or a process, in its default world.
Trace train_sharded(const Program& program, const World& world);

/// Reads what the ranks of a program have saved at their end, on the calling rank of another world.
Trace load_sharded(const Program& program, const World& world);

/// What differs between the state at the end of a training and the same, loaded elsewhere; or "".
/// `has_optimizer`: with the state of the optimizer.
std::string difference_of(const Trace& saved, const Trace& loaded, bool has_optimizer);

/// Trains in plain LibTorch as far as operation `limit`, and compares what it sees with what the
/// ranks have seen, as far as they came. Throws `Difference` for the first number that differs, and
/// what an operation of LibTorch throws.
void train_plain(const Program& program, const std::vector<Trace>& ranks, int limit, int& at);

}  // namespace tessera::differential
