#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <memory>
#include <vector>

namespace tessera {

struct Node;

/// How the bytes of a storage are made: an operator, and the recipes of its inputs. Never changes,
/// and holds no storage of a deferred tensor, so there are no cycles.
using Recipe = std::shared_ptr<const Node>;

struct Node {
  /// An argument whose storage has a recipe.
  struct Input {
    size_t argument;
    at::Tensor shape;  ///< the argument without its memory
    size_t nbytes;     ///< of its storage
    Recipe recipe;     ///< null if the operator overwrites all of it unread
  };

  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;  ///< all others; tensors among them are copies
  std::vector<Input> inputs;
  bool in_place = false;    ///< the value is the storage of the first argument, not of the result
  at::Generator generator;  ///< in its state before the operator; undefined if it draws nothing
  size_t nbytes = 0;        ///< of the value
  int steps = 1;            ///< operators that an evaluation runs
};

/// Runs the recipe and returns the result. Draws from copies of the recorded generators, so that
/// nothing outside changes.
c10::Storage evaluate(const Recipe& recipe);

/// Returns a storage whose memory is uninitialized.
c10::Storage fresh_storage(size_t nbytes);

/// Return a tensor with the geometry of `shape`, on another storage or on one without memory.
at::Tensor on_storage(const at::Tensor& shape, c10::Storage storage);
at::Tensor without_memory(const at::Tensor& shape);

}  // namespace tessera
