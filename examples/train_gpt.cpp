// Trains a byte-level GPT on a text, sharded over the ranks that it runs on:
//   python scripts/make_corpus.py data/corpus.txt
//   tessera run -n 2 build/dev/examples/train_gpt --data data/corpus.txt --save runs/demo
// or, with the ranks as threads of one process, `train_gpt --threads 2 ...`.
//
// Model (gpt.h), data and loop are plain torch::nn code; the lines that shard are marked with (*).
// A batch is a pure function of (seed, step, row): the losses are the same with any number of ranks
// at any level.
#include <ATen/DeviceAccelerator.h>
#include <fmt/format.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "gpt.h"

struct Options : TrainingOptions {
  std::string save, losses, memory, backend, level = "p_g_os";
  std::string dtype = "float", gather_dtype, reduce_dtype, offload, state;
  bool resume = false, scaler = false;
  int threads = 0, replicas = 1, keep = 2;
  tessera::OuterStep outer;
  int64_t save_every = 200, eval_every = 50, eval_batches = 8, sample = 400;
};

const std::map<std::string, torch::Dtype> message_dtypes = {
    {"bfloat16", torch::kBFloat16}, {"int8", torch::kChar}, {"float8", torch::kFloat8_e4m3fn}};

const std::map<std::string, torch::Dtype> state_dtypes = {
    {"float", torch::kFloat}, {"bfloat16", torch::kBFloat16}, {"8bit", torch::kByte}};

// --- the text ------------------------------------------------------------------------------------
struct Text {
  explicit Text(const Options& o) : o(o) {
    const auto bytes = read_bytes(o.data);
    const auto size = bytes.size(0), held = size / 10;
    TORCH_CHECK_VALUE(held > o.seq * o.batch, "[train_gpt] a tenth of --data must hold a batch; ",
                      "expected over ", 10 * o.seq * o.batch, " bytes, got ", size);
    train = bytes.narrow(0, 0, size - held);
    held_out = bytes.narrow(0, size - held, held);
  }

  /// Returns rows `first` to `first + rows` of the batch of `step`.
  Tensor batch(int64_t step, int64_t first, int64_t rows) const {
    const auto starts = random_starts(train, o.seq, o.batch, o.seed, step);
    return windows(train, starts.narrow(0, first, rows), o.seq);
  }

  /// Returns the mean nats per held-out byte if only each byte's frequency in `train` is known.
  double unigram_loss() const {
    const auto frequency = (torch::bincount(train, {}, 256) + 1.0) / (train.size(0) + 256.0);
    return -frequency.log().index({held_out}).mean().item<double>();
  }

  const Options& o;
  Tensor train, held_out;
};

// --- the job -------------------------------------------------------------------------------------
struct Job {
  /// Prints on one rank.
  template <class... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) const {
    if (world.rank() == 0) fmt::print(format, std::forward<Args>(args)...);
  }

  /// Returns the mean loss of up to `batches` batches, spread evenly over the held-out text.
  double held_out_loss(int64_t batches) {
    torch::NoGradGuard no_grad;
    const auto all = (text.held_out.size(0) - 1) / (o.batch * o.seq), n = std::min(batches, all);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      const auto first = i * all / n * o.batch + world.rank() * rows;
      const auto starts = torch::arange(first, first + rows) * o.seq;
      sum += gpt->loss(windows(text.held_out, starts, o.seq)).item<double>();
    }
    return tessera::mean_over_ranks(sum / n);
  }

  /// Continues `written` byte by byte. All ranks do the same, with the same random numbers.
  std::string sample(std::string written) {
    torch::NoGradGuard no_grad;
    auto generator = at::make_generator<at::CPUGeneratorImpl>(o.seed);
    for (int64_t i = 0; i < o.sample; ++i) {
      const auto seen = written.substr(std::max<int64_t>(0, std::ssize(written) - o.seq));
      const auto bytes = torch::tensor(std::vector<int64_t>(seen.begin(), seen.end()));
      const auto chances =
          (gpt->forward(bytes.unsqueeze(0))[0][-1].cpu().to(torch::kFloat) / 0.7).softmax(0);
      const auto next = torch::multinomial(chances, 1, false, generator).item<int64_t>();
      written += next == '\n' || (next >= 32 && next < 127) ? char(next) : '?';
    }
    return written;
  }

  /// Returns what it shows, in bytes of this rank, by name.
  std::map<std::string, double> show_memory(const tessera::ShardMemory& kept) const {
    int64_t numel = 0;
    for (const auto& parameter : gpt->parameters()) numel += parameter.numel();
    const auto sum = kept.parameters + kept.gradients + kept.optimizer_state + kept.master_weights;
    say("parameters, gradients, optimizer state: {:.1f} MB per rank; unsharded: {:.1f} MB\n",
        sum / 1e6, 16 * numel / 1e6);
    if (!o.state.empty())
      say("optimizer state: {} bytes on this rank of {}, for {} parameters\n", kept.optimizer_state,
          world.size(), numel);
    if (kept.offloaded > 0) say("in {}: {:.1f} MB per rank\n", o.offload, kept.offloaded / 1e6);
    return {{"memory/parameters", double(kept.parameters)},
            {"memory/gradients", double(kept.gradients)},
            {"memory/optimizer state", double(kept.optimizer_state + kept.master_weights)},
            {"memory/unsharded parameters", 4.0 * numel}};
  }

  /// Half precision has float master weights; with an offload directory, state is kept there.
  tessera::ShardPlan plan(tessera::ShardLevel level) const {
    tessera::ShardPlan plan{.level = level, .precision = {.master_dtype = torch::kFloat}};
    if (o.replicas > 1) {
      const auto groups = world.hybrid_process_groups(world.size() / o.replicas);
      plan.process_group = groups.shard, plan.replicate_group = groups.replicate;
      if (o.outer.every > 0) plan.outer = o.outer;
    }
    // The dtypes of messages, where ranks send any: on several hosts, or with
    // TESSERA_TRANSPORT=gloo.
    if (!o.gather_dtype.empty()) plan.precision.gather_dtype = message_dtypes.at(o.gather_dtype);
    if (!o.reduce_dtype.empty()) plan.precision.reduce_dtype = message_dtypes.at(o.reduce_dtype);
    if (!o.offload.empty()) plan.offload = tessera::Offload::kDirectory;
    plan.offload_directory = o.offload;
    if (o.state == "8bit") plan.cuts = tessera::cpu_adam_cuts();
    return plan;
  }

  /// The path of the checkpoints. Replicas that train by themselves have one each.
  std::string directory() const {
    if (o.outer.every == 0 || o.save.empty()) return o.save;
    return fmt::format("{}/replica-{}", o.save, world.rank() / (world.size() / o.replicas));
  }

  std::unique_ptr<torch::optim::Optimizer> make_optimizer() const {
    const auto parameters = gpt->parameters();
    const torch::optim::AdamWOptions options(o.lr);
    if (o.state.empty()) return std::make_unique<torch::optim::AdamW>(parameters, options);
    return std::make_unique<tessera::CPUAdam>(parameters,
                                              tessera::CPUAdamOptions(o.lr)
                                                  .weight_decay(options.weight_decay())
                                                  .state_dtype(state_dtypes.at(o.state)));
  }

  void run(tessera::ShardLevel level) {
    if (o.dtype != "float") gpt->to(o.dtype == "half" ? torch::kHalf : torch::kBFloat16);
    auto sharded = tessera::fully_shard(gpt, plan(level));  // (*)
    const auto adamw = make_optimizer();
    tessera::ShardedOptimizer optimizer(sharded, *adamw);  // (*)
    std::optional<tessera::MemoryTracer> tracer;
    if (!o.memory.empty()) tracer.emplace(sharded);  // (*)
    tessera::GradScaler scaler({.growth_interval = 100, .enabled = o.scaler});
    int64_t step = 0;
    const std::string runs = directory();
    if (const auto latest = tessera::latest_checkpoint(runs); o.resume && latest)
      step = tessera::load_checkpoint(*latest, sharded, &optimizer, {.scaler = &scaler})
                 .numbers.at("step");         // (*)
    tessera::AsyncCheckpointer checkpointer;  // (*)
    const auto first = step;
    const auto start = std::chrono::steady_clock::now();
    const double unigram = text.unigram_loss(), bit = M_LN2;
    double held_out = held_out_loss(o.eval_batches);
    say("{} ranks, {}, after step {}: held-out {:.4f} nats per byte; unigram model {:.4f}\n",
        world.size(), o.level, first, held_out, unigram);
    std::ofstream losses(world.rank() == 0 ? o.losses : "");
    std::optional<tessera::MetricsLog> log;  // (*)
    if (!o.save.empty()) log.emplace(o.save, tessera::MetricsLogOptions{.first_step = first + 1});
    Pace pace;
    while (step < o.steps) {
      adamw->param_groups()[0].options().set_lr(learning_rate(o, step));
      optimizer.zero_grad();
      const auto loss = gpt->loss(text.batch(step, world.rank() * rows, rows));
      scaler.scale(loss).backward();
      scaler.unscale_(optimizer);
      if (o.clip > 0) optimizer.clip_grad_norm_(o.clip);
      scaler.step(optimizer);  // (*)
      scaler.update();
      const double mean = tessera::mean_over_ranks(loss.item<double>());
      losses << fmt::format("{:.9g}\n", mean) << std::flush;
      pace.step_done();
      std::map<std::string, double> row = {{"loss", mean}, {"unigram", unigram}};
      if (step++ == first) row.merge(show_memory(optimizer.memory()));
      if (step % 10 == 0 || step == o.steps) {
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        const double seconds = taken.count() / (step - first);
        say("step {}/{}  loss {:.4f}  {:.0f} B/s  {:.0f} s left\n", step, o.steps, mean,
            o.batch * o.seq / seconds, seconds * (o.steps - step));
      }
      if (step % o.eval_every == 0) {
        row["held_out"] = held_out = held_out_loss(o.eval_batches);
        say("held-out {:.4f} nats = {:.3f} bits per byte\n", held_out, held_out / bit);
      }
      if (log) log->write(step, row);
      if (!o.save.empty() && (step % o.save_every == 0 || step == o.steps))
        checkpointer.save(
            fmt::format("{}/step-{}", runs, step), sharded, &optimizer,
            {.numbers = {{"step", double(step)}}, .scaler = &scaler, .keep_last = o.keep});  // (*)
    }
    checkpointer.wait();  // (*)
    if (tracer && world.rank() == 0) tracer->write_svg(o.memory);
    held_out = held_out_loss(std::numeric_limits<int64_t>::max());
    say("all held-out bytes: {:.4f} nats = {:.3f} bits; unigram model: {:.4f} = {:.3f} bits\n",
        held_out, held_out / bit, unigram, unigram / bit);
    const auto unsharded = sharded.keep_unsharded();  // (*)
    if (const double seconds = pace.seconds_per_step(); seconds > 0)
      say("speed: {:.0f} bytes per second on {} ranks (median step: {:.4f} s)\n",
          o.batch * o.seq / seconds, world.size(), seconds);
    if (o.sample > 0) say("--- it writes:\n{}\n---\n", sample("namespace torch {\n"));
    if (!o.save.empty()) say("checkpoint: {}/step-{} (go on with --resume)\n", runs, step);
  }

  const Options& o;
  const tessera::World& world;
  const Text text{o};
  const int64_t rows = o.batch / world.size();
  Gpt gpt{o};
};

int main(int argc, char** argv) {
  const std::vector<std::string> levels = {"none", "os", "os_g", "p_g_os"};  // as in ShardLevel
  Options o;
  CLI::App app{"Trains a byte-level GPT on a text, sharded over the ranks that it is started on"};
  const CLI::Validator positive = CLI::PositiveNumber, natural = CLI::NonNegativeNumber;
  app.option_defaults()->always_capture_default();
  app.add_option("--device", o.device, "where it computes, such as cuda");
  app.add_option("--backend", o.backend, "over which tensors on a --device go, such as nccl");
  app.add_option("--level", o.level, "what is sharded")->check(CLI::IsMember(levels));
  app.add_option("--dtype", o.dtype, "of the parameters")
      ->check(CLI::IsMember({"float", "bfloat16", "half"}));
  app.add_option("--gather-dtype", o.gather_dtype, "parameters are sent in this dtype")
      ->check(CLI::IsMember(message_dtypes));
  app.add_option("--reduce-dtype", o.reduce_dtype, "gradients are sent in this dtype")
      ->check(CLI::IsMember(message_dtypes));
  app.add_option("--state", o.state, "CPUAdam with state of this kind steps, in place of AdamW")
      ->check(CLI::IsMember(state_dtypes));
  app.add_flag("--scaler", o.scaler, "scale the loss, for --dtype half");
  app.add_option("--threads", o.threads,
                 "ranks as threads of this process; 0: one, or the launcher's")
      ->check(natural);
  app.add_option("--replicas", o.replicas, "shards are the same on so many ranks")->check(positive);
  app.add_option("--outer-every", o.outer.every,
                 "steps after which --replicas, each trained by itself, are averaged (DiLoCo); 0: "
                 "gradients are, in every step")
      ->check(natural);
  app.add_option("--outer-lr", o.outer.learning_rate,
                 "learning rate of these averages; 1: LocalSGD");
  app.add_option("--outer-momentum", o.outer.momentum, "their momentum (Nesterov's)");
  app.add_option("--offload", o.offload, "directory for optimizer state and master weights");
  app.add_option("--save", o.save, "directory of the checkpoints");
  app.add_option("--keep", o.keep, "the newest of them that are kept; 0: all")->check(natural);
  app.add_flag("--resume", o.resume, "go on from the latest in --save, if there is one")
      ->needs("--save");
  app.add_option("--losses", o.losses, "file for the loss of each step, one per line");
  o.add_to(app);
  app.add_option("--memory", o.memory, "file for a picture (SVG) of rank 0's memory in a step");
  app.add_option("--save-every", o.save_every,
                 "steps between checkpoints, which are written meanwhile")
      ->check(positive);
  app.add_option("--eval-every", o.eval_every, "steps between held-out losses")->check(positive);
  app.add_option("--sample", o.sample, "bytes to write at the end")->check(natural);
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const auto train = [&] {
    const auto world = tessera::init({.backend = o.backend});  // (*)
    if (const torch::Device device(o.device); !device.is_cpu() && !device.has_index())
      at::accelerator::setDeviceIndex(static_cast<c10::DeviceIndex>(world.local_rank()));
    TORCH_CHECK_VALUE(o.batch % world.size() == 0, "[train_gpt] --batch is that of all ranks; ",
                      "expected a multiple of ", world.size(), ", got ", o.batch);
    TORCH_CHECK_VALUE(world.size() % o.replicas == 0, "[train_gpt] --replicas must divide the ",
                      world.size(), " ranks; got ", o.replicas);
    TORCH_CHECK_VALUE(o.outer.every == 0 || o.replicas > 1,
                      "[train_gpt] --outer-every needs --replicas");
    TORCH_CHECK_VALUE(
        o.outer.every == 0 || o.save.empty() ||
            (o.save_every % o.outer.every == 0 && o.steps % o.outer.every == 0),
        "[train_gpt] with --save, --outer-every must divide --save-every and --steps: replicas are "
        "saved when they are equal");
    TORCH_CHECK_VALUE(o.width % o.heads == 0, "[train_gpt] --width must be a multiple of --heads");
    tessera::manual_seed(o.seed);  // (*)
    Job{o, world}.run(tessera::ShardLevel(std::ranges::find(levels, o.level) - levels.begin()));
  };
  try {
    o.threads > 0 ? tessera::spawn(o.threads, train) : train();  // (*)
  } catch (const c10::Error& error) {
    fmt::print(stderr, "train_gpt: {}\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
