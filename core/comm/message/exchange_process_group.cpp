#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <sched.h>
#include <tessera/comm/process_group.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "comm/group/capability.h"
#include "comm/group/collective.h"
#include "comm/group/collective_form.h"
#include "comm/group/collective_name.h"
#include "comm/group/encoding.h"
#include "comm/group/peer_message.h"
#include "comm/group/sent_bytes.h"
#include "comm/message/broken_pipe.h"
#include "comm/message/gloo_backend.h"
#include "comm/message/reduce_exchange.h"
#include "comm/message/relay_exchange.h"

namespace tessera {
namespace {

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}
const std::byte* const_bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

// The memory of the data that is received from, or sent to, one rank.
template <class Byte>
struct Stretch {
  Byte* data = nullptr;
  int64_t bytes = 0;
  int tag = 0;
};
using Incoming = std::vector<Stretch<std::byte>>;        // by rank
using Outgoing = std::vector<Stretch<const std::byte>>;  // by rank

// Encoded elements that are received, and the place of their values.
struct Decoding {
  Encoding encoding;
  const std::byte* encoded;
  int64_t numel;
  at::ScalarType dtype;
  std::byte* values;
};

// A collective that only moves data: its messages go directly from and into the tensors, or from
// and into buffers of encoded elements.
class TransferExchange : public Exchange {
 public:
  // Keeps `inputs` until they have been sent, and `outputs` until they have been received: a unit's
  // gathered parameters must not live until the slowest peer has read this rank's shard. With
  // `wait_for_sends`, the outputs are done only when the inputs are.
  TransferExchange(CollectiveName name, std::chrono::milliseconds timeout,
                   std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                   bool wait_for_sends)
      : Exchange(std::move(name), timeout, /*runs_in_wait=*/true),
        wait_for_sends_(wait_for_sends),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)) {}

  // Receives come first: a message whose receive is posted is sent without another round trip. Many
  // short messages pass through a socket faster than a long one: data is read before it leaves the
  // cache.
  // `decodings`, once all has been received, are done on the thread that waits.
  void post_messages(const Mailbox& mailbox, const Incoming& from, const Outgoing& to,
                     std::vector<Decoding> decodings) {
    decodings_ = std::move(decodings);
    const int rank = mailbox.rank();
    const int size = mailbox.size();
    int64_t longest = 0;
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + size - step) % size;
      longest = std::max(longest, to[peer].bytes);
      for_each_message(from[peer].data, from[peer].bytes, [&](std::byte* data, int64_t nbytes) {
        receives_.push_back(mailbox.receive(data, nbytes, peer, from[peer].tag));
      });
    }
    // Sends to the ranks after this one first, so that not all ranks send to the same rank at once.
    for (int64_t begin = 0; begin < longest; begin += kMaxMessageBytes) {
      for (int step = 1; step < size; ++step) {
        const int peer = (rank + step) % size;
        const auto& [data, bytes, tag] = to[peer];
        const int64_t length = std::min(kMaxMessageBytes, bytes - begin);
        if (length > 0) sends_.push_back(mailbox.send(data + begin, length, peer, tag));
      }
    }
  }

 private:
  void complete_outputs() override {
    for (const Transfer& transfer : receives_) wait(transfer);
    receives_.clear();
    for (const auto& [encoding, encoded, numel, dtype, values] : std::exchange(decodings_, {}))
      decode(encoding, encoded, numel, dtype, values);
    outputs_.clear();
    if (wait_for_sends_) complete_inputs();
  }

  void complete_inputs() override {
    for (const Transfer& transfer : sends_) wait(transfer);
    sends_.clear();
    inputs_.clear();
  }

  const bool wait_for_sends_;
  // Destroyed after the transfers that use their memory.
  std::vector<at::Tensor> inputs_, outputs_;
  std::vector<Transfer> receives_, sends_;
  std::vector<Decoding> decodings_;
};

// The bytes that the ranks of a transfer receive from each other in encoded form.
class EncodedBytes {
 public:
  explicit EncodedBytes(int64_t nbytes)
      : bytes_(at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).requires_grad(false))) {}

  const at::Tensor& tensor() const { return bytes_; }
  // Encodes `values` into the next bytes. Returns their place.
  Stretch<const std::byte> encoded(Encoding encoding, const at::Tensor& values, int tag) {
    const auto [data, nbytes, same_tag] = next(encoding, values.numel(), values.scalar_type(), tag);
    encode(encoding, values.scalar_type(), values.const_data_ptr(), values.numel(), data);
    return {data, nbytes, same_tag};
  }
  // Returns the place for so many elements.
  Stretch<std::byte> next(Encoding encoding, int64_t numel, at::ScalarType dtype, int tag) {
    const int64_t nbytes = encoded_nbytes(encoding, numel, dtype);
    std::byte* const data = bytes_of(bytes_) + std::exchange(used_, used_ + nbytes);
    return {data, nbytes, tag};
  }

 private:
  at::Tensor bytes_;
  int64_t used_ = 0;
};

// With more ranks than this, small data is passed on from rank to rank instead of sent by each to
// all others: each message costs both ranks some microseconds of a core
// (docs/design/many_ranks.md).
constexpr int kMostDirect = 4;

// A process group on a c10d backend with tagged messages (Gloo): collectives are direct exchanges
// between all pairs of ranks, or relays of small data.
//
// [Note: Channels and threads]
// Gloo's own thread moves the data. A thread per channel, started when needed, sums and passes on
// the received data, in the order in which the channel's collectives were issued. All ranks issue a
// channel's collectives in one order, so the messages that such a thread waits for have been issued
// by its peers already, or will be, regardless of later collectives in the queue: it can't
// deadlock. Between channels no order is known, hence a thread for each.
class ExchangeProcessGroup : public ProcessGroup,
                             public Closable,
                             public SendsMessages,
                             public Watchable {
 public:
  ExchangeProcessGroup(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout)
      : mailbox_(std::move(backend)), timeout_(timeout) {
    for (auto& thread : threads_) thread = std::make_shared<JobThread>();
  }
  ~ExchangeProcessGroup() override { close(); }

  void close() noexcept override {
    if (order_.is_inherited()) return mailbox_.leave_to_parent();
    const auto grace = closing_grace(timeout_);
    for (const auto& thread : threads_) thread->stop(grace);
    mailbox_.close();
  }
  SentMessages sent() const override { return mailbox_.sent(); }
  void set_watch(std::shared_ptr<CollectiveWatch> watch) override {
    order_.set_watch(std::move(watch));
  }
  const std::shared_ptr<CollectiveWatch>& watch() const override { return order_.watch(); }

  bool gathers_sums() const override { return true; }
  int rank() const override { return mailbox_.rank(); }
  int size() const override { return mailbox_.size(); }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  std::string backend_name() const override { return "gloo"; }
  std::optional<c10::DeviceType> device_type() const override { return at::kCPU; }

 private:
  WorkPtr issue(Collective collective) override {
    return std::visit(
        [&](auto& call) {
          const CollectiveForm form = form_of(call, collective.tag);
          return start(call, order_.next(*this, call.kName, collective.tag, form), form);
        },
        collective.call);
  }

  // Start a collective, given its name and the form that ranks must agree on. Each posts its
  // messages.
  WorkPtr start(AllGather& call, CollectiveName name, const CollectiveForm& form) {
    const auto& [flat, shard, bounds, encoding] = call;
    const int tag = form.message_tag(name.sequence);
    if (encoding != Encoding::kPlain) return gather_encoded(std::move(name), tag, call);
    return gather(std::move(name), tag, flat, shard, bounds, /*wait_for_sends=*/false);
  }

  // The ranks gather a byte of each: a rank that has all of them knows that all have arrived.
  WorkPtr start(Barrier& /*call*/, CollectiveName name, const CollectiveForm& form) {
    const int tag = form.message_tag(name.sequence);
    const at::Tensor bytes = at::empty({size()}, at::TensorOptions().dtype(at::kByte));
    const at::Tensor own = bytes.narrow(0, rank(), 1);
    *bytes_of(own) = std::byte{0};
    std::vector<int64_t> bounds(size() + 1);
    std::iota(bounds.begin(), bounds.end(), 0);
    return gather(std::move(name), tag, bytes, own, bounds, /*wait_for_sends=*/true);
  }

  WorkPtr start(Broadcast& call, CollectiveName name, const CollectiveForm& form) {
    const auto& [tensor, root, encoding] = call;
    const int tag = form.message_tag(name.sequence);
    if (encoding != Encoding::kPlain) return broadcast_encoded(std::move(name), tag, call);
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    Incoming from(size());
    Outgoing to(size());
    if (rank() == root) {
      to.assign(size(), {const_bytes_of(tensor), bytes, tag});
    } else {
      from[root] = {bytes_of(tensor), bytes, tag};
    }
    return transfer(std::move(name), from, to, {tensor}, {tensor}, /*wait_for_sends=*/true);
  }

  // A rank learns from its sends alone that no peer expects a message, so it waits for them.
  WorkPtr start(AllToAll& call, CollectiveName name, const CollectiveForm& form) {
    // Only the two ranks of a message know the facts that its tag encodes.
    const auto tag_of = [&, sequence = name.sequence](const at::Tensor& message) {
      CollectiveForm own = form;
      return own.elements(message.numel(), message.scalar_type()).message_tag(sequence);
    };
    Incoming from(size());
    Outgoing to(size());
    std::vector<at::Tensor> inputs, outputs;
    for (int r = 0; r < size(); ++r) {
      const at::Tensor &received = call.from[r], &sent = call.to[r];
      if (r != rank() && message_numel(received) > 0) {
        from[r] = {bytes_of(received), message_bytes(received), tag_of(received)};
        outputs.push_back(received);
      }
      if (r != rank() && message_numel(sent) > 0) {
        to[r] = {const_bytes_of(sent), message_bytes(sent), tag_of(sent)};
        inputs.push_back(sent);
      }
    }
    const WorkPtr work = transfer(std::move(name), from, to, std::move(inputs), std::move(outputs),
                                  /*wait_for_sends=*/true);
    take_own_message(call.from[rank()], call.to[rank()]);
    return work;
  }

  WorkPtr start(ReduceScatter& call, CollectiveName name, const CollectiveForm& form) {
    const auto& [out, pieces, bounds, options] = call;
    ReduceTask task{.pieces = std::move(call.pieces),
                    .ranges = ranges_of(bounds),
                    .out = out,
                    .reduction = {call.dtype(), ReduceOp::kSum, options.scale, options.accumulate,
                                  out.scalar_type()},
                    .encoding = options.encoding,
                    .error = options.error};
    if (options.gather_into.defined()) {
      task.out = options.gather_into;
      task.gather_tag = form.message_tag(name.sequence, /*part=*/1);
    }
    return reduce(std::move(name), std::move(task), form);
  }

  WorkPtr start(AllReduce& call, CollectiveName name, const CollectiveForm& form) {
    const auto& [tensor, op] = call;
    if (relays(size() * static_cast<int64_t>(tensor.nbytes())))
      return relay_and_reduce(std::move(name), call, form);
    ReduceTask task{.pieces = {{0, tensor, tensor.numel()}},
                    .out = tensor,
                    .reduction = {tensor.scalar_type(), op}};
    if (is_reduced_whole(tensor)) {
      // The copy is sent while the tensor is overwritten.
      at::Tensor& copy = task.pieces[0].data;
      copy = at::empty({tensor.numel()},
                       at::TensorOptions().dtype(tensor.scalar_type()).requires_grad(false));
      if (tensor.numel() > 0) std::memcpy(bytes_of(copy), tensor.const_data_ptr(), tensor.nbytes());
      task.ranges.assign(size(), {0, tensor.numel()});
    } else {
      task.ranges = ranges_of(even_bounds(tensor.numel(), size()));
      task.gather_tag = form.message_tag(name.sequence, /*part=*/1);
    }
    return reduce(std::move(name), std::move(task), form);
  }

  WorkPtr gather(CollectiveName name, int tag, const at::Tensor& flat, const at::Tensor& shard,
                 std::span<const int64_t> bounds, bool wait_for_sends) {
    if (relays(static_cast<int64_t>(flat.nbytes())))
      return relay(std::move(name), tag, flat, shard, bounds);
    const auto item = static_cast<int64_t>(flat.element_size());
    Incoming from;
    for (int r = 0; r < size(); ++r) {
      from.push_back({bytes_of(flat) + bounds[r] * item, (bounds[r + 1] - bounds[r]) * item, tag});
    }
    const auto& [place, bytes, own_tag] = from[rank()];
    const std::byte* const data = const_bytes_of(shard);
    const Outgoing to(size(), {data, bytes, tag});
    const WorkPtr work = transfer(std::move(name), from, to, {shard}, {flat}, wait_for_sends);
    if (bytes > 0 && place != data) std::memmove(place, data, bytes);
    return work;
  }

  // True if all ranks' data, of so many bytes, is passed on.
  bool relays(int64_t nbytes) const {
    return size() > kMostDirect && nbytes <= size() * static_cast<int64_t>(kMaxOneRoundBytes);
  }

  WorkPtr relay(CollectiveName name, int tag, const at::Tensor& flat, const at::Tensor& shard,
                std::span<const int64_t> bounds) {
    const auto item = static_cast<int64_t>(flat.element_size());
    RelayTask task{.flat = flat, .tag = tag};
    for (const int64_t bound : bounds) task.bounds.push_back(bound * item);
    std::byte* const place = bytes_of(flat) + task.bounds[rank()];
    if (shard.numel() > 0) std::memmove(place, shard.const_data_ptr(), shard.nbytes());
    return relay(std::move(name), std::move(task));
  }

  WorkPtr relay_and_reduce(CollectiveName name, const AllReduce& call, const CollectiveForm& form) {
    const auto& [tensor, op] = call;
    const int tag = form.message_tag(name.sequence);
    const auto nbytes = static_cast<int64_t>(tensor.nbytes());
    RelayTask task{.flat = at::empty({size() * nbytes}, at::TensorOptions().dtype(at::kByte)),
                   .tag = tag,
                   .out = tensor,
                   .reduction = {tensor.scalar_type(), op}};
    for (int r = 0; r <= size(); ++r) task.bounds.push_back(r * nbytes);
    if (nbytes > 0) std::memcpy(bytes_of(task.flat) + rank() * nbytes, bytes_of(tensor), nbytes);
    return relay(std::move(name), std::move(task));
  }

  WorkPtr relay(CollectiveName name, RelayTask task) {
    const auto& thread_of_channel = thread(name.channel);
    return run_on(thread_of_channel,
                  start_relay(std::move(name), timeout_, mailbox_, std::move(task)));
  }

  WorkPtr gather_encoded(CollectiveName name, int tag, const AllGather& call) {
    const auto& [flat, shard, bounds, encoding] = call;
    const at::ScalarType dtype = call.dtype();
    const auto item = static_cast<int64_t>(flat.element_size());
    const auto numel = [&, cut = bounds](int r) { return cut[r + 1] - cut[r]; };
    int64_t nbytes = 0;
    for (int r = 0; r < size(); ++r) nbytes += encoded_nbytes(encoding, numel(r), dtype);
    EncodedBytes bytes(nbytes);
    const Outgoing to(size(), bytes.encoded(encoding, shard, tag));
    Incoming from(size());
    std::vector<Decoding> decodings;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      from[r] = bytes.next(encoding, numel(r), dtype, tag);
      decodings.push_back(
          {encoding, from[r].data, numel(r), dtype, bytes_of(flat) + bounds[r] * item});
    }
    const WorkPtr work = transfer(std::move(name), from, to, {bytes.tensor()},
                                  {bytes.tensor(), flat}, /*wait_for_sends=*/false, decodings);
    std::byte* const place = bytes_of(flat) + bounds[rank()] * item;
    if (shard.numel() > 0 && place != const_bytes_of(shard))
      std::memmove(place, shard.const_data_ptr(), shard.nbytes());
    return work;
  }

  WorkPtr broadcast_encoded(CollectiveName name, int tag, const Broadcast& call) {
    const auto& [tensor, root, encoding] = call;
    const at::ScalarType dtype = tensor.scalar_type();
    EncodedBytes bytes(encoded_nbytes(encoding, tensor.numel(), dtype));
    Incoming from(size());
    Outgoing to(size());
    std::vector<Decoding> decodings;
    if (rank() == root) {
      to.assign(size(), bytes.encoded(encoding, tensor, tag));
    } else {
      from[root] = bytes.next(encoding, tensor.numel(), dtype, tag);
      decodings.push_back({encoding, from[root].data, tensor.numel(), dtype, bytes_of(tensor)});
    }
    return transfer(std::move(name), from, to, {bytes.tensor()}, {bytes.tensor(), tensor},
                    /*wait_for_sends=*/true, decodings);
  }

  // Posts the messages from and to the other ranks; waiting for the work completes them.
  WorkPtr transfer(CollectiveName name, const Incoming& from, const Outgoing& to,
                   std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                   bool wait_for_sends, std::vector<Decoding> decodings = {}) {
    const auto& thread_of_channel = thread(name.channel);
    const auto exchange = std::make_shared<TransferExchange>(
        std::move(name), timeout_, std::move(inputs), std::move(outputs), wait_for_sends);
    exchange->post([&] { exchange->post_messages(mailbox_, from, to, std::move(decodings)); });
    return std::make_shared<ExchangeWork>(exchange, thread_of_channel);
  }

  WorkPtr reduce(CollectiveName name, ReduceTask task, const CollectiveForm& form) {
    const auto& thread_of_channel = thread(name.channel);
    task.tag = form.message_tag(name.sequence);
    return run_on(thread_of_channel,
                  start_reduction(std::move(name), timeout_, pool_, mailbox_, std::move(task)));
  }

  static WorkPtr run_on(const std::shared_ptr<JobThread>& thread,
                        const std::shared_ptr<Exchange>& exchange) {
    exchange->claim_queueing();
    thread->push(exchange);
    return std::make_shared<ExchangeWork>(exchange, thread);
  }

  static std::vector<FlatRange> ranges_of(std::span<const int64_t> bounds) {
    std::vector<FlatRange> ranges;
    for (size_t r = 0; r + 1 < bounds.size(); ++r) ranges.push_back({bounds[r], bounds[r + 1]});
    return ranges;
  }

  const std::shared_ptr<JobThread>& thread(Channel channel) const {
    return threads_.at(static_cast<size_t>(channel));
  }

  ChannelOrder order_;
  Mailbox mailbox_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<BlockPool> pool_ = std::make_shared<BlockPool>();
  std::array<std::shared_ptr<JobThread>, 3> threads_;  // by channel
};

// Threads that start while this object lives wait for the end of a time slice instead of taking the
// core from the thread that woke them.
//
// Gloo's thread polls without pause while another thread holds the lock of a connection to write.
// If that thread shares the core and was preempted by Gloo's, neither makes progress until the
// slice ends: some milliseconds are lost, in most sends of a rank that is bound to one core.
class BatchScheduling {
 public:
  BatchScheduling() { changed_ = sched_getscheduler(0) == SCHED_OTHER && set(SCHED_BATCH); }
  ~BatchScheduling() {
    if (changed_) set(SCHED_OTHER);
  }
  BatchScheduling(const BatchScheduling&) = delete;
  BatchScheduling& operator=(const BatchScheduling&) = delete;

 private:
  // Sets the policy of this thread; new threads inherit it.
  static bool set(int policy) {
    const sched_param parameters{};
    return sched_setscheduler(0, policy, &parameters) == 0;
  }

  bool changed_ = false;
};

}  // namespace

ProcessGroupPtr gloo_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   std::chrono::milliseconds timeout, const std::string& hostname) {
  TORCH_CHECK_VALUE(store.defined(), "[gloo_process_group] `store` must be given");
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size,
                    "[gloo_process_group] `rank` must be from 0 to `size` - 1; got rank ", rank,
                    " of ", size);
  TORCH_CHECK_VALUE(timeout.count() > 0, "[gloo_process_group] `timeout` must be positive; got ",
                    timeout.count(), " ms");
  const BatchScheduling batch_scheduling;
  survive_broken_pipes();
  return std::make_shared<ExchangeProcessGroup>(
      gloo_backend(store, rank, size, timeout, hostname, /*threads=*/1, Mailbox::kConnections),
      timeout);
}

}  // namespace tessera
