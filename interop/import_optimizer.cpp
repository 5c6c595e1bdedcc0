#include "interop/import_optimizer.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/files/json_text.h"
#include "base/files/untrusted.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/tied_copies.h"
#include "interop/dcp_directory.h"
#include "interop/python_optimizer.h"

namespace tessera {
namespace {

using Kind = PickleValue::Kind;

// More than any optimizer has: groups are searched one after another.
constexpr size_t kMostGroups = 10'000, kMostGroupParams = size_t{1} << 20,
                 kMostOptions = 100;  // of a group, or of a parameter's state

// Keeps the tensors under `prefix`, and removes the prefix from their names.
std::vector<TensorRecord> taken_under(std::vector<TensorRecord>& records,
                                      const std::string& prefix) {
  std::vector<TensorRecord> taken;
  for (const TensorRecord& record : records) {
    std::vector<std::string> names;
    for (const std::string& name : record.names)
      if (name.starts_with(prefix)) names.push_back(name.substr(prefix.size()));
    if (names.empty()) continue;
    taken.push_back(record);
    taken.back().names = std::move(names);
  }
  return taken;
}

// The names of the parameters of a group that has them.
std::vector<std::string> texts_of(const PickleValue& list) {
  TORCH_CHECK_VALUE(list.is_list() && list.items.size() <= kMostGroupParams,
                    "the names of a param group's parameters must be a list");
  std::vector<std::string> texts;
  for (const PickleValue* item : list.items) {
    TORCH_CHECK_VALUE(item->is(Kind::kText),
                      "the names of a param group's parameters must be texts");
    check_tensor_name(item->text);
    texts.emplace_back(item->text);
  }
  return texts;
}

// --- a file of torch.save ----------------------------------------------------------------------

// The number of a tensor for Python's optimizer, and its name.
using ParamNames = std::map<int64_t, std::string>;

struct PickledOptimizer {
  std::vector<PythonGroup> groups;
  ParamNames names;
};

PythonGroup pickled_group(const PickleValue& group, const TorchFile& file) {
  TORCH_CHECK_VALUE(group.is(Kind::kDict) && group.items.size() <= 2 * kMostOptions,
                    "a param group must be a dict of its options");
  PythonGroup result;
  for (size_t i = 0; i + 1 < group.items.size(); i += 2) {
    const PickleValue &key = *group.items[i], &value = *group.items[i + 1];
    if (!key.is(Kind::kText) || key.text == "params" || key.text == "param_names") continue;
    std::vector<double> numbers = numbers_of(value);
    if (value.is(Kind::kTensor)) {  // a learning rate may be a tensor
      const PickledTensor& tensor = file.pickle().tensor(value);
      if (CheckedShape(tensor.shape).numel() == 1) numbers = {file.read(tensor).item<double>()};
    }
    if (!numbers.empty()) result.options[std::string(key.text)] = std::move(numbers);
  }
  return result;
}

// An optimizer numbers its parameters in the order in which it was given them, which need not be
// the model's: `given` are all names in that order, and `first` the number of the group's first
// one.
std::vector<std::string> names_of_group(const PickleValue& group, size_t first, size_t count,
                                        const std::vector<std::string>& given) {
  const PickleValue* const names = group.find("param_names");
  TORCH_CHECK_VALUE(
      names || !given.empty(),
      "its optimizer numbers its parameters, and has no names of them: which number is which "
      "parameter can't be seen. Make the optimizer from named_parameters(), as PyTorch 2.6 and "
      "newer accept it, and save again; or pass options.optimizer_params (--optimizer-params), the "
      "names in the order in which the optimizer was given the parameters");
  TORCH_CHECK_VALUE(
      !names || given.empty(),
      "it has the names of its optimizer's parameters: leave options.optimizer_params out");
  if (names) return texts_of(*names);
  const auto of_group = c10::ArrayRef<std::string>(given).slice(std::min(first, given.size()));
  return of_group.slice(0, std::min(count, of_group.size())).vec();
}

PickledOptimizer pickled_optimizer(const PickleValue& optimizer, const TorchFile& file,
                                   const std::vector<std::string>& given) {
  const PickleValue& listed = optimizer.at("param_groups");
  TORCH_CHECK_VALUE(listed.is_list() && listed.items.size() <= kMostGroups,
                    "its param_groups must be a list");
  PickledOptimizer result;
  for (const PickleValue* item : listed.items) {
    PythonGroup& group = result.groups.emplace_back(pickled_group(*item, file));
    const PickleValue& numbers = item->at("params");
    TORCH_CHECK_VALUE(numbers.is_list() && numbers.items.size() <= kMostGroupParams,
                      "a param group's params must be a list");
    group.params = names_of_group(*item, result.names.size(), numbers.items.size(), given);
    TORCH_CHECK_VALUE(group.params.size() == numbers.items.size(), "a param group has ",
                      numbers.items.size(), " parameters and ", group.params.size(), " names");
    for (size_t i = 0; i < group.params.size(); ++i)
      TORCH_CHECK_VALUE(result.names.emplace(numbers.items[i]->whole(), group.params[i]).second,
                        "parameter ", numbers.items[i]->number, " is in two param groups");
  }
  TORCH_CHECK_VALUE(given.empty() || given.size() == result.names.size(),
                    "options.optimizer_params must name all parameters of its optimizer; expected ",
                    result.names.size(), " names, got ", given.size());
  return result;
}

// Returns the counts that older versions store as plain numbers, by the parameter's number.
std::map<int64_t, double> pickled_steps(const PickleValue& optimizer) {
  std::map<int64_t, double> steps;
  const PickleValue& state = optimizer.at("state");
  TORCH_CHECK_VALUE(state.is(Kind::kDict), "its state must be a dict");
  for (size_t i = 0; i + 1 < state.items.size(); i += 2) {
    const PickleValue &key = *state.items[i], &values = *state.items[i + 1];
    if (!key.is(Kind::kInt) || values.items.size() > 2 * kMostOptions) continue;
    const PickleValue* const step = values.find("step");
    if (const auto count = step ? step->as_number() : std::nullopt) steps[key.number] = *count;
  }
  return steps;
}

// --- a DCP directory ---------------------------------------------------------------------------

// Splits `FQN.OPTION`. Options have no dots.
std::pair<std::string, std::string> split_last(const std::string& name) {
  const size_t dot = name.rfind('.');
  TORCH_CHECK_VALUE(dot != std::string::npos, "'", shortened(name), "' must be PARAMETER.NAME");
  return {name.substr(0, dot), name.substr(dot + 1)};
}

bool is_number(const std::string& text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// Param groups are stored by number, with a list `params`; or as options of each parameter, if
// `get_state_dict` was asked to flatten the optimizer's state.
std::vector<PythonGroup> dcp_groups(const DcpDirectory& dcp, const std::string& prefix,
                                    const std::vector<TensorRecord>& model) {
  std::map<std::string, PythonGroup> entries;
  for (const auto& [name, place] : dcp.values()) {
    if (!name.starts_with(prefix)) continue;
    const auto [entry, option] = split_last(name.substr(prefix.size()));
    const TorchFile file = dcp.read(place);
    const PickleValue& value = file.pickle().root();
    if (option == "params") {
      entries[entry].params = texts_of(value);
    } else if (std::vector<double> numbers = numbers_of(value); !numbers.empty()) {
      entries[entry].options[option] = std::move(numbers);
    }
  }
  std::vector<PythonGroup> groups;
  const bool is_numbered =
      std::ranges::all_of(entries, [](const auto& e) { return is_number(e.first); });
  if (is_numbered) {
    TORCH_CHECK_VALUE(entries.size() <= kMostGroups, "it has too many param groups");
    for (size_t number = 0; number < entries.size(); ++number) {
      const auto it = entries.find(std::to_string(number));
      TORCH_CHECK_VALUE(it != entries.end(), "it lacks param group ", number);
      groups.push_back(std::move(it->second));
    }
    return groups;
  }
  // The groups themselves are not stored: parameters with equal options are one.
  std::map<std::map<std::string, std::vector<double>>, size_t> places;
  for (const TensorRecord& record : model) {
    const auto it = entries.find(record.names.front());
    if (it == entries.end()) continue;
    const auto [place, is_new] = places.emplace(it->second.options, groups.size());
    if (is_new) groups.push_back({it->second.options, {}});
    groups[place->second].params.push_back(record.names.front());
  }
  return groups;
}

// -----------------------------------------------------------------------------------------------

// Adds the optimizer's tensors, `PARAMETER.STATE`, to the model's. `name_of` returns the name of a
// parameter.
template <class NameOf>
void add_states(std::vector<TensorRecord> states, const NameOf& name_of, ChunkReader& reader,
                CheckpointIndex& index) {
  std::unordered_map<std::string, size_t> params;
  for (size_t i = 0; i < index.tensors.size(); ++i)
    for (const std::string& name : index.tensors[i].names) params.emplace(name, i);
  for (TensorRecord& record : states) {
    const auto [key, state] = split_last(record.names.front());
    const std::string name = name_of(key);
    const auto it = params.find(name);
    TORCH_CHECK_VALUE(it != params.end(), "its optimizer has state of '", shortened(name),
                      "', which the model has not");
    const TensorRecord param = index.tensors[it->second];
    if (take_state(record, param, state, reader, *index.optimizer))
      index.tensors.push_back(std::move(record));
  }
}

void check_params(const CheckpointIndex& index) {
  std::unordered_map<std::string, size_t> uses;
  for (const TensorRecord& record : index.tensors)
    for (const std::string& name : record.names) uses.emplace(name, 0);
  for (const ParamGroupRecord& group : index.optimizer->param_groups) {
    for (const std::string& name : group.params) {
      const auto it = uses.find(name);
      TORCH_CHECK_VALUE(it != uses.end() && it->second++ == 0, "its optimizer has the parameter '",
                        shortened(name),
                        it == uses.end() ? "', which the model has not" : "' twice");
    }
  }
}

void add_pickled_optimizer(const ForeignFiles& files, std::vector<TensorRecord> states,
                           const ImportOptions& options, ChunkReader& reader,
                           CheckpointIndex& index) {
  const TorchFile& file = *files.torch_file;
  const PickleValue& optimizer = file.pickle().root().at(options.optimizer_key);
  const PickledOptimizer pickled = pickled_optimizer(optimizer, file, options.optimizer_params);
  index.optimizer = optimizer_record(pickled.groups, options.optimizer_class);
  check_params(index);
  const auto name_of_number = [&](int64_t number) {
    const auto it = pickled.names.find(number);
    TORCH_CHECK_VALUE(it != pickled.names.end(), "its optimizer has state of parameter ", number,
                      ", which is in no param group");
    return it->second;
  };
  const auto name_of = [&](const std::string& key) {
    int64_t number = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), number);
    TORCH_CHECK_VALUE(error == std::errc() && end == key.data() + key.size(),
                      "the state of an optimizer must be by number; got '", shortened(key), "'");
    return name_of_number(number);
  };
  add_states(std::move(states), name_of, reader, index);
  for (const auto& [number, step] : pickled_steps(optimizer))
    set_count(*index.optimizer, name_of_number(number), "step", step);
}

void add_dcp_optimizer(const ForeignFiles& files, std::vector<TensorRecord> states,
                       const ImportOptions& options, ChunkReader& reader, CheckpointIndex& index) {
  const DcpDirectory dcp(files.path);
  const std::string prefix = options.optimizer_key + ".";
  index.optimizer = optimizer_record(dcp_groups(dcp, prefix + "param_groups.", index.tensors),
                                     options.optimizer_class);
  check_params(index);
  tie_copies(index, reader);
  add_states(
      std::move(states), [](const std::string& key) { return key; }, reader, index);
  for (const auto& [name, place] : dcp.values()) {
    if (!name.starts_with(prefix + "state.") || !name.ends_with(".step")) continue;
    const auto count = dcp.read(place).pickle().root().as_number();
    const std::string param = split_last(name.substr(prefix.size() + 6)).first;
    if (count) set_count(*index.optimizer, param, "step", *count);
  }
}

}  // namespace

void select_parts(ForeignFiles& files, const ImportOptions& options) {
  const bool has_optimizer = !options.optimizer_key.empty();
  TORCH_CHECK_VALUE(has_optimizer || options.optimizer_class.empty(),
                    "[import_checkpoint] options.optimizer_class needs options.optimizer_key");
  TORCH_CHECK_VALUE(has_optimizer || options.optimizer_params.empty(),
                    "[import_checkpoint] options.optimizer_params needs options.optimizer_key");
  const std::string model_key =
      options.model_key.empty() && has_optimizer ? "model" : options.model_key;
  if (model_key.empty()) return;
  naming_file("import_checkpoint", files.path, "must have the model and the optimizer", [&] {
    CheckpointIndex index;
    index.tensors = taken_under(files.index.tensors, model_key + ".");
    TORCH_CHECK_VALUE(!index.tensors.empty(), "it has no tensors under the key '", model_key, "'");
    if (has_optimizer) {
      auto states = taken_under(files.index.tensors, options.optimizer_key + ".state.");
      ChunkReader reader = files.reader();
      const bool is_dcp_directory = is_dcp(files.path);
      TORCH_CHECK_VALUE(is_dcp_directory || files.torch_file,
                        "options.optimizer_key is for a file of torch.save or a DCP directory");
      TORCH_CHECK_VALUE(!is_dcp_directory || options.optimizer_params.empty(),
                        "a DCP directory has the names of its optimizer's parameters: leave "
                        "options.optimizer_params out");
      is_dcp_directory ? add_dcp_optimizer(files, std::move(states), options, reader, index)
                       : add_pickled_optimizer(files, std::move(states), options, reader, index);
    }
    files.index = std::move(index);
  });
}

}  // namespace tessera
