#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/parallel/all_to_all.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <utility>

#include "parallel/texts_of_ranks.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Sizes = std::vector<int64_t>;

constexpr CollectiveTag kRows{"rows of all_to_all_single", Channel::kControl};

// What a rank is about to send and to receive.
struct Call {
  std::string rows;  // their dtype and shape
  Sizes to, from;
};

std::string text_of(const Call& call) {
  return fmt::format("{}|{}|{}", call.rows, fmt::join(call.to, " "), fmt::join(call.from, " "));
}

Call call_in(const std::string& text) {
  std::istringstream stream(text);
  Call call;
  std::string to, from;
  std::getline(stream, call.rows, '|');
  std::getline(stream, to, '|');
  std::getline(stream, from, '|');
  const auto read = [](const std::string& numbers, Sizes& sizes) {
    std::istringstream items(numbers);
    for (int64_t size = 0; items >> size;) sizes.push_back(size);
  };
  read(to, call.to);
  read(from, call.from);
  return call;
}

void check_sizes(const char* name, const Sizes& sizes, const ProcessGroup& process_group) {
  TORCH_CHECK_VALUE(std::ssize(sizes) == process_group.size(), "[all_to_all_single] ", name,
                    " must have one size for each of ", process_group.size(), " ranks; got ",
                    sizes.size());
  TORCH_CHECK_VALUE(std::ranges::all_of(sizes, [](int64_t size) { return size >= 0; }),
                    "[all_to_all_single] ", name, " must not be negative; got ",
                    at::IntArrayRef(sizes));
}

// Returns the calls of all ranks; `own` makes this rank's. If it throws on any rank, all throw.
// Collective.
std::vector<Call> calls_of_ranks(ProcessGroup& process_group, const std::function<Call()>& own) {
  std::vector<Call> calls;
  for (const std::string& text :
       texts_of_ranks(process_group, kRows, [&] { return text_of(own()); }))
    calls.push_back(call_in(text));
  return calls;
}

void check_calls(const std::vector<Call>& calls) {
  for (size_t from = 0; from < calls.size(); ++from) {
    TORCH_CHECK_VALUE(calls[from].rows == calls[0].rows,
                      "[all_to_all_single] all ranks must have rows of one dtype and shape; got ",
                      calls[0].rows, " on rank 0, ", calls[from].rows, " on rank ", from);
    for (size_t to = 0; to < calls.size(); ++to)
      TORCH_CHECK_VALUE(calls[from].to[to] == calls[to].from[from],
                        "[all_to_all_single] output_split_sizes must be what the ranks send: rank ",
                        from, " sends ", calls[from].to[to], " rows to rank ", to,
                        ", which expects ", calls[to].from[from],
                        ". exchange_split_sizes() returns them");
  }
}

at::Tensor send(const at::Tensor& input, const Sizes& from, const Sizes& to,
                ProcessGroup& process_group) {
  Sizes shape = input.sizes().vec();
  shape[0] = c10::sum_integers(from);
  const at::Tensor source = input.detach().contiguous(),
                   output = at::empty(shape, source.options());
  const int64_t row = c10::multiply_integers(shape.begin() + 1, shape.end());
  const auto cut = [&](const at::Tensor& rows, const Sizes& sizes) {
    std::vector<at::Tensor> parts;
    int64_t begin = 0;
    for (const int64_t size : sizes) {
      parts.push_back(rows.view({-1}).narrow(0, begin * row, size * row));
      begin += size;
    }
    return parts;
  };
  process_group.all_to_all(cut(output, from), cut(source, to), kRows)->wait();
  return output;
}

struct Holder : torch::CustomClassHolder {
  explicit Holder(ProcessGroupPtr ranks) : process_group(std::move(ranks)) {}
  ProcessGroupPtr process_group;
};

struct SendRows : torch::autograd::Function<SendRows> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const Sizes& from,
                            const Sizes& to, const c10::intrusive_ptr<Holder>& holder) {
    context->saved_data["from"] = from;
    context->saved_data["to"] = to;
    context->saved_data["process_group"] = c10::IValue::make_capsule(holder);
    return send(input, from, to, *holder->process_group);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto holder = c10::static_intrusive_pointer_cast<Holder>(
        context->saved_data["process_group"].toCapsule());
    return {SendRows::apply(gradients[0], context->saved_data["to"].toIntVector(),
                            context->saved_data["from"].toIntVector(), holder),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::vector<int64_t> exchange_split_sizes(const std::vector<int64_t>& input_split_sizes,
                                          const ProcessGroupPtr& process_group) {
  const auto calls = calls_of_ranks(*process_group, [&]() -> Call {
    check_sizes("input_split_sizes", input_split_sizes, *process_group);
    return {"", input_split_sizes, {}};
  });
  Sizes from;
  for (const Call& call : calls) from.push_back(call.to[process_group->rank()]);
  return from;
}

at::Tensor all_to_all_single(const at::Tensor& input, std::vector<int64_t> output_split_sizes,
                             std::vector<int64_t> input_split_sizes,
                             const ProcessGroupPtr& process_group) {
  check_calls(calls_of_ranks(*process_group, [&]() -> Call {
    TORCH_CHECK_VALUE(
        !is_dist(input) && input.dim() > 0,
        "[all_to_all_single] the input must be an ordinary tensor of rows; got ",
        is_dist(input) ? "a DistTensor: to_local() is this rank's part" : "one without dims");
    check_sizes("input_split_sizes", input_split_sizes, *process_group);
    check_sizes("output_split_sizes", output_split_sizes, *process_group);
    TORCH_CHECK_VALUE(c10::sum_integers(input_split_sizes) == input.size(0),
                      "[all_to_all_single] input_split_sizes must add up to the ", input.size(0),
                      " rows of the input; got ", at::IntArrayRef(input_split_sizes));
    return {c10::str(input.scalar_type(), " ", input.sizes().slice(1)), input_split_sizes,
            output_split_sizes};
  }));
  return SendRows::apply(input, std::move(output_split_sizes), std::move(input_split_sizes),
                         c10::make_intrusive<Holder>(process_group));
}

}  // namespace tessera
