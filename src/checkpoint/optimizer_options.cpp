#include "checkpoint/optimizer_options.h"

#include <c10/util/Exception.h>
#include <tessera/cpu_adam.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <tuple>

namespace tessera {
namespace {

using namespace torch::optim;

template <class Options, class F>
void visit_adam(Options& options, F&& f) {
  f("lr", options.lr());
  f("beta1", std::get<0>(options.betas()));
  f("beta2", std::get<1>(options.betas()));
  f("eps", options.eps());
  f("weight_decay", options.weight_decay());
  f("amsgrad", options.amsgrad());
}
template <class F>
void visit(AdamOptions& options, F&& f) {
  visit_adam(options, f);
}
template <class F>
void visit(AdamWOptions& options, F&& f) {
  visit_adam(options, f);
}
template <class F>
void visit(CPUAdamOptions& options, F&& f) {
  f("lr", options.lr());
  f("bias_correction", options.bias_correction());
  f("beta1", std::get<0>(options.betas()));
  f("beta2", std::get<1>(options.betas()));
  f("eps", options.eps());
  f("weight_decay", options.weight_decay());
  f("adamw_mode", options.adamw_mode());
}
template <class F>
void visit(SGDOptions& options, F&& f) {
  f("lr", options.lr());
  f("momentum", options.momentum());
  f("dampening", options.dampening());
  f("weight_decay", options.weight_decay());
  f("nesterov", options.nesterov());
}
template <class F>
void visit(AdagradOptions& options, F&& f) {
  f("lr", options.lr());
  f("lr_decay", options.lr_decay());
  f("weight_decay", options.weight_decay());
  f("initial_accumulator_value", options.initial_accumulator_value());
  f("eps", options.eps());
}
template <class F>
void visit(RMSpropOptions& options, F&& f) {
  f("lr", options.lr());
  f("alpha", options.alpha());
  f("eps", options.eps());
  f("weight_decay", options.weight_decay());
  f("momentum", options.momentum());
  f("centered", options.centered());
}

// Calls `f` with each option's name and a reference to its double or bool.
template <class F>
void visit_options(const std::string& kind, OptimizerParamGroup& group, F&& f) {
  OptimizerOptions& options = group.options();
  if (kind == "AdamW") return visit(static_cast<AdamWOptions&>(options), f);
  if (kind == "Adam") return visit(static_cast<AdamOptions&>(options), f);
  if (kind == "CPUAdam") return visit(static_cast<CPUAdamOptions&>(options), f);
  if (kind == "SGD") return visit(static_cast<SGDOptions&>(options), f);
  if (kind == "Adagrad") return visit(static_cast<AdagradOptions&>(options), f);
  if (kind == "RMSprop") return visit(static_cast<RMSpropOptions&>(options), f);
}

}  // namespace

std::string optimizer_kind(const Optimizer& optimizer) {
  if (dynamic_cast<const AdamW*>(&optimizer)) return "AdamW";
  if (dynamic_cast<const Adam*>(&optimizer)) return "Adam";
  if (dynamic_cast<const CPUAdam*>(&optimizer)) return "CPUAdam";
  if (dynamic_cast<const SGD*>(&optimizer)) return "SGD";
  if (dynamic_cast<const Adagrad*>(&optimizer)) return "Adagrad";
  if (dynamic_cast<const RMSprop*>(&optimizer)) return "RMSprop";
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      "[checkpoint] the state of an optimizer can be stored only for Adagrad, Adam, "
      "AdamW, CPUAdam, RMSprop and SGD; got another class");
}

std::map<std::string, double> read_options(const std::string& kind, OptimizerParamGroup& group) {
  std::map<std::string, double> values;
  visit_options(kind, group,
                [&](const char* name, auto& value) { values[name] = static_cast<double>(value); });
  return values;
}

void write_options(const std::string& kind, OptimizerParamGroup& group,
                   const std::map<std::string, double>& values) {
  visit_options(kind, group, [&](const char* name, auto& value) {
    const auto it = values.find(name);
    if (it != values.end())
      value = static_cast<std::remove_reference_t<decltype(value)>>(it->second);
  });
}

}  // namespace tessera
