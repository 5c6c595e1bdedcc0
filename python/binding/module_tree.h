#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/fully_shard.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::python {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
std::vector<NamedTensor> named(const NamedTensors& pairs);

/// Returns a module of LibTorch with these tensors, for interfaces that take a module: a tree of
/// modules, as the dots in the names say. It has no forward. `modules`: names of modules that it
/// also has, in their order, parents first.
std::shared_ptr<torch::nn::Module> module_tree(const NamedTensors& parameters,
                                               const NamedTensors& buffers,
                                               const std::vector<std::string>& modules = {});

}  // namespace tessera::python
