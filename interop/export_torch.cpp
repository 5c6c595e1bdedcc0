#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <map>
#include <string>

#include "interop/exported_model.h"
#include "interop/python_optimizer.h"
#include "interop/torch_writer.h"

namespace tessera {
namespace {

c10::impl::GenericDict model_dict(ExportedModel& model, TorchWriter& writer) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::TensorType::get());
  for (const TensorRecord* record : model.tensors()) {
    const at::Tensor stand_in = writer.add(record->names.front(), model.read(*record));
    for (const std::string& name : record->names) dict.insert(name, stand_in);
  }
  return dict;
}

c10::impl::GenericDict state_dict_of_param(const std::string& param, ExportedModel& model,
                                           TorchWriter& writer) {
  c10::impl::GenericDict dict = python_dict();
  for (const auto& [name, value] : python_counts(*model.optimizer(), param))
    dict.insert(name, writer.add(param, value));
  for (const TensorRecord* record : model.states_of(param))
    dict.insert(record->state, writer.add(record->id(), model.read(*record)));
  return dict;
}

// Parameters are numbered in the order of the param groups.
c10::impl::GenericDict optimizer_dict(ExportedModel& model, TorchWriter& writer) {
  const OptimizerRecord& optimizer = *model.optimizer();
  c10::impl::GenericDict states(c10::IntType::get(), c10::AnyType::get());
  c10::impl::GenericList groups(c10::AnyType::get());
  int64_t number = 0;
  for (size_t i = 0; i < optimizer.param_groups.size(); ++i) {
    c10::impl::GenericDict group = python_dict();
    for (const auto& [name, value] : python_options(optimizer, i)) group.insert(name, value);
    c10::impl::GenericList numbers(c10::AnyType::get()), names(c10::AnyType::get());
    for (const std::string& param : optimizer.param_groups[i].params) {
      numbers.push_back(number);
      names.push_back(param);
      c10::impl::GenericDict state = state_dict_of_param(param, model, writer);
      if (!state.empty()) states.insert(number, state);
      ++number;
    }
    group.insert("param_names", names);
    group.insert("params", numbers);
    groups.push_back(group);
  }
  c10::impl::GenericDict result = python_dict();
  result.insert("state", states);
  result.insert("param_groups", groups);
  return result;
}

}  // namespace

void write_torch(const std::filesystem::path& file, ExportedModel& model) {
  TorchWriter writer(file.string());
  const ExportOptions& options = model.options();
  if (options.model_key.empty() && !model.optimizer())
    return writer.finish(model_dict(model, writer));
  c10::impl::GenericDict root = python_dict();
  root.insert(options.model_key.empty() ? "model" : options.model_key, model_dict(model, writer));
  if (model.optimizer()) root.insert(options.optimizer_key, optimizer_dict(model, writer));
  writer.finish(root);
}

}  // namespace tessera
