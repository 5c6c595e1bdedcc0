#include "parallel/stage_graph.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace tessera {

using torch::autograd::Edge;
using torch::autograd::Engine;

// A node of the path with edges that leave it.
struct StageGraph::Side {
  struct Watch : torch::autograd::FunctionPostHook {
    explicit Watch(Side& side) : side(side) {}
    Tensors operator()(const Tensors& outputs, const Tensors& inputs) override {
      side.inputs = inputs;
      side.outputs.clear();
      for (const uint32_t edge : side.edges) side.outputs.push_back(outputs[edge]);
      return outputs;
    }
    Side& side;
  };

  Side(NodePtr node, std::vector<uint32_t> edges)
      : node(std::move(node)),
        edges(std::move(edges)),
        hook(this->node->add_post_hook(std::make_unique<Watch>(*this))) {}
  ~Side() { node->del_post_hook(hook); }

  // Ends the first part: cuts the edges of the path.
  void cut() {
    node->del_post_hook(hook);
    for (uint32_t i = 0; i < node->num_outputs(); ++i)
      if (std::ranges::find(edges, i) == edges.end()) node->next_edges()[i] = Edge();
  }

  void add_to(Roots& roots) const {
    if (std::ranges::all_of(outputs, [](const at::Tensor& each) { return each.defined(); })) {
      for (size_t i = 0; i < outputs.size(); ++i) roots.add(node->next_edge(edges[i]), outputs[i]);
      return;
    }
    // They have changed what the node got.
    node->tensor_pre_hooks().clear();
    node->retains_grad_hooks().clear();
    node->pre_hooks().clear();
    for (size_t i = 0; i < inputs.size(); ++i)
      roots.add({node, static_cast<uint32_t>(i)}, inputs[i]);
  }

  const NodePtr node;
  const std::vector<uint32_t> edges;
  const uintptr_t hook;
  Tensors inputs, outputs;  // outputs: of the side edges
};

StageGraph::StageGraph(Tensors inputs, const Tensors& outputs) : inputs_(std::move(inputs)) {
  for (const at::Tensor& input : inputs_)
    input_edges_.push_back(input.requires_grad() ? torch::autograd::impl::gradient_edge(input)
                                                 : Edge());
  for (const at::Tensor& output : outputs)
    output_edges_.push_back(output.requires_grad() ? torch::autograd::impl::gradient_edge(output)
                                                   : Edge());
}
StageGraph::~StageGraph() = default;
StageGraph::StageGraph(StageGraph&&) noexcept = default;
StageGraph& StageGraph::operator=(StageGraph&&) noexcept = default;

void StageGraph::Roots::add(const Edge& edge, const at::Tensor& gradient) {
  if (!edge.is_valid() || !gradient.defined()) return;
  edges.push_back(edge);
  gradients.push_back(gradient);
}

void StageGraph::Roots::run() const {
  if (edges.empty()) return;
  Engine::get_default_engine().execute(edges, gradients, /*keep_graph=*/false,
                                       /*create_graph=*/false, /*accumulate_grad=*/true);
}

StageGraph::Roots StageGraph::roots_of(const Tensors& gradients) const {
  Roots roots;
  for (size_t i = 0; i < output_edges_.size(); ++i) roots.add(output_edges_[i], gradients[i]);
  return roots;
}

StageGraph::Tensors StageGraph::backward(const Tensors& gradients) {
  roots_of(gradients).run();
  output_edges_.clear();
  Tensors result;
  for (const at::Tensor& input : inputs_) result.push_back(input.grad());
  return result;
}

// Returns the nodes from which an edge leads to an input, and adds those with side edges to
// `sides_`. Visits a node after those that its edges lead to.
std::unordered_set<const torch::autograd::Node*> StageGraph::find_path() {
  std::unordered_set<const torch::autograd::Node*> path, seen;
  for (const Edge& edge : input_edges_)
    if (edge.is_valid()) path.insert(edge.function.get());
  std::vector<std::pair<NodePtr, uint32_t>> open;  // and the next of its edges
  const auto visit = [&](const Edge& edge) {
    if (edge.is_valid() && seen.insert(edge.function.get()).second)
      open.emplace_back(edge.function, 0);
  };
  for (const Edge& output : output_edges_) {
    visit(output);
    while (!open.empty()) {
      const NodePtr node = open.back().first;
      if (open.back().second < node->num_outputs()) {
        visit(node->next_edge(open.back().second++));
        continue;
      }
      open.pop_back();
      std::vector<uint32_t> sides;
      bool is_on_path = false;
      for (uint32_t i = 0; i < node->num_outputs(); ++i) {
        const Edge& edge = node->next_edge(i);
        const bool leads_on = edge.is_valid() && path.contains(edge.function.get());
        is_on_path |= leads_on;
        if (edge.is_valid() && !leads_on) sides.push_back(i);
      }
      if (!is_on_path) continue;
      path.insert(node.get());
      if (!sides.empty()) sides_.push_back(std::make_unique<Side>(node, std::move(sides)));
    }
  }
  return path;
}

StageGraph::Tensors StageGraph::input_gradients(const Tensors& gradients) {
  const Roots roots = roots_of(gradients);
  torch::autograd::edge_list wanted;
  for (const Edge& edge : input_edges_)
    if (edge.is_valid()) wanted.push_back(edge);
  if (wanted.empty() || roots.edges.empty()) {
    rest_ = roots;
    return Tensors(inputs_.size());
  }
  const auto path = find_path();
  const auto found = Engine::get_default_engine().execute(
      roots.edges, roots.gradients, /*keep_graph=*/true, /*create_graph=*/false,
      /*accumulate_grad=*/false, wanted);
  for (size_t i = 0; i < roots.edges.size(); ++i)
    if (!path.contains(roots.edges[i].function.get()))
      rest_.add(roots.edges[i], roots.gradients[i]);
  for (const auto& side : sides_) side->cut();
  output_edges_.clear();  // frees the nodes of the path that don't run again
  Tensors result;
  size_t next = 0;
  for (const Edge& edge : input_edges_)
    result.push_back(edge.is_valid() ? found[next++] : at::Tensor());
  return result;
}

void StageGraph::weight_gradients() {
  for (const auto& side : sides_) side->add_to(rest_);
  rest_.run();
  rest_ = {};
  sides_.clear();
}

}  // namespace tessera
