#include "engine/optim/optimizer_archive.h"

#include <ATen/core/Dict.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <optional>
#include <type_traits>
#include <variant>

#include "engine/optim/described_optimizer.h"
#include "engine/optim/foreign_state.h"
#include "engine/optim/param_state.h"
#include "engine/optim/part_state.h"

namespace tessera {

// [Note: Archive of an optimizer]
//
// An archive is a tree of archives with values at its leaves. That of an optimizer has
//   pytorch_version: "1.5.0"
//   state: an archive for each parameter with state, named by a number that stands for the
//     parameter (LibTorch takes its address)
//   param_groups: param_groups/size; an archive param_groups/i for each, with params/size, the
//     numbers params/j as text, and the archive options.
// The slashes are part of the names. LibTorch's load() matches parameters by their position in the
// param groups; any distinct numbers will do.
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using Values = OptimizerStateDict::Values;

constexpr const char* kVersion = "pytorch_version";
constexpr const char* kWrittenVersion = "1.5.0";  // of the layout, not of LibTorch
constexpr const char* kState = "state";
constexpr const char* kGroups = "param_groups";

bool is_archive(const c10::IValue& value) {
  if (!value.isGenericDict()) return false;
  const auto dict = value.toGenericDict();
  return *dict.keyType() == *c10::StringType::get() && *dict.valueType() == *c10::AnyType::get();
}

Values read_values(InputArchive& archive);

c10::IValue read_value(InputArchive& archive, const std::string& name) {
  InputArchive inner;
  if (!archive.try_read(name, inner)) {
    c10::IValue value;
    archive.read(name, value);
    return value;
  }
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : read_values(inner)) dict.insert(key, value);
  return dict;
}

Values read_values(InputArchive& archive) {
  Values values;
  for (const std::string& name : archive.keys()) values[name] = read_value(archive, name);
  return values;
}

void write_values(OutputArchive& archive, const Values& values) {
  for (const auto& [name, value] : values) {
    if (!is_archive(value)) {
      archive.write(name, value);
      continue;
    }
    Values inner;
    for (const auto& item : value.toGenericDict()) inner[item.key().toStringRef()] = item.value();
    OutputArchive inner_archive(archive.compilation_unit());
    write_values(inner_archive, inner);
    archive.write(name, inner_archive);
  }
}

int64_t read_size(InputArchive& archive, const char* name) {
  at::Tensor size;
  archive.read(name, size);
  return size.item<int64_t>();
}

at::Tensor size_tensor(size_t size) { return at::full({1}, static_cast<int64_t>(size), at::kLong); }

// Also numbers the keys that it meets for the first time.
OptimizerStateDict::ParamGroup read_group(InputArchive& archive,
                                          std::map<std::string, int64_t>& numbers) {
  OptimizerStateDict::ParamGroup group;
  const int64_t size = read_size(archive, "params/size");
  for (int64_t i = 0; i < size; ++i) {
    c10::IValue key;
    archive.read("params/" + std::to_string(i), key);
    group.params.push_back(
        numbers.emplace(key.toStringRef(), static_cast<int64_t>(numbers.size())).first->second);
  }
  InputArchive options;
  archive.read("options", options);
  group.options = read_values(options);
  return group;
}

std::string to_bytes(OutputArchive& archive) {
  std::string bytes;
  archive.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  return bytes;
}

// Returns an empty value if the archive is not that of an optimizer.
std::optional<OptimizerStateDict> read_archive(InputArchive& archive) {
  InputArchive state, groups;
  c10::IValue version;
  if (!archive.try_read(kVersion, version) || !archive.try_read(kState, state) ||
      !archive.try_read(kGroups, groups))
    return {};
  OptimizerStateDict result;
  std::map<std::string, int64_t> numbers;
  const int64_t size = read_size(groups, "param_groups/size");
  for (int64_t i = 0; i < size; ++i) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(i), group);
    result.param_groups.push_back(read_group(group, numbers));
  }
  for (const std::string& key : state.keys()) {
    const auto number = numbers.find(key);
    if (number == numbers.end()) continue;  // of a parameter that the optimizer no longer has
    InputArchive values;
    state.read(key, values);
    result.state[number->second] = read_values(values);
  }
  for (const std::string& name : archive.keys()) {
    if (name != kVersion && name != kState && name != kGroups)
      result.extra[name] = read_value(archive, name);
  }
  return result;
}

}  // namespace

void OptimizerStateDict::save(OutputArchive& archive) const {
  const auto key = [](int64_t number) {
    return std::to_string(number + 1);
  };  // as an address: not 0
  archive.write(kVersion, c10::IValue(kWrittenVersion));
  OutputArchive states(archive.compilation_unit());
  for (const auto& [number, values] : state) {
    OutputArchive values_archive(archive.compilation_unit());
    write_values(values_archive, values);
    states.write(key(number), values_archive);
  }
  archive.write(kState, states);
  OutputArchive groups(archive.compilation_unit());
  groups.write("param_groups/size", size_tensor(param_groups.size()));
  for (size_t i = 0; i < param_groups.size(); ++i) {
    const ParamGroup& param_group = param_groups[i];
    OutputArchive group(archive.compilation_unit()), options(archive.compilation_unit());
    group.write("params/size", size_tensor(param_group.params.size()));
    for (size_t j = 0; j < param_group.params.size(); ++j)
      group.write("params/" + std::to_string(j), c10::IValue(key(param_group.params[j])));
    write_values(options, param_group.options);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write(kGroups, groups);
  write_values(archive, extra);
}

OptimizerStateDict OptimizerStateDict::load(InputArchive& archive) {
  std::optional<OptimizerStateDict> result = read_archive(archive);
  TORCH_CHECK_VALUE(
      result, "[OptimizerStateDict::load] the archive must be that of an optimizer; expected '",
      kVersion, "', '", kState, "' and '", kGroups, "' in it");
  return std::move(*result);
}

void save_values(OutputArchive& archive, const torch::optim::Optimizer& optimizer,
                 const std::function<Values(const at::Tensor&)>& read_state,
                 const std::function<Values(size_t)>& read_options) {
  OptimizerStateDict dict;
  std::map<const c10::TensorImpl*, int64_t> numbers;
  const auto& groups = optimizer.param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    auto& group = dict.param_groups.emplace_back();
    group.options = read_options(i);
    for (const at::Tensor& param : groups[i].params()) {
      const auto [it, is_new] =
          numbers.emplace(param.unsafeGetTensorImpl(), static_cast<int64_t>(numbers.size()));
      group.params.push_back(it->second);
      if (!is_new) continue;
      if (Values values = read_state(param); !values.empty())
        dict.state[it->second] = std::move(values);
    }
  }
  dict.save(archive);
}

void load_values(InputArchive& archive, const torch::optim::Optimizer& optimizer,
                 const std::function<void(const at::Tensor&, const Values&)>& write_state,
                 const std::function<void(size_t, const Values&)>& write_options) {
  const OptimizerStateDict dict = OptimizerStateDict::load(archive);
  const auto& groups = optimizer.param_groups();
  TORCH_CHECK_VALUE(dict.param_groups.size() == groups.size(),
                    "[load] the state must have the optimizer's param groups; expected ",
                    groups.size(), ", got ", dict.param_groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& numbers = dict.param_groups[i].params;
    const auto& params = groups[i].params();
    TORCH_CHECK_VALUE(numbers.size() == params.size(),
                      "[load] the state must have the optimizer's parameters; expected ",
                      params.size(), " in param group ", i, ", got ", numbers.size());
    for (size_t j = 0; j < params.size(); ++j) {
      const auto it = dict.state.find(numbers[j]);
      if (it != dict.state.end()) write_state(params[j], it->second);
    }
    write_options(i, dict.param_groups[i].options);
  }
}

// OptimizerTraits have all that an archive needs: save() and load() of the class are not called.
static void save_described(OutputArchive& archive, const torch::optim::Optimizer& optimizer,
                           const detail::DescribedOptimizer& traits) {
  save_values(
      archive, optimizer,
      [&](const at::Tensor& param) { return values_of(read_param_state(optimizer, param)); },
      [&](size_t group) {
        Values values;
        auto& options = const_cast<torch::optim::OptimizerOptions&>(
            optimizer.param_groups()[group].options());  // only read
        for (const auto& [name, option] : traits.options(options))
          std::visit([&, &name = name](auto* value) { values[name] = *value; }, option);
        return values;
      });
}

static void load_described(InputArchive& archive, torch::optim::Optimizer& optimizer,
                           const detail::DescribedOptimizer& traits) {
  const auto counts = traits.state(*traits.make_state()).counts;
  load_values(
      archive, optimizer,
      [&](const at::Tensor& param, const Values& values) {
        ParamState state;
        for (const auto& [name, value] : values) {
          if (!counts.contains(name)) {
            state.tensors[name] = value.toTensor();
          } else {
            state.counts[name] =
                value.isTensor() ? value.toTensor().item<double>() : value.toScalar().toDouble();
          }
        }
        write_param_state(optimizer, param, state);
      },
      [&](size_t group, const Values& values) {
        for (const auto& [name, option] : traits.options(optimizer.param_groups()[group].options()))
          if (const auto it = values.find(name); it != values.end())
            std::visit(
                [&](auto* own) { *own = it->second.toScalar().to<std::decay_t<decltype(*own)>>(); },
                option);
      });
}

std::string save_optimizer(const torch::optim::Optimizer& optimizer) {
  const SavesParts saves_parts;
  OutputArchive archive;
  if (const auto* const described = find_described(optimizer)) {
    save_described(archive, optimizer, *described);
  } else {
    optimizer.save(archive);
  }
  return to_bytes(archive);
}

OptimizerStateDict parse_optimizer(const std::string& bytes, const char* function) {
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), at::kCPU);
  std::optional<OptimizerStateDict> result = read_archive(archive);
  TORCH_CHECK_NOT_IMPLEMENTED(
      result, "[", function,
      "] the class of the optimizer must override save() and load(), for example by "
      "torch::optim::serialize<ParamState, Options>(archive, *this); its save() writes no state");
  return std::move(*result);
}

void load_optimizer(torch::optim::Optimizer& optimizer, const std::string& bytes) {
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  const auto* const described = find_described(optimizer);
  described ? load_described(archive, optimizer, *described) : optimizer.load(archive);
}

std::string write_optimizer(const OptimizerStateDict& state_dict) {
  OutputArchive archive;
  state_dict.save(archive);
  return to_bytes(archive);
}

}  // namespace tessera
