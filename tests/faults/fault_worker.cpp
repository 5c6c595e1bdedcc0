// A rank that trains a small model, one of whose ranks commits a fault.
//
//   fault_worker FAULT CULPRIT STEP STEPS [SCRATCH]
//
// Trains STEPS steps. In step STEP the rank CULPRIT commits FAULT (the names are below); SCRATCH is
// a folder for what it saves. Each rank prints "init T" before it joins the job, "over TRANSPORT",
// and "ended" at the end; the culprit prints "fault now T" just before it commits the fault, or
// "ready T" when it has come to the step in which the driver may do something to it ("driven",
// "program" and "fork", which first start a child and print "child PID"). T is the steady clock in
// seconds, which is the same in all processes. Errors go to stderr.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

#include "training.h"

namespace {

struct Assignment {
  std::string fault;
  int culprit = -1;
  int64_t step = 0, steps = 0;
  std::string scratch;
};

void announce(const char* text) {
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  std::printf("%s %.6f\n", text, now.count());
  std::fflush(stdout);
}

[[noreturn]] void fail() { throw std::runtime_error("the sample is corrupt"); }

/// Returns true if this rank is to commit fault `name` now, and announces it.
class Conscience {
 public:
  Conscience(Assignment assignment, int rank)
      : assignment_(std::move(assignment)), is_culprit_(rank == assignment_.culprit) {}

  void begin_step(int64_t step) { is_time_ = step == assignment_.step; }
  bool commits(const char* name) const {
    const bool commits = is_culprit_ && is_due(name);
    if (commits) announce("fault now");
    return commits;
  }
  /// For faults in which all ranks do something that only the culprit does otherwise.
  bool is_due(const char* name) const { return is_time_ && assignment_.fault == name; }
  bool is_culprit() const { return is_culprit_; }
  const Assignment& assignment() const { return assignment_; }

 private:
  Assignment assignment_;
  bool is_culprit_;
  bool is_time_ = true;
};

void start_child(bool of_another_program) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (of_another_program) ::execlp("sleep", "sleep", "60", nullptr);
    ::sleep(60);
    ::_exit(0);
  }
  std::printf("child %d\n", child);
}

void get_ready(const Conscience& conscience) {
  if (!conscience.is_culprit()) return;
  if (conscience.is_due("program")) start_child(true);
  if (conscience.is_due("fork")) start_child(false);
  for (const char* name : {"program", "fork", "driven"}) {
    if (conscience.is_due(name)) announce("ready");
  }
}

void reduce(const tessera::World& world, int64_t numel, const char* subject) {
  const auto tensor = torch::ones({numel});
  world.process_group()->all_reduce(tensor, tessera::ReduceOp::kSum, {.subject = subject})->wait();
}

// Reductions of the user's own; the culprit's differ.
void reduce_numbers(const tessera::World& world, const Conscience& conscience) {
  if (conscience.is_due("different_size"))
    reduce(world, conscience.commits("different_size") ? 9 : 8, "numbers");
  if (conscience.is_due("different_order")) {
    const bool swaps = conscience.commits("different_order");
    reduce(world, 8, swaps ? "accuracy" : "loss");
    reduce(world, 8, swaps ? "loss" : "accuracy");
  }
}

// One step of the loop; false if the loop ends with it.
bool train_step(const tessera::World& world, tessera::Training& training,
                const Conscience& conscience) {
  get_ready(conscience);
  if (conscience.commits("loader")) fail();
  if (conscience.commits("early_return")) return false;
  if (conscience.commits("exit")) std::exit(3);
  if (conscience.commits("crash")) std::raise(SIGSEGV);
  if (conscience.commits("skipped_batch")) return true;
  if (conscience.commits("lone_barrier")) world.process_group()->barrier({.subject = "epoch"});
  if (conscience.commits("lone_save"))
    tessera::save_checkpoint(conscience.assignment().scratch, training.sharded,
                             &training.optimizer);
  if (conscience.is_culprit() && conscience.is_due("forward"))
    training.trap->in_forward = [&] { conscience.commits("forward"), fail(); };
  if (conscience.is_culprit() && conscience.is_due("backward"))
    training.trap->in_backward = [&] { conscience.commits("backward"), fail(); };
  training.optimizer.zero_grad();
  const auto loss = training.loss();
  if (conscience.commits("missing_backward")) return true;
  loss.backward({}, conscience.is_due("extra_backward"));
  if (conscience.commits("extra_backward")) loss.backward();
  if (conscience.commits("lone_clip")) training.sharded.clip_grad_norm_(1.0);
  if (!conscience.commits("skipped_step")) training.optimizer.step();
  reduce_numbers(world, conscience);
  return true;
}

// Ranks of several jobs that have met: the sum of their numbers is no multiple of this job's.
void expect_own_job(const tessera::World& world) {
  const char* const text = std::getenv("FAULT_JOB_NUMBER");
  if (text == nullptr) return;
  const auto number = torch::full({1}, std::atof(text));
  world.process_group()
      ->all_reduce(number, tessera::ReduceOp::kSum, {.subject = "job numbers"})
      ->wait();
  if (number.item<double>() != world.size() * std::atof(text))
    std::printf("mixed with another job\n");
}

void train(const Assignment& assignment) {
  announce("init");
  const auto world = tessera::init();
  std::printf("over %s\n", world.process_group()->backend_name().c_str());
  expect_own_job(world);
  Conscience conscience(assignment, world.rank());
  tessera::manual_seed(5);
  tessera::Training training(conscience.commits("different_model") ? 257 : 256);
  tessera::manual_seed(100 + world.rank());
  for (int64_t step = 0; step < assignment.steps; ++step) {
    conscience.begin_step(step);
    if (!train_step(world, training, conscience)) break;
  }
}

int report(const char* text) {
  const char* rank = std::getenv("RANK");
  if (rank == nullptr) rank = std::getenv("OMPI_COMM_WORLD_RANK");
  std::fprintf(stderr, "rank %s: %s\n", rank == nullptr ? "?" : rank, text);
  return 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) return report("usage: fault_worker FAULT CULPRIT STEP STEPS [SCRATCH]");
  try {
    train({.fault = arguments[1],
           .culprit = std::atoi(arguments[2]),
           .step = std::atoll(arguments[3]),
           .steps = std::atoll(arguments[4]),
           .scratch = count > 5 ? arguments[5] : ""});
  } catch (const c10::Error& error) {
    return report(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report(error.what());
  }
  std::printf("ended\n");
  return 0;
}
