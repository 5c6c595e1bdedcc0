#include "module_tree.h"

#include <torch/nn/module.h>

namespace tessera::python {
namespace {

// Returns the module that has the tensor of this name, made if need be, and the last part of the
// name.
std::pair<torch::nn::Module*, std::string> place_of(torch::nn::Module& root, std::string name) {
  torch::nn::Module* module = &root;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.')) {
    const std::string child = name.substr(0, dot);
    const auto children = module->named_children();
    const auto* known = children.find(child);
    module = known ? known->get()
                   : module->register_module(child, std::make_shared<torch::nn::Module>()).get();
    name = name.substr(dot + 1);
  }
  return {module, name};
}

}  // namespace

std::vector<NamedTensor> named(const NamedTensors& pairs) {
  std::vector<NamedTensor> result;
  for (const auto& [name, tensor] : pairs) result.push_back({name, tensor});
  return result;
}

std::shared_ptr<torch::nn::Module> module_tree(const NamedTensors& parameters,
                                               const NamedTensors& buffers,
                                               const std::vector<std::string>& modules) {
  auto root = std::make_shared<torch::nn::Module>();
  for (const std::string& name : modules) {
    const auto [parent, last] = place_of(*root, name);
    parent->register_module(last, std::make_shared<torch::nn::Module>());
  }
  for (const auto& [name, tensor] : parameters) {
    const auto [module, last] = place_of(*root, name);
    module->register_parameter(last, tensor, tensor.requires_grad());
  }
  for (const auto& [name, tensor] : buffers) {
    const auto [module, last] = place_of(*root, name);
    module->register_buffer(last, tensor);
  }
  return root;
}

}  // namespace tessera::python
