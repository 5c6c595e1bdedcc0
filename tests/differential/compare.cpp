#include "differential/plain_training.h"

namespace tessera::differential {

using torch::Tensor;
namespace optim = torch::optim;

namespace {

std::string text_of(const Tensor& tensor, const Tensor& where) {
  const Tensor picked = tensor.reshape({-1}).masked_select(where.reshape({-1})).to(torch::kDouble);
  std::string text;
  for (int64_t i = 0; i < std::min<int64_t>(picked.numel(), 3); ++i)
    text += c10::str(i > 0 ? ", " : "", picked[i].item<double>());
  return text;
}

// Elements that are no numbers count as equal.
Tensor same_elements(const Tensor& a, const Tensor& b) {
  return a.eq(b).logical_or(a.isnan().logical_and(b.isnan()));
}

// Undefined where there is none: then values must be equal.
Tensor bound_of(const std::map<std::string, Tensor>& bounds, const std::string& name) {
  const auto it = bounds.find(name);
  return it == bounds.end() ? Tensor() : it->second;
}

}  // namespace

std::string difference_of(const Trace& saved, const Trace& loaded, bool has_optimizer) {
  std::map<std::string, Tensor> found;
  for (const auto& [name, value] : loaded.items) found[name] = value;
  for (size_t i = saved.state; i < saved.items.size(); ++i) {
    const auto& [name, was] = saved.items[i];
    if (!has_optimizer && name.starts_with("optimizer ")) continue;
    const auto it = found.find(name);
    if (it == found.end()) return "there is no " + name;
    const Tensor& value = it->second;
    if (value.sizes() != was.sizes() || value.scalar_type() != was.scalar_type() ||
        !same_elements(value, was).all().item<bool>())
      return name + " differs";
    found.erase(it);
  }
  return found.empty() ? "" : "there was no " + found.begin()->first;
}

// Returns the values of the ranks, under the names that parameters were first registered with.
std::map<std::string, Tensor> PlainTraining::compare_used(
    const std::map<std::string, Tensor>& bounds) {
  std::map<std::string, Tensor> params;
  for (int rank = 0; rank < ranks(); ++rank) {
    const auto compare_params = [&](bool ignored) {
      for (const auto& item : replicas_[rank]->named_parameters()) {
        const size_t number = index_of(params_[rank], item.value());
        if (program_.is_ignored(number) != ignored) continue;
        const std::string& name = names_[number];  // of a tied one
        params[name] = compare(rank, item.key(), item.value(), bound_of(bounds, name));
      }
    };
    compare_params(false);
    for (const auto& item : replicas_[rank]->named_buffers())
      compare(rank, item.key(), item.value());
    compare_params(true);
  }
  return params;
}

// What has a bound is taken over from the ranks.
void PlainTraining::compare_state(const std::map<std::string, Tensor>& bounds) {
  std::map<std::string, Tensor> params = compare_used(bounds);
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!bounds.contains(names_[i])) continue;
    write(main_[i], params[names_[i]]);
    publish(i);
  }
  if (program_.plan.outer) return;
  for (size_t i = 0; i < optimizers_.size(); ++i) {
    optim::Optimizer& optimizer = *optimizers_[i];
    OptimizerStateDict state = state_dict_of(optimizer), compared = state;
    // There, a parameter without elements is never stepped, and has no state.
    int64_t place = 0;
    for (const auto& group : optimizer.param_groups())
      for (const Tensor& param : group.params()) {
        if (param.numel() == 0) compared.state.erase(place);
        ++place;
      }
    for (auto& [name, value] : items_of(i, compared)) {
      const Tensor got = compare_all(name, value, bound_of(bounds, name));
      if (!bounds.contains(name)) continue;
      const size_t point = name.find('.'), number = name.rfind(' ', point) + 1;
      state.state[std::stoll(name.substr(number, point - number))][name.substr(point + 1)] = got;
    }
    if (!bounds.empty()) load_state_dict(optimizer, state);
  }
}

// Returns the rank's value, from which those that follow are computed.
Tensor PlainTraining::compare(int rank, const std::string& name, const Tensor& value,
                              const Tensor& bound) {
  const Trace& trace = traces_[rank];
  const size_t number = seen_[rank]++;
  const std::string what = c10::str(name, " of rank ", first_ + rank);
  if (number >= trace.items.size()) {
    if (trace.error.empty()) throw Difference(what + " is missing");
    return value.detach();
  }
  const auto& [got_name, got] = trace.items[number];
  if (got_name != name) throw Difference(c10::str(what, " is expected; got ", got_name));
  const Tensor want = value.detach().cpu();
  if (got.sizes() != want.sizes() || got.scalar_type() != want.scalar_type())
    throw Difference(c10::str(what, " must be ", want.scalar_type(), want.sizes(), "; got ",
                              got.scalar_type(), got.sizes()));
  Tensor same = same_elements(got, want);
  const Tensor off = (got.to(torch::kDouble) - want.to(torch::kDouble)).abs();
  if (bound.defined()) same = same.logical_or(off.le(bound)).logical_or(bound.isinf());
  if (same.all().item<bool>()) return got;
  const Tensor wrong = same.logical_not();
  throw Difference(c10::str(
      what, ": ", wrong.sum().item<int64_t>(), " of ", want.numel(), " differ by up to ",
      off.max().item<double>(), "; expected ", text_of(want, wrong), ", got ", text_of(got, wrong),
      bound.defined() ? ", at most " + text_of(bound, wrong) + " apart" : ""));
}

std::string state_prefix(size_t optimizer, int64_t place) {
  return c10::str("optimizer ", optimizer, " state ", place, ".");
}

std::vector<std::pair<std::string, Tensor>> items_of(size_t optimizer,
                                                     const OptimizerStateDict& state) {
  std::vector<std::pair<std::string, Tensor>> items;
  const auto add = [&](const std::string& prefix, const OptimizerStateDict::Values& values) {
    for (const auto& [name, value] : values) {
      if (name == "master_weights") continue;
      if (value.isTensor())
        items.emplace_back(prefix + name, value.toTensor().detach().cpu().clone());
      if (value.isDouble() || value.isInt() || value.isBool())
        items.emplace_back(prefix + name, torch::scalar_tensor(value.toScalar(), torch::kDouble));
    }
  };
  for (const auto& [place, values] : state.state) add(state_prefix(optimizer, place), values);
  for (size_t i = 0; i < state.param_groups.size(); ++i)
    add(c10::str("optimizer ", optimizer, " group ", i, "."), state.param_groups[i].options);
  return items;
}

}  // namespace tessera::differential
