#include <fmt/format.h>

#include <type_traits>

#include "differential/layers.h"
#include "differential/program.h"
#include "differential/training.h"

namespace tessera::differential {
namespace {

constexpr auto kBegin = R"(#include <ATen/CPUGeneratorImpl.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <numeric>

using torch::Tensor;
namespace nn = torch::nn;
namespace optim = torch::optim;

)";

constexpr auto kForwardOfNet =
    R"(  static Tensor run(nn::Module& layer, const std::function<Tensor(Tensor)>& call, Tensor x) {
    const auto own = layer.parameters();
    return call(own.empty() ? x : x.to(own[0].scalar_type())).to(x.scalar_type());
  }
  int rank = 0, throws = -1;
};
)";

const char* literal(bool value) { return value ? "true" : "false"; }

std::string dtype_text(at::ScalarType dtype) {
  return fmt::format("torch::k{}", c10::toString(dtype));
}

class Source {
 public:
  explicit Source(const Program& program) : program_(program) {}

  std::string text() {
    text_ = kBegin;
    const auto has_kind = [&](const auto& name) {
      return [&](const auto& item) { return item.kind == name; };
    };
    text_ += fmt::format("{}\n", kBlockSource);
    for (const auto& [kind, source] : block_sources())
      if (std::ranges::any_of(program_.layers, has_kind(kind)))
        line("struct {} : Block {{ using Block::Block; {} }};", kind, source);
    if (std::ranges::any_of(program_.optimizers, has_kind("Lion"))) line("{}", kLionSource);
    const bool is_whole = std::ranges::any_of(program_.optimizers, &Optimizer::is_own_whole);
    if (is_whole) line("{}", kWholeSource);
    if (has_op(program_, OpKind::kEdit)) line("{}", kEditSource);
    if (!program_.plan.reduce_gradients) line("{}", kByHandSource);
    add_net();
    line("\nint main() {{{}\n  tessera::spawn({}, [] {{", is_whole ? "\n  describe_whole();" : "",
         program_.ranks);
    line("    auto world = tessera::init({{.transport = tessera::Transport::{}}});",
         program_.transport == Transport::kArena ? "kArena" : "kGloo");
    if (program_.simulated) line("    // On the simulated accelerator.");
    line("    const int rank = world.rank();");
    line("    tessera::manual_seed({}{});", program_.seed, program_.own_start ? " + rank" : "");
    line("    auto net = std::make_shared<Net>();\n    net->rank = rank;");
    line(
        "    std::vector<Tensor> params;  // a tied one once\n    std::vector<std::string> names;");
    line("    for (const auto& item : net->named_parameters()) {{");
    line("      const auto is_same = [&](auto& param) {{ return param.is_same(item.value()); }};");
    line("      if (std::ranges::any_of(params, is_same)) continue;");
    line("      params.push_back(item.value());\n      names.push_back(item.key());\n    }}");
    for (size_t i = 0; i < program_.optimizers.size(); ++i) add_optimizer(i);
    add_plan();
    add_loop();
    return text_ + "  });\n}\n";
  }

 private:
  template <class... Args>
  void line(fmt::format_string<Args...> format, Args&&... args) {
    text_ += fmt::format(format, std::forward<Args>(args)...) + "\n";
  }

  void add_net() {
    line("struct Net : nn::Module {{\n  Net() {{");
    for (size_t i = 0; i < program_.layers.size(); ++i) {
      const Layer& layer = program_.layers[i];
      if (layer.dtype != at::kFloat) line("    l{}->to({});", i, dtype_text(layer.dtype));
      if (layer.frozen) line("    for (Tensor& p : l{}->parameters()) p.requires_grad_(false);", i);
    }
    for (size_t i = 0; i < program_.layers.size(); ++i)
      if (program_.layers[i].tied >= 0) line("    l{}->tie(*l{});", i, program_.layers[i].tied);
    for (const int i : program_.registration) line("    register_module(\"l{}\", l{});", i, i);
    line("  }}\n  Tensor forward(Tensor x) {{");
    for (size_t i = 0; i < program_.layers.size(); ++i) add_use(static_cast<int>(i));
    line("    return x;\n  }}");
    for (size_t i = 0; i < program_.layers.size(); ++i)
      line("  std::shared_ptr<{0}> l{1} = std::make_shared<{0}>({2});", program_.layers[i].kind, i,
           program_.width);
    text_ += kForwardOfNet;
  }

  void add_use(int i) {
    const Layer& layer = program_.layers[i];
    const auto throws = [&](int how) {
      return std::ranges::find(program_.ops, Op{OpKind::kThrow, i, how}) != program_.ops.end();
    };
    if (throws(0)) line("    if (throws == {}) throw std::runtime_error(\"the user's error\");", i);
    std::string call = fmt::format("[this](Tensor x) {{ return l{}->forward(x); }}", i);
    if (layer.checkpoint)
      call = fmt::format("[&](Tensor x) {{ return tessera::checkpoint({}, x); }}", call);
    const std::string run = fmt::format("run(*l{}, {}, x)", i, call);
    std::string use = fmt::format("x = {}{};", layer.residual ? "x + " : "", run);
    if (layer.is_partial()) use = fmt::format("if ({} >> rank & 1) {}", layer.ranks, use);
    for (int time = 0; time < layer.times; ++time) line("    {}", use);
    if (throws(1))
      line(
          "    if (throws == {}) x.register_hook([](Tensor) -> Tensor {{ throw "
          "std::runtime_error(\"the "
          "user's error\"); }});",
          i);
  }

  void add_muon_groups(size_t i) {
    const auto options = fmt::format("std::make_unique<tessera::MuonOptions>(muon{})", i);
    line("    std::vector<optim::OptimizerParamGroup> groups{};", i);
    line("    groups{}.emplace_back(std::vector<Tensor>(), {});", i, options);
    line("    muon{}.adamw(true).betas({{0.9, {}}});", i, program_.optimizers[i].beta2);
    line("    groups{}.emplace_back(std::vector<Tensor>(), {});", i, options);
    line("    for (const Tensor& param : own{}) {{", i);
    line("      const bool is_matrix = param.dim() == 2 || param.dim() == 3;");
    line("      groups{}[is_matrix ? 0 : 1].params().push_back(param);\n    }}", i);
  }

  void add_optimizer(size_t i) {
    const Optimizer& own = program_.optimizers[i];
    const bool is_adam = own.kind == "Adam" || own.kind == "AdamW";
    std::string options = fmt::format("({}).weight_decay({})", own.lr, own.decay);
    if (is_adam)
      options +=
          fmt::format(".betas({{{}, {}}}).amsgrad({})", own.momentum, own.beta2, literal(own.flag));
    if (own.kind == "SGD" || own.kind == "Lion")
      options += fmt::format(".momentum({}).nesterov({})", own.momentum,
                             literal(own.flag && own.momentum > 0));
    if (own.kind == "Adagrad")
      options += fmt::format(".lr_decay({}).eps({})", own.momentum, own.eps);
    if (own.kind == "RMSprop")
      options += fmt::format(".alpha({}).eps({}).momentum({}).centered({})", own.beta2, own.eps,
                             own.momentum, literal(own.flag));
    if (own.kind == "CPUAdam")
      options += fmt::format(".betas({{{}, {}}}).adamw_mode({}).state_dtype(at::k{})", own.momentum,
                             own.beta2, literal(own.flag), at::toString(own.state));
    if (own.kind == "LBFGS") options = fmt::format("({})", own.lr);
    const bool is_muon = own.kind == "Muon";
    if (is_muon)
      options += fmt::format(".momentum({}).nesterov({})", own.momentum, literal(own.flag));
    const std::string scope = own.kind == "CPUAdam" || is_muon ? "tessera" : "optim";
    const bool is_users = own.kind == "Lion" || own.is_own_whole();
    const std::string type = is_users ? own.kind : scope + "::" + own.kind;
    line("    std::vector<Tensor> own{};", i);
    line("    for (size_t i = {}; i < params.size(); i += {})", i, program_.optimizers.size());
    line("      {}own{}.push_back(params[i]);", program_.ignored ? "if (i % 5 != 3) " : "", i);
    if (own.reversed) line("    std::ranges::reverse(own{});", i);
    if (is_muon) {
      line("    auto muon{} = tessera::MuonOptions{};", i, options);
      add_muon_groups(i);
    } else {
      line("    std::vector<optim::OptimizerParamGroup> groups{}({}, std::vector<Tensor>());", i,
           own.groups);
      line("    for (size_t i = 0; i < own{}.size(); ++i)", i);
      line("      groups{0}[i % {1}].params().push_back(own{0}[i]);", i, own.groups);
    }
    line("    {} inner{}(groups{}, {}Options{});", type, i, i, is_users ? "optim::SGD" : type,
         options);
    for (int group = 1; group < own.groups && !is_muon; ++group)
      line("    inner{}.param_groups()[{}].options().set_lr({});", i, group, own.lr / (1 << group));
    if (own.schedule)
      line(
          "    tessera::LambdaLR schedule{0}(inner{0}, tessera::warmup_cosine({{.warmup = 2, "
          ".steps = 6}}));",
          i);
  }

  void add_plan();
  void add_loop();
  void add_joined();
  std::string statement(const Op& op) const;
  std::string saved_schedules() const;

  const Program& program_;
  std::string text_;
};

void Source::add_plan() {
  const ShardPlan& plan = program_.plan;
  line("    tessera::ShardPlan plan{{.level = tessera::ShardLevel::{}}};", name_of(plan.level));
  for_each_changed(plan, [&](const char* name, const auto& value) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::ScalarType>) {
      line("    plan.{} = {};", name, dtype_text(value));
    } else {
      line("    plan.{} = {};", name, value);
    }
  });
  if (plan.partition != Partition::kFlatEven)
    line("    plan.partition = tessera::Partition::kWholeParam;");
  for (const CutRule& rule : plan.cuts)
    line("    plan.cuts.push_back({{\"{}\", tessera::Cut::{}, {}, {}}});", rule.names,
         plan_choice(rule.cut).enumerator, rule.size, rule.min_dim);
  if (plan.offload != Offload::kNone)
    line("    plan.offload = tessera::Offload::{};",
         plan.offload == Offload::kHost ? "kHost" : "kDirectory");
  if (plan.offload == Offload::kDirectory) line("    plan.offload_directory = \"offload\";");
  if (plan.start_values == StartValues::kKeep)
    line("    plan.start_values = tessera::StartValues::kKeep;");
  if (plan.outer)
    line("    plan.outer = {{.every = {}, .learning_rate = {}, .momentum = {}, .nesterov = {}}};",
         plan.outer->every, plan.outer->learning_rate, plan.outer->momentum,
         literal(plan.outer->nesterov));
  line("    plan.process_group = world.process_group();");
  if (program_.shard_size > 0) {
    line("    const auto groups = world.hybrid_process_groups({});", program_.shard_size);
    line("    plan.process_group = groups.shard;\n    plan.replicate_group = groups.replicate;");
  }
  if (program_.own_units) line("    plan.units.emplace_back();");
  if (program_.grouped)
    line(
        "    std::vector<int> ranks(world.size());\n"
        "    std::iota(ranks.begin(), ranks.end(), 0);\n"
        "    const auto group = world.new_process_group(ranks);");
  for (const auto& [is_set, each, what] :
       {std::tuple(program_.owners, "i % 3 == 0",
                   "plan.owners[names[i]] = 7 * i % plan.process_group->size();"),
        std::tuple(program_.whole, "i % 3 == 1", "plan.whole.push_back(names[i]);"),
        std::tuple(program_.grouped, "i % 2 == 0", "plan.groups.push_back({names[i], group});"),
        std::tuple(program_.own_units, "i % 2 == 1", "plan.units.front().push_back(names[i]);"),
        std::tuple(program_.ignored, "i % 5 == 3", "plan.ignored.push_back(names[i]);")}) {
    if (is_set)
      line("    for (size_t i = 0; i < names.size(); ++i)\n      if ({}{}) {}", each,
           program_.ignored && each != std::string("i % 5 == 3") ? " && i % 5 != 3" : "", what);
  }
}

std::string Source::statement(const Op& op) const {
  const auto count = static_cast<int>(program_.optimizers.size());
  const int own = op.value % count;
  const std::string param = fmt::format("params[{} % params.size()]", op.value);
  switch (op.kind) {
    case OpKind::kForward: {
      const auto call = fmt::format("loss = loss_of({}, {}, {});", op.value,
                                    literal(op.how & kByHandle), literal(op.how & kInfinite));
      return op.how & kNoSync ? fmt::format("{{ const auto local = sharded.no_sync(); {} }}", call)
                              : call;
    }
    case OpKind::kBackward: {
      const std::string loss = program_.scale > 0 ? "scaler.scale(loss)" : "loss";
      if (!program_.plan.reduce_gradients)
        return fmt::format("backward_by_hand({}, reduced, *world.process_group(), plan.average);",
                           loss);
      const std::string call = loss + ".backward();";
      return op.how == 1 ? fmt::format("{{ const auto local = sharded.no_sync(); {} }}", call)
                         : call;
    }
    case OpKind::kZeroGrad:
      return fmt::format(fmt::runtime(std::array{"optimizer{}.zero_grad();", "sharded.zero_grad();",
                                                 "sharded.zero_grad(false);", "net->zero_grad();",
                                                 "inner{}.zero_grad();"}[op.how]),
                         own);
    case OpKind::kClip:
      return fmt::format(
          "{}std::printf(\"norm %.9g\\n\", sharded.clip_grad_norm_({}, {}));",
          program_.scale > 0 ? fmt::format("scaler.unscale_(optimizer{}); ", own) : "", kMaxNorm,
          std::array{"2", "1", "INFINITY", "3"}[op.how]);
    case OpKind::kClampGrad: {
      const std::string guard =
          program_.ignored ? fmt::format("if ({} % params.size() % 5 != 3) ", op.value) : "";
      const std::string text = std::array{
          "if (Tensor grad = sharded.local_grad({0}); grad.defined()) grad.clamp_(-0.125, 0.125);",
          "if (Tensor grad = sharded.full_grad({0}); grad.defined() && "
          "sharded.has_reduced_grad({0})) sharded.set_full_grad({0}, grad.clamp(-0.125, 0.125));",
          "sharded.zero_grad({0}, false);", "sharded.zero_grad({0}, true);"}[op.how];
      return guard + fmt::format(fmt::runtime(text), param);
    }
    case OpKind::kStep: {
      if (program_.scale == 0) return fmt::format("optimizer{}.step();", own);
      return fmt::format("scaler.step(optimizer{});{}", own,
                         own + 1 == count ? " scaler.update();" : "");
    }
    case OpKind::kSchedule:
      return program_.optimizers[own].schedule ? fmt::format("schedule{}.step();", own) : "";
    case OpKind::kEvaluate:
      return fmt::format("evaluate({});", op.value);
    case OpKind::kFullState:
      return "sharded.load_full_state(sharded.full_state());";
    case OpKind::kEdit:
      return fmt::format("edit({}, {});", param, op.how);
    case OpKind::kAverage:
      return op.how == 0 ? "average.update();"
                         : fmt::format("average.evaluate([&] {{ evaluate({}); }});", op.value);
    case OpKind::kSave:
    case OpKind::kLoad: {
      const std::string optimizer = count == 1 ? "&optimizer0" : "nullptr";
      std::string rest = program_.scale > 0 ? ".scaler = &scaler, " : "";
      rest += fmt::format(".schedulers = {{{}}}", saved_schedules());
      if (op.kind == OpKind::kLoad)
        return fmt::format("tessera::load_checkpoint(\"checkpoint\", sharded, {}, {{{}}});",
                           optimizer, rest);
      return fmt::format(
          "tessera::save_checkpoint(\"checkpoint\", sharded, {}, {{.whole_parameters = {}, {}}});",
          optimizer, literal(op.how == 1), rest);
    }
    case OpKind::kThrow:
      return fmt::format(
          "net->throws = {}; try {{ loss_of(0, true, false).backward(); }} catch (const "
          "std::runtime_error&) {{}} net->throws = -1;",
          op.value);
    case OpKind::kThaw:
      return "for (Tensor& param : params) param.requires_grad_(true);";
    case OpKind::kReduce:
      return "sharded.reduce();";
  }
  return "";
}

void Source::add_joined() {
  if (program_.joined == 0) return;
  std::string optimizers;
  for (size_t i = 0; i < program_.optimizers.size(); ++i)
    optimizers += fmt::format("{}&optimizer{}", i > 0 ? ", " : "", i);
  line("    tessera::join(sharded, {{{}}}, [&] {{", optimizers);
  std::string missed;
  for (int i = 0; i < program_.joined; ++i) {
    for (int rank = 0; rank < program_.ranks; ++rank)
      if (program_.ends[rank] == i) line("      if (rank == {}) return;", rank);
    const std::string text = statement(program_.ops[i]);
    line("      {}", text);
    for (int rank = 0; rank < program_.ranks && is_made_up_for(program_.ops[i]); ++rank)
      if (is_done(program_, rank, i) && !text.empty())
        missed += fmt::format("    if (rank == {}) {}\n", rank, text);
  }
  line("    }});\n{}", missed);
}

std::string Source::saved_schedules() const {
  std::string names;
  for (size_t i = 0; i < program_.optimizers.size(); ++i)
    if (program_.optimizers[i].schedule)
      names += fmt::format("{}&schedule{}", names.empty() ? "" : ", ", i);
  return names;
}

void Source::add_loop() {
  line("    auto sharded = tessera::fully_shard(net, plan);");
  for (size_t i = 0; i < program_.optimizers.size(); ++i)
    line(
        "    tessera::ShardedOptimizer optimizer{0}(sharded, inner{0}, {{.fused = {1}, "
        ".elementwise = {2}}});",
        i, literal(program_.optimizers[i].fused), literal(program_.optimizers[i].declared));
  if (program_.scale > 0)
    line("    tessera::GradScaler scaler({{.init_scale = {}, .growth_interval = 2}});",
         program_.scale);
  if (!program_.plan.reduce_gradients) {
    line("    std::vector<Tensor> reduced;\n    for (size_t i = 0; i < params.size(); ++i)");
    line("      {}reduced.push_back(params[i]);", program_.ignored ? "if (i % 5 != 3) " : "");
  }
  if (has_op(program_, OpKind::kAverage))
    line("    tessera::ExponentialAverage average(sharded, 0.75);");
  line("    tessera::manual_seed({} + rank);", random_seed_of(program_, 0));
  line("    const auto batch_of = [&](int number) {{");
  line("      const auto generator = at::detail::createCPUGenerator({} + 1000 * number + rank);",
       program_.seed);
  line("      const Tensor x = torch::randn({{{}{}, {}}}, generator);", program_.rows,
       program_.uneven_rows ? " + rank" : "", program_.width);
  line("      return std::pair(x.to({}), torch::randn_like(x, generator));\n    }};",
       dtype_text(program_.dtype));
  line("    const auto loss_of = [&](int number, bool by_handle, bool is_infinite) {{");
  line("      auto [x, y] = batch_of(number);\n      if (is_infinite) y.fill_(INFINITY);");
  line("      const Tensor out = by_handle ? sharded.forward(x) : net->forward(x);");
  line("      const Tensor loss = torch::mse_loss(out.to(torch::kFloat), y);");
  line("      std::printf(\"rank %d: loss %.9g\\n\", rank, loss.item<double>());");
  line("      return loss;\n    }};");
  line(
      "    const auto evaluate = [&](int number) {{\n      torch::NoGradGuard no_grad;\n      "
      "net->eval();");
  line(
      "      std::cout << net->forward(batch_of(number).first) << \"\\n\";\n      net->train();\n  "
      "  }};");
  line("    Tensor loss;");
  add_joined();
  for (size_t i = program_.joined; i < program_.ops.size(); ++i)
    line("    {}", statement(program_.ops[i]));
  line("    for (const auto& [name, value] : sharded.full_state())");
  line("      if (rank == 0) std::cout << name << \"\\n\" << value << \"\\n\";");
}

}  // namespace

std::string source_of(const Program& program) { return Source(program).text(); }

}  // namespace tessera::differential
