#include "comm/exchange_process_group.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "comm/check_arguments.h"
#include "comm/message_tag.h"

namespace tessera {
namespace {

// Smaller tensors are all-reduced in one round: everyone sends everything to everyone.
constexpr size_t kMaxOneRoundBytes = 4096;

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
      pool_(std::make_shared<BlockPool>(kMaxMessageBytes, kMaxFreeBlocks)) {}

ExchangeProcessGroup::~ExchangeProcessGroup() { close(); }

void ExchangeProcessGroup::close() noexcept {
  if (mark_.is_inherited()) return mailbox_.leave_to_parent();
  const auto grace = closing_grace(timeout_);
  for (auto& channel : channels_) {
    channel.thread->stop(grace);
  }
  mailbox_.close();
}

ExchangeProcessGroup::ChannelState& ExchangeProcessGroup::channel(const CollectiveTag& tag) {
  return channels_.at(static_cast<size_t>(tag.channel));
}

CollectiveName ExchangeProcessGroup::next_name(const char* collective, const CollectiveTag& tag) {
  CollectiveName name{
      collective, std::string(tag.subject), tag.channel, channel(tag).sequence++, rank(), size()};
  check_process(mark_, name);
  return name;
}

WorkPtr ExchangeProcessGroup::all_gather(const at::Tensor& flat, const at::Tensor& shard,
                                         std::span<const int64_t> bounds,
                                         const CollectiveTag& tag) {
  check_host_all_gather(*this, flat, shard, bounds, tag);
  CollectiveName name = next_name("all_gather", tag);
  const int message_tag = MessageTag("all_gather", tag, name.sequence)
                              .mix(bounds)
                              .mix(static_cast<int64_t>(flat.scalar_type()))
                              .value();
  auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, /*wait_for_sends=*/false);
  exchange->post([&] { post_all_gather(*exchange, mailbox_, message_tag, flat, shard, bounds); });
  return std::make_shared<ExchangeWork>(std::move(exchange), channel(tag).thread);
}

WorkPtr ExchangeProcessGroup::broadcast(const at::Tensor& tensor, int root,
                                        const CollectiveTag& tag) {
  check_host_broadcast(*this, tensor, root, tag);
  CollectiveName name = next_name("broadcast", tag);
  const int message_tag = MessageTag("broadcast", tag, name.sequence)
                              .mix(root)
                              .mix(tensor.numel())
                              .mix(static_cast<int64_t>(tensor.scalar_type()))
                              .value();
  auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, /*wait_for_sends=*/true);
  exchange->post([&] { post_broadcast(*exchange, mailbox_, message_tag, tensor, root); });
  return std::make_shared<ExchangeWork>(std::move(exchange), channel(tag).thread);
}

WorkPtr ExchangeProcessGroup::all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                                         const CollectiveTag& tag) {
  check_host_all_to_all(*this, from, to, tag);
  CollectiveName name = next_name("all_to_all", tag);
  const MessageTag message_tag("all_to_all", tag, name.sequence);
  // Who sends what nobody awaits learns it from its sends alone.
  auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, /*wait_for_sends=*/true);
  exchange->post([&] { post_all_to_all(*exchange, mailbox_, message_tag, from, to); });
  return std::make_shared<ExchangeWork>(std::move(exchange), channel(tag).thread);
}

WorkPtr ExchangeProcessGroup::reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                                             std::span<const int64_t> bounds,
                                             const ReduceScatterOptions& options,
                                             const CollectiveTag& tag) {
  const at::ScalarType dtype = check_host_reduce_scatter(*this, out, pieces, bounds, options, tag);
  CollectiveName name = next_name("reduce_scatter", tag);
  MessageTag message_tag("reduce_scatter", tag, name.sequence);
  message_tag.mix(bounds).mix(static_cast<int64_t>(dtype));
  for (const Piece& piece : pieces) message_tag.mix(piece.begin).mix(piece.numel);
  ReduceTask task{
      .pieces = std::move(pieces),
      .out = bytes_of(out),
      .reduction = {dtype, ReduceOp::kSum, options.scale, options.accumulate, out.scalar_type()},
      .tag = message_tag.value()};
  for (int r = 0; r < size(); ++r) {
    task.ranges.push_back({bounds[r], bounds[r + 1]});
  }
  auto exchange =
      std::make_shared<ReduceExchange>(std::move(name), timeout_, pool_, mailbox_, std::move(task));
  exchange->keep(out);
  return start(exchange, tag);
}

WorkPtr ExchangeProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op,
                                         const CollectiveTag& tag) {
  check_host_all_reduce(*this, tensor, op, tag);
  CollectiveName name = next_name("all_reduce", tag);
  return tensor.nbytes() <= kMaxOneRoundBytes ? all_reduce_whole(tensor, op, std::move(name), tag)
                                              : all_reduce_parts(tensor, op, std::move(name), tag);
}

WorkPtr ExchangeProcessGroup::all_reduce_whole(const at::Tensor& tensor, ReduceOp op,
                                               CollectiveName name, const CollectiveTag& tag) {
  const int message_tag = MessageTag("all_reduce", tag, name.sequence)
                              .mix(static_cast<int64_t>(op))
                              .mix(tensor.numel())
                              .mix(static_cast<int64_t>(tensor.scalar_type()))
                              .value();
  // The copy is sent while the tensor is overwritten.
  const at::Tensor copy = at::empty(
      {tensor.numel()}, at::TensorOptions().dtype(tensor.scalar_type()).requires_grad(false));
  if (tensor.numel() > 0) {
    std::memcpy(bytes_of(copy), tensor.const_data_ptr(), tensor.nbytes());
  }
  ReduceTask task{.pieces = {{0, copy, tensor.numel()}},
                  .ranges = std::vector<FlatRange>(size(), {0, tensor.numel()}),
                  .out = bytes_of(tensor),
                  .reduction = {tensor.scalar_type(), op},
                  .tag = message_tag};
  auto exchange =
      std::make_shared<ReduceExchange>(std::move(name), timeout_, pool_, mailbox_, std::move(task));
  exchange->keep(tensor);
  return start(exchange, tag);
}

WorkPtr ExchangeProcessGroup::all_reduce_parts(const at::Tensor& tensor, ReduceOp op,
                                               CollectiveName name, const CollectiveTag& tag) {
  MessageTag message_tag("all_reduce", tag, name.sequence);
  message_tag.mix(static_cast<int64_t>(op))
      .mix(tensor.numel())
      .mix(static_cast<int64_t>(tensor.scalar_type()));
  const std::vector<int64_t> bounds = even_bounds(tensor.numel(), size());
  ReduceTask task{.reduction = {tensor.scalar_type(), op}, .tag = message_tag.value()};
  for (int r = 0; r < size(); ++r) {
    task.ranges.push_back({bounds[r], bounds[r + 1]});
  }
  task.pieces = {{0, tensor, tensor.numel()}};
  task.out = bytes_of(tensor) + bounds[rank()] * static_cast<int64_t>(tensor.element_size());
  const int gather_tag = message_tag.mix("gather").value();
  auto exchange = std::make_shared<AllReduceExchange>(
      std::move(name), timeout_, pool_, mailbox_, std::move(task), bytes_of(tensor), gather_tag);
  exchange->keep(tensor);
  return start(exchange, tag);
}

WorkPtr ExchangeProcessGroup::start(const std::shared_ptr<ReduceExchange>& exchange,
                                    const CollectiveTag& tag) {
  exchange->post([&] { exchange->post_messages(); });
  exchange->claim_queueing();
  channel(tag).thread->push(exchange);
  return std::make_shared<ExchangeWork>(exchange, channel(tag).thread);
}

void ExchangeProcessGroup::barrier(const CollectiveTag& tag) {
  CollectiveName name = next_name("barrier", tag);
  const int message_tag = MessageTag("barrier", tag, name.sequence).value();
  // A byte from and to everyone: who has all of them knows that all have come.
  const at::Tensor bytes = at::empty({size()}, at::TensorOptions().dtype(at::kByte));
  std::vector<int64_t> bounds(size() + 1);
  for (int r = 0; r <= size(); ++r) {
    bounds[r] = r;
  }
  auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, /*wait_for_sends=*/true);
  exchange->post([&] {
    at::Tensor own = bytes.narrow(0, rank(), 1);
    *bytes_of(own) = std::byte{0};
    post_all_gather(*exchange, mailbox_, message_tag, bytes, own, bounds);
  });
  exchange->wait_outputs();
}

}  // namespace tessera
