#include "planner/command/remedies.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "command/level_names.h"

namespace tessera::tools {
namespace {

constexpr int kMostAdvisedRanks = 1024;
constexpr int64_t kLeastAdvisedTokens = 512;

// A job, changed, with the options that change it. `levels` are those to try.
struct Variant {
  PlanJob job;
  std::vector<std::string> levels;
  bool may_raise_level;
  std::vector<std::string> options;

  Variant with(const std::string& option, const std::function<void(PlanJob&)>& change) const {
    Variant changed = *this;
    changed.options.push_back(option);
    change(changed.job);
    return changed;
  }
};

// Returns a variant's changes of one kind, the smallest first; none if the kind does not apply.
using Change = std::vector<Variant> (*)(const Variant&);

std::vector<Variant> fuse_attention(const Variant& from) {
  if (!from.job.config || from.job.activations.fused_attention) return {};
  return {
      from.with("--attention fused", [](PlanJob& job) { job.activations.fused_attention = true; })};
}

std::vector<Variant> raise_level(const Variant& from) {
  if (!from.may_raise_level) return {};
  std::vector<Variant> variants;
  for (const auto& [name, level] : kLevels) {
    if (level <= kLevels.at(from.levels.front())) continue;
    Variant changed = from.with("--level " + name, [](PlanJob&) {});
    changed.levels = {name};
    variants.push_back(std::move(changed));
  }
  return variants;
}

bool has_wide_parameters(const PlanJob& job) {
  return std::ranges::any_of(job.sizes, [](const ParameterSize& size) {
    return size.trainable && c10::elementSize(size.dtype) > c10::elementSize(at::kBFloat16);
  });
}

// Parameters that are narrow already have no wider master weights unless they are asked for.
std::vector<Variant> narrow_parameters(const Variant& from) {
  const bool is_narrow = from.job.plan.precision.param_dtype || !has_wide_parameters(from.job);
  if (is_narrow || from.job.activations.autocast) return {};
  return {from.with("--param-dtype bfloat16",
                    [](PlanJob& job) { job.plan.precision.param_dtype = at::kBFloat16; })};
}

std::vector<Variant> checkpoint_activations(const Variant& from) {
  if (!from.job.config || from.job.activations.checkpoint) return {};
  return {from.with("--checkpoint-activations",
                    [](PlanJob& job) { job.activations.checkpoint = true; })};
}

// On the CPU, it lies in the same memory.
std::vector<Variant> offload(const Variant& from) {
  if (from.job.plan.offload != Offload::kNone || from.job.on_cpu) return {};
  return {from.with("--offload host", [](PlanJob& job) { job.plan.offload = Offload::kHost; })};
}

std::vector<Variant> shrink_batch(const Variant& from) {
  std::vector<Variant> variants;
  if (!from.job.config) return {};
  for (int64_t batch = from.job.activations.batch / 2; batch >= 1; batch /= 2)
    variants.push_back(from.with(fmt::format("--batch {}", batch),
                                 [batch](PlanJob& job) { job.activations.batch = batch; }));
  return variants;
}

std::vector<Variant> add_ranks(const Variant& from) {
  std::vector<Variant> variants;
  for (int ranks = 2 * from.job.options.ranks; ranks <= kMostAdvisedRanks; ranks *= 2)
    variants.push_back(from.with(fmt::format("--ranks {}", ranks),
                                 [ranks](PlanJob& job) { job.options.ranks = ranks; }));
  return variants;
}

// Tried if nothing else is enough, as it changes what the model learns.
std::vector<Variant> shorten_sequence(const Variant& from) {
  std::vector<Variant> variants;
  if (!from.job.config || from.job.activations.batch > 1) return {};
  for (int64_t tokens = from.job.activations.sequence / 2; tokens >= kLeastAdvisedTokens;
       tokens /= 2)
    variants.push_back(from.with(fmt::format("--sequence {}", tokens),
                                 [tokens](PlanJob& job) { job.activations.sequence = tokens; }));
  return variants;
}

// From the cheapest to the dearest: the first ones cost no time, the next some computation or
// traffic, then copies to the host, smaller batches, and more machines.
constexpr Change kChanges[] = {
    fuse_attention, raise_level,  narrow_parameters, checkpoint_activations,
    offload,        shrink_batch, add_ranks};
constexpr size_t kMostTogether = 4;

Remedy remedy_of(const Variant& variant, const MemoryLimits& limits) {
  Remedy remedy{.options = variant.options};
  for (const std::string& level : variant.levels) {
    remedy.needs.push_back(need_of(variant.job, level));
    remedy.fits.push_back(limits.hold(remedy.needs.back()));
  }
  return remedy;
}

// Returns true if a level fits after `count` of the changes from `first` on, the most of each.
bool most_fits(const Variant& variant, size_t first, size_t count, const MemoryLimits& limits) {
  if (count == 0) return remedy_of(variant, limits).any_fits();
  for (size_t kind = first; kind < std::size(kChanges); ++kind) {
    const auto variants = kChanges[kind](variant);
    if (!variants.empty() && most_fits(variants.back(), kind + 1, count - 1, limits)) return true;
  }
  return false;
}

// Tries `count` of the changes from `first` on. Among those of one kind, the smallest that fits
// counts, or else the largest: more of it never needs more memory. Returns true if one fits.
bool try_changes(const Variant& from, size_t first, size_t count, const MemoryLimits& limits,
                 std::vector<Remedy>& remedies) {
  bool any = false;
  for (size_t kind = first; kind < std::size(kChanges); ++kind) {
    const auto variants = kChanges[kind](from);
    if (variants.empty()) continue;
    if (!most_fits(variants.back(), kind + 1, count - 1, limits)) {
      if (count == 1) remedies.push_back(remedy_of(variants.back(), limits));
      continue;
    }
    any = true;
    for (const Variant& variant : variants) {
      if (!most_fits(variant, kind + 1, count - 1, limits)) continue;
      if (count > 1) {
        try_changes(variant, kind + 1, count - 1, limits, remedies);
      } else {
        remedies.push_back(remedy_of(variant, limits));
      }
      break;
    }
  }
  return any;
}

std::vector<Remedy> fitting(std::vector<Remedy> remedies) {
  std::erase_if(remedies, [](const Remedy& remedy) { return !remedy.any_fits(); });
  return remedies;
}

}  // namespace

bool Remedy::any_fits() const { return std::ranges::find(fits, true) != fits.end(); }

std::vector<Remedy> find_remedies(const PlanJob& job, const RemedySearch& search,
                                  const MemoryLimits& limits) {
  const Variant given{job, search.levels, search.may_raise_level, {}};
  std::vector<Remedy> alone, remedies;
  if (try_changes(given, 0, 1, limits, remedies) || !search.may_combine) return fitting(remedies);
  std::swap(alone, remedies);
  for (size_t count = 2; count <= kMostTogether; ++count)
    if (try_changes(given, 0, count, limits, remedies)) return fitting(remedies);
  for (const Variant& shorter : shorten_sequence(given)) {
    remedies.push_back(remedy_of(shorter, limits));
    for (size_t count = 1; count <= kMostTogether && fitting(remedies).empty(); ++count)
      try_changes(shorter, 0, count, limits, remedies);
    if (!fitting(remedies).empty()) return fitting(remedies);
  }
  return alone;
}

}  // namespace tessera::tools
