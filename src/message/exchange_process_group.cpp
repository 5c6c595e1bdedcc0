#include "message/exchange_process_group.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "group/check_arguments.h"
#include "group/math_bits.h"
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
  if (WorkPtr work = plain_all_gather(*this, flat, shard, bounds, tag)) return work;
  check_host_all_gather(*this, flat, shard, bounds, tag);
  CollectiveName name = next_name("all_gather", tag);
  const int message_tag = form_of_all_gather(flat, bounds, tag).message_tag(name.sequence);
  const auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, /*wait_for_sends=*/false);
  exchange->post([&] { post_all_gather(*exchange, mailbox_, message_tag, flat, shard, bounds); });
  return std::make_shared<ExchangeWork>(exchange, channel(tag).thread);
}

WorkPtr ExchangeProcessGroup::broadcast(const at::Tensor& tensor, int root,
                                        const CollectiveTag& tag) {
  if (WorkPtr work = plain_broadcast(*this, tensor, root, tag)) return work;
  check_host_broadcast(*this, tensor, root, tag);
  CollectiveName name = next_name("broadcast", tag);
  const int message_tag = form_of_broadcast(tensor, root, tag).message_tag(name.sequence);
  const auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, /*wait_for_sends=*/true);
  exchange->post([&] { post_broadcast(*exchange, mailbox_, message_tag, tensor, root); });
  return std::make_shared<ExchangeWork>(exchange, channel(tag).thread);
}

WorkPtr ExchangeProcessGroup::all_to_all(std::vector<at::Tensor> from, std::vector<at::Tensor> to,
                                         const CollectiveTag& tag) {
  if (WorkPtr work = plain_all_to_all(*this, from, to, tag)) return work;
  check_host_all_to_all(*this, from, to, tag);
  CollectiveName name = next_name("all_to_all", tag);
  const auto tag_of = [form = CollectiveForm("all_to_all", tag),
                       sequence = name.sequence](const at::Tensor& message) {
    CollectiveForm own = form;
    return own.elements(message.numel(), message.scalar_type()).message_tag(sequence);
  };
  // Who sends what nobody awaits learns it from its sends alone.
  const auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, /*wait_for_sends=*/true);
  exchange->post([&] { post_all_to_all(*exchange, mailbox_, tag_of, from, to); });
  return std::make_shared<ExchangeWork>(exchange, channel(tag).thread);
}

WorkPtr ExchangeProcessGroup::reduce_scatter(const at::Tensor& out, std::vector<Piece> pieces,
                                             std::span<const int64_t> bounds,
                                             const ReduceScatterOptions& options,
                                             const CollectiveTag& tag) {
  if (WorkPtr work = plain_reduce_scatter(*this, out, pieces, bounds, options, tag)) return work;
  const at::ScalarType dtype = check_host_reduce_scatter(*this, out, pieces, bounds, options, tag);
  CollectiveName name = next_name("reduce_scatter", tag);
  const CollectiveForm form = form_of_reduce_scatter(dtype, pieces, bounds, tag);
  ReduceTask task{
      .pieces = std::move(pieces),
      .out = bytes_of(out),
      .reduction = {dtype, ReduceOp::kSum, options.scale, options.accumulate, out.scalar_type()},
      .tag = form.message_tag(name.sequence)};
  for (int r = 0; r < size(); ++r) {
    task.ranges.push_back({bounds[r], bounds[r + 1]});
  }
  const auto exchange =
      std::make_shared<ReduceExchange>(std::move(name), timeout_, pool_, mailbox_, std::move(task));
  exchange->keep(out);
  return start(exchange, tag);
}

WorkPtr ExchangeProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op,
                                         const CollectiveTag& tag) {
  if (WorkPtr work = plain_all_reduce(*this, tensor, op, tag)) return work;
  check_host_all_reduce(*this, tensor, op, tag);
  CollectiveName name = next_name("all_reduce", tag);
  return is_reduced_whole(tensor) ? all_reduce_whole(tensor, op, std::move(name), tag)
                                  : all_reduce_parts(tensor, op, std::move(name), tag);
}

WorkPtr ExchangeProcessGroup::all_reduce_whole(const at::Tensor& tensor, ReduceOp op,
                                               CollectiveName name, const CollectiveTag& tag) {
  const int message_tag = form_of_all_reduce(tensor, op, tag).message_tag(name.sequence);
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
  const auto exchange =
      std::make_shared<ReduceExchange>(std::move(name), timeout_, pool_, mailbox_, std::move(task));
  exchange->keep(tensor);
  return start(exchange, tag);
}

WorkPtr ExchangeProcessGroup::all_reduce_parts(const at::Tensor& tensor, ReduceOp op,
                                               CollectiveName name, const CollectiveTag& tag) {
  const CollectiveForm form = form_of_all_reduce(tensor, op, tag);
  const std::vector<int64_t> bounds = even_bounds(tensor.numel(), size());
  ReduceTask task{.reduction = {tensor.scalar_type(), op}, .tag = form.message_tag(name.sequence)};
  for (int r = 0; r < size(); ++r) {
    task.ranges.push_back({bounds[r], bounds[r + 1]});
  }
  task.pieces = {{0, tensor, tensor.numel()}};
  task.out = bytes_of(tensor) + bounds[rank()] * static_cast<int64_t>(tensor.element_size());
  const int gather_tag = form.message_tag(name.sequence, /*part=*/1);
  const auto exchange = std::make_shared<AllReduceExchange>(
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
  const int message_tag = CollectiveForm("barrier", tag).message_tag(name.sequence);
  // A byte from and to everyone: who has all of them knows that all have come.
  const at::Tensor bytes = at::empty({size()}, at::TensorOptions().dtype(at::kByte));
  std::vector<int64_t> bounds(size() + 1);
  for (int r = 0; r <= size(); ++r) {
    bounds[r] = r;
  }
  const auto exchange =
      std::make_shared<TransferExchange>(std::move(name), timeout_, /*wait_for_sends=*/true);
  exchange->post([&] {
    at::Tensor own = bytes.narrow(0, rank(), 1);
    *bytes_of(own) = std::byte{0};
    post_all_gather(*exchange, mailbox_, message_tag, bytes, own, bounds);
  });
  exchange->wait_outputs();
}

}  // namespace tessera
