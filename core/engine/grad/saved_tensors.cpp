#include "engine/grad/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <atomic>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/device/scoped_value.h"

namespace tessera {

// [Note: Hooks without Python]
//
// For each tensor that an operator saves, LibTorch asks its autograd engine whether hooks are set
// for it. Python's engine answers with those of torch.autograd.graph.saved_tensors_hooks; the C++
// engine has none. So our engine stands in front of the installed one, whichever it is: it answers
// that question in a scope, and forwards every other call. It has no threads
// and no state, and is installed by the first scope. If another engine was installed since
// (Python's, by an import), the next scope puts it in front of that one.
//
// The non-virtual functions of an engine work on the state of the running backward, not on the
// engine's.
namespace {

using namespace torch::autograd;

// A pointer to a node: a `std::shared_ptr` before LibTorch 2.13, since then a `c10::intrusive_ptr`.
using NodePointer = std::remove_cvref_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

constexpr std::string_view kHooksName = "tessera saved tensors";
const ScopedValue<const SavedTensorScope::MakeHooks*> kCurrent(&kHooksName, 203);

class FrontAutograd final : public Engine {
 public:
  // Never destroyed: backwards may run while static variables are destroyed.
  static Engine& get() {
    static auto* const engine = new FrontAutograd;
    return *engine;
  }

  static void install() {
    Engine& installed = get_default_engine();
    if (&installed == &get()) return;
    behind_ = &installed;
    set_default_engine_stub(&get);
  }

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    const auto* const make = kCurrent.find();
    return make ? (**make)() : behind().get_default_saved_variable_hooks();
  }

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad,
                        const edge_list& outputs) override {
    return behind().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<GraphTask>& graph_task, NodePointer graph_root,
      InputBuffer&& input_buffer) override {
    return behind().execute_with_graph_task(graph_task, std::move(graph_root),
                                            std::move(input_buffer));
  }

  std::unique_ptr<AnomalyMetadata> make_anomaly_metadata() override {
    return behind().make_anomaly_metadata();
  }

  void thread_on_exception(const std::shared_ptr<GraphTask>& graph_task, const NodePointer& fn,
                           std::exception& error) override {
    behind().thread_on_exception(graph_task, fn, error);
  }

  void thread_init(int device, const std::shared_ptr<ReadyQueue>& ready_queue,
                   bool should_increment) override {
    behind().thread_init(device, ready_queue, should_increment);
  }

 private:
  static Engine& behind() { return *behind_.load(); }

  static inline std::atomic<Engine*> behind_ = nullptr;
};

}  // namespace

SavedTensorScope::SavedTensorScope(MakeHooks make)
    : make_(std::move(make)), scope_(kCurrent.scope(&make_)) {
  FrontAutograd::install();
}

}  // namespace tessera
