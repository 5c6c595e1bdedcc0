#include "message/exchange_process_group.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "group/collective.h"
#include "group/sent_bytes.h"

namespace tessera {
namespace {

constexpr size_t kMaxFreeBlocks = 16;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

}  // namespace

ExchangeProcessGroup::ExchangeProcessGroup(c10::intrusive_ptr<c10d::Backend> backend,
                                           std::string backend_name,
                                           std::chrono::milliseconds timeout)
    : mailbox_(std::move(backend)),
      backend_name_(std::move(backend_name)),
      timeout_(timeout),
      pool_(std::make_shared<BlockPool>(kMaxMessageBytes, kMaxFreeBlocks)) {
  for (auto& thread : threads_) thread = std::make_shared<JobThread>();
}

ExchangeProcessGroup::~ExchangeProcessGroup() { close(); }

void ExchangeProcessGroup::close() noexcept {
  if (order_.is_inherited()) return mailbox_.leave_to_parent();
  const auto grace = closing_grace(timeout_);
  for (const auto& thread : threads_) thread->stop(grace);
  mailbox_.close();
}

const std::shared_ptr<JobThread>& ExchangeProcessGroup::thread(Channel channel) const {
  return threads_.at(static_cast<size_t>(channel));
}

WorkPtr ExchangeProcessGroup::issue(Collective collective) {
  return std::visit(
      [&](auto& call) {
        return start(call, order_.next(*this, call.kName, collective.tag),
                     form_of(call, collective.tag));
      },
      collective.call);
}

template <class Post>
WorkPtr ExchangeProcessGroup::transfer(CollectiveName name, bool wait_for_sends, const Post& post) {
  const auto& thread_of_channel = thread(name.channel);
  const auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, wait_for_sends);
  exchange->post([&] { post(*exchange); });
  return std::make_shared<ExchangeWork>(exchange, thread_of_channel);
}

WorkPtr ExchangeProcessGroup::start(AllGather& call, CollectiveName name,
                                    const CollectiveForm& form) {
  const int tag = form.message_tag(name.sequence);
  return transfer(std::move(name), /*wait_for_sends=*/false, [&](TransferExchange& exchange) {
    post_all_gather(exchange, mailbox_, tag, call.flat, call.shard, call.bounds);
  });
}

WorkPtr ExchangeProcessGroup::start(Broadcast& call, CollectiveName name,
                                    const CollectiveForm& form) {
  const int tag = form.message_tag(name.sequence);
  return transfer(std::move(name), /*wait_for_sends=*/true, [&](TransferExchange& exchange) {
    post_broadcast(exchange, mailbox_, tag, call.tensor, call.root);
  });
}

// A rank learns from its sends alone that no peer expects a message, so it waits for them.
WorkPtr ExchangeProcessGroup::start(AllToAll& call, CollectiveName name,
                                    const CollectiveForm& form) {
  const auto tag_of = [form, sequence = name.sequence](const at::Tensor& message) {
    CollectiveForm own = form;
    return own.elements(message.numel(), message.scalar_type()).message_tag(sequence);
  };
  return transfer(std::move(name), /*wait_for_sends=*/true, [&](TransferExchange& exchange) {
    post_all_to_all(exchange, mailbox_, tag_of, call.from, call.to);
  });
}

// Each rank sends a byte to every other: a rank that has all of them knows that all have arrived.
WorkPtr ExchangeProcessGroup::start(Barrier& /*call*/, CollectiveName name,
                                    const CollectiveForm& form) {
  const int tag = form.message_tag(name.sequence);
  const at::Tensor bytes = at::empty({size()}, at::TensorOptions().dtype(at::kByte));
  const at::Tensor own = bytes.narrow(0, rank(), 1);
  *bytes_of(own) = std::byte{0};
  std::vector<int64_t> bounds(size() + 1);
  std::iota(bounds.begin(), bounds.end(), 0);
  return transfer(std::move(name), /*wait_for_sends=*/true, [&](TransferExchange& exchange) {
    post_all_gather(exchange, mailbox_, tag, bytes, own, bounds);
  });
}

WorkPtr ExchangeProcessGroup::start(ReduceScatter& call, CollectiveName name,
                                    const CollectiveForm& form) {
  const auto& [out, pieces, bounds, options] = call;
  const Channel channel = name.channel;
  ReduceTask task{.pieces = std::move(call.pieces),
                  .out = bytes_of(out),
                  .reduction = {call.dtype(), ReduceOp::kSum, options.scale, options.accumulate,
                                out.scalar_type()},
                  .tag = form.message_tag(name.sequence)};
  for (int r = 0; r < size(); ++r) task.ranges.push_back({bounds[r], bounds[r + 1]});
  const auto exchange =
      std::make_shared<ReduceExchange>(std::move(name), timeout_, pool_, mailbox_, std::move(task));
  exchange->keep(out);
  return start_reduction(exchange, channel);
}

WorkPtr ExchangeProcessGroup::start(AllReduce& call, CollectiveName name,
                                    const CollectiveForm& form) {
  return is_reduced_whole(call.tensor) ? all_reduce_whole(call, std::move(name), form)
                                       : all_reduce_parts(call, std::move(name), form);
}

WorkPtr ExchangeProcessGroup::all_reduce_whole(AllReduce& call, CollectiveName name,
                                               const CollectiveForm& form) {
  const auto& [tensor, op] = call;
  const Channel channel = name.channel;
  // The copy is sent while the tensor is overwritten.
  const at::Tensor copy = at::empty(
      {tensor.numel()}, at::TensorOptions().dtype(tensor.scalar_type()).requires_grad(false));
  if (tensor.numel() > 0) std::memcpy(bytes_of(copy), tensor.const_data_ptr(), tensor.nbytes());
  ReduceTask task{.pieces = {{0, copy, tensor.numel()}},
                  .ranges = std::vector<FlatRange>(size(), {0, tensor.numel()}),
                  .out = bytes_of(tensor),
                  .reduction = {tensor.scalar_type(), op},
                  .tag = form.message_tag(name.sequence)};
  const auto exchange =
      std::make_shared<ReduceExchange>(std::move(name), timeout_, pool_, mailbox_, std::move(task));
  exchange->keep(tensor);
  return start_reduction(exchange, channel);
}

WorkPtr ExchangeProcessGroup::all_reduce_parts(AllReduce& call, CollectiveName name,
                                               const CollectiveForm& form) {
  const auto& [tensor, op] = call;
  const Channel channel = name.channel;
  const std::vector<int64_t> bounds = even_bounds(tensor.numel(), size());
  ReduceTask task{.reduction = {tensor.scalar_type(), op}, .tag = form.message_tag(name.sequence)};
  for (int r = 0; r < size(); ++r) task.ranges.push_back({bounds[r], bounds[r + 1]});
  task.pieces = {{0, tensor, tensor.numel()}};
  task.out = bytes_of(tensor) + bounds[rank()] * static_cast<int64_t>(tensor.element_size());
  const int gather_tag = form.message_tag(name.sequence, /*part=*/1);
  const auto exchange = std::make_shared<AllReduceExchange>(
      std::move(name), timeout_, pool_, mailbox_, std::move(task), bytes_of(tensor), gather_tag);
  exchange->keep(tensor);
  return start_reduction(exchange, channel);
}

WorkPtr ExchangeProcessGroup::start_reduction(const std::shared_ptr<ReduceExchange>& exchange,
                                              Channel channel) {
  exchange->post([&] { exchange->post_messages(); });
  exchange->claim_queueing();
  thread(channel)->push(exchange);
  return std::make_shared<ExchangeWork>(exchange, thread(channel));
}

}  // namespace tessera
