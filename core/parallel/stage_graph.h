#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <unordered_set>
#include <vector>

namespace tessera {

// [Note: Backward in two parts]
//
// The path is the set of autograd's nodes through which gradients of a stage's outputs reach its
// inputs; parameters join it by side edges. The first part runs the path alone: autograd asks a
// node only for the gradients that the path needs, so a Linear computes that of its input and not
// that of its weight. A hook keeps what each node with side edges got. The second part cuts the
// edges of the path and runs these nodes again, from what they got, for their side edges. No node
// computes a gradient twice, and each parameter gets the terms that a whole backward gives it, in
// the same order: the bits are the same. A node that computes all gradients at once, as functions
// of autograd that users write do, runs once: its side gradients are kept from the first part.
//
// Hooks of users: those on tensors run once, in the first part; hooks on nodes that have side edges
// (`Node::add_post_hook`) see both.

/// The graph of one micro-batch in one stage, from its outputs back to its inputs.
class StageGraph {
 public:
  using NodePtr = decltype(torch::autograd::Edge::function);
  using Tensors = std::vector<at::Tensor>;

  /// Keeps the graph of `outputs`, not their values. `inputs` are leaves.
  StageGraph(Tensors inputs, const Tensors& outputs);
  ~StageGraph();
  StageGraph(StageGraph&&) noexcept;
  StageGraph& operator=(StageGraph&&) noexcept;

  /// Returns the gradients of the inputs, undefined if there is none, and adds those of parameters.
  /// `gradients`: of the outputs, undefined ones for none. Called once; frees the graph.
  Tensors backward(const Tensors& gradients);

  /// Does the same in two calls. If no input requires a gradient, the second does all.
  Tensors input_gradients(const Tensors& gradients);
  void weight_gradients();

 private:
  struct Side;
  struct Roots {
    torch::autograd::edge_list edges;
    Tensors gradients;
    void add(const torch::autograd::Edge& edge, const at::Tensor& gradient);
    void run() const;
  };
  Roots roots_of(const Tensors& gradients) const;
  std::unordered_set<const torch::autograd::Node*> find_path();

  Tensors inputs_;
  std::vector<torch::autograd::Edge> input_edges_, output_edges_;  // invalid: no gradient
  std::vector<std::unique_ptr<Side>> sides_;
  Roots rest_;  // what the second part begins with, besides the sides
};

}  // namespace tessera
