#include "comm/arena/hosted_process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "comm/arena/arena_process_group.h"
#include "comm/arena/stepwise_work.h"
#include "comm/group/capability.h"
#include "comm/group/collective.h"
#include "comm/group/collective_name.h"
#include "comm/group/sent_bytes.h"
#include "comm/message/addresses.h"

namespace tessera {

// [Note: Hosts and rails]
// A rail is the set of ranks with the same index on their hosts, one per host. A gather into
// shared memory crosses the network once for each host: a rank fetches the slices of its rail's
// ranks over its rail, and the ranks of one host together fetch all slices. Gathers into other
// memory and all-reduces cross it as often; the ranks of a host then copy the results from each
// other. Reductions sum inside the host first and then sum the hosts' results over the rails: in
// the order of a host's ranks, then of the hosts. Other process groups sum in another order, and
// messages of bfloat16 or half are rounded once more in between; but the result is the same in
// every run and on all ranks.
//
// The steps of a collective run without its caller: two threads per channel, started when needed,
// run the collectives of the channel in the order in which they were issued, one up to the start of
// the messages between hosts, the other from their end. So the link need not wait for the steps
// inside the host. Those get their positions in the arena's order when the collective is issued. So
// a thread waits only for operations that its peers have issued already, or will issue regardless
// of the collectives behind this one in the queue.
namespace {

// A range [begin, end) of a buffer, in bytes.
struct ByteRange {
  size_t begin = 0, end = 0;
};

// Shared memory of one host into which its ranks gather the shards of several hosts, as seen by one
// of those ranks.
//
// The shards of other hosts (`foreign`) are present from a gather until all ranks of the host have
// released it; then their pages are returned to the system. Counters behind the data, in the same
// memory, record which ranks have released. The ranks must pass a barrier between the release of
// one gather and the first byte of the next.
class HostBuffer {
 public:
  // Returns the bytes of memory needed for `nbytes` of data shared by `ranks` ranks. The counters
  // start at zero, as fresh pages do.
  static int64_t nbytes_with_counters(int64_t nbytes, int ranks) {
    return counters_begin(nbytes) + (1 + ranks) * static_cast<int64_t>(sizeof(Counter));
  }

  HostBuffer(std::shared_ptr<SharedMemory> memory, int64_t nbytes, int index, int ranks)
      : memory_(std::move(memory)),
        counters_(reinterpret_cast<Counter*>(memory_->data() + counters_begin(nbytes))),
        index_(index),
        ranks_(ranks) {}

  const std::shared_ptr<SharedMemory>& shared_memory() const { return memory_; }
  // Returns the offset in bytes of `flat`; it must lie in this memory.
  size_t offset_of(const at::Tensor& flat) const {
    return static_cast<const std::byte*>(flat.const_data_ptr()) - memory_->data();
  }

  // Begins a gather, in which `foreign` are the ranges owned by other hosts. Counts the previous
  // gather as released by this rank.
  void begin_gather(std::vector<ByteRange> foreign) {
    const std::lock_guard lock(mutex_);
    released(index_).store(gathers_, std::memory_order_seq_cst);
    ++gathers_;
    foreign_ = std::move(foreign);
  }

  // Declares that this rank has finished reading the last gather. The last rank of the host to do
  // so returns the pages of `foreign`. Repeated calls have no effect.
  void release() {
    const std::lock_guard lock(mutex_);
    if (released(index_).load(std::memory_order_relaxed) == gathers_) return;
    released(index_).store(gathers_, std::memory_order_seq_cst);
    for (int index = 0; index < ranks_; ++index) {
      if (released(index).load(std::memory_order_seq_cst) < gathers_) return;
    }
    // Two ranks may both find that they are the last.
    int64_t last = emptied().load(std::memory_order_seq_cst);
    if (last >= gathers_ || !emptied().compare_exchange_strong(last, gathers_)) return;
    for (const ByteRange& range : foreign_) memory_->give_back(range.begin, range.end);
  }

 private:
  using Counter = std::atomic<int64_t>;
  static_assert(Counter::is_always_lock_free, "ranks share atomics between processes");

  // The counters have pages of their own that are never returned to the system.
  static int64_t counters_begin(int64_t nbytes) {
    constexpr int64_t kPage = 4096;
    return (nbytes + kPage - 1) / kPage * kPage;
  }
  // The last gather whose foreign pages were returned to the system.
  Counter& emptied() const { return counters_[0]; }
  // The last gather that the host's rank `index` has released.
  Counter& released(int index) const { return counters_[1 + index]; }

  const std::shared_ptr<SharedMemory> memory_;
  Counter* const counters_;
  const int index_;
  const int ranks_;
  std::mutex mutex_;
  int64_t gathers_ = 0;  // equal on all ranks, as gathers are collective
  std::vector<ByteRange> foreign_;
};

// Copies the values of a tensor into another one of its size and dtype.
void copy_values(const at::Tensor& to, const at::Tensor& from) {
  if (from.numel() > 0) std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
}

// Appends the parts of `pieces` that lie in [begin, end), a range stored at `offset` of `sums`.
void add_pieces(std::vector<Piece>& out, const std::vector<Piece>& pieces, int64_t begin,
                int64_t end, int64_t offset, const at::Tensor& sums) {
  for (const Piece& piece : pieces) {
    const int64_t from = std::max(begin, piece.begin);
    const int64_t numel = std::min(end, piece.begin + piece.numel) - from;
    if (numel <= 0) continue;
    const int64_t at = offset + from - begin;
    out.push_back({at, sums.narrow(0, at, numel), numel});
  }
}

class HostedProcessGroup : public ProcessGroup,
                           public SharesMemory,
                           public Closable,
                           public SendsMessages,
                           public Watchable {
 public:
  // `local`: the ranks of this host; `rail`: the ranks of this rank's rail, in host order;
  // `whole`: all ranks.
  HostedProcessGroup(HostTable table, std::shared_ptr<ArenaProcessGroup> local,
                     ProcessGroupPtr rail, ProcessGroupPtr whole)
      : table_(std::move(table)),
        local_(std::move(local)),
        rail_(std::move(rail)),
        whole_(std::move(whole)) {}

  ~HostedProcessGroup() override { close(); }

  int rank() const override { return whole_->rank(); }
  int size() const override { return whole_->size(); }
  std::chrono::milliseconds timeout() const override { return whole_->timeout(); }
  std::string backend_name() const override { return "arena+" + whole_->backend_name(); }
  bool gathers_sums() const override { return true; }
  std::optional<c10::DeviceType> device_type() const override { return at::kCPU; }

  void close() noexcept override {
    const auto grace = closing_grace(timeout());
    for (StepThreads& threads : threads_) threads.begin.stop(grace);
    for (StepThreads& threads : threads_) threads.end.stop(grace);
    local_->close();
    tessera::close(rail_);
    tessera::close(whole_);
  }

  void set_watch(std::shared_ptr<CollectiveWatch> watch) override {
    const int host = table_.host_of(rank());
    const auto part = [&](ProcessGroup& process_group, const std::string& name,
                          const std::vector<int>& ranks) {
      if (auto* const watchable = capability<Watchable>(process_group))
        watchable->set_watch(watch->part(name, ranks, /*is_inner=*/true));
    };
    std::vector<int> all(size());
    std::iota(all.begin(), all.end(), 0);
    part(*local_, "host " + std::to_string(host), table_.ranks_of(host));
    part(*rail_, "rail " + std::to_string(index()), table_.rail(index()));
    part(*whole_, "messages", all);
    order_.set_watch(std::move(watch));
  }
  const std::shared_ptr<CollectiveWatch>& watch() const override { return order_.watch(); }

  SentMessages sent() const override {
    SentMessages all;
    for (const ProcessGroupPtr& part : {rail_, whole_}) {
      const auto* const sender = capability<SendsMessages>(*part);
      if (!sender) continue;
      const auto [count, nbytes] = sender->sent();
      all.count += count;
      all.nbytes += nbytes;
    }
    return all;
  }

  // The other ranks of the rail. An all-to-all sends to all ranks, also inside the host.
  std::vector<int> sends_to() const override {
    std::vector<int> ranks = table_.rail(index());
    std::erase(ranks, rank());
    return ranks;
  }

  std::optional<SharedBuffer> share(int64_t nbytes, const CollectiveTag& tag) override {
    const int ranks = local_->size();
    // Pages are not reserved now: the shards of other hosts may never be here all at once.
    const auto memory = local_->share_memory(HostBuffer::nbytes_with_counters(nbytes, ranks),
                                             /*reserve=*/false, tag);
    const at::Tensor all_have = at::full({1}, memory ? 1 : 0, at::TensorOptions().dtype(at::kByte));
    whole_->all_reduce(all_have, ReduceOp::kMin, tag)->wait();
    if (*static_cast<const uint8_t*>(all_have.const_data_ptr()) == 0) return std::nullopt;
    SharedBuffer buffer =
        buffers_.add(std::make_shared<HostBuffer>(memory, nbytes, index(), ranks), *memory, nbytes);
    buffer.stays_whole = false;
    return buffer;
  }

  void release(const SharedBuffer& buffer) override {
    if (const auto found = buffers_.holding(buffer.bytes)) found->release();
  }

 private:
  WorkPtr issue(Collective collective) override {
    return std::visit([&](auto& call) { return start(call, collective.tag); }, collective.call);
  }

  int index() const { return table_.index_of(rank()); }

  // `sends`: the step that sends messages to other hosts.
  template <class Call>
  WorkPtr start_steps(const Call& call, const CollectiveTag& tag, std::vector<CollectiveStep> steps,
                      size_t sends) {
    return run_stepwise(threads_.at(static_cast<size_t>(tag.channel)),
                        order_.next(*this, call.kName, tag, form_of(call, tag)), timeout(),
                        local_->arena(), std::move(steps), sends);
  }

  WorkPtr start(AllGather& call, const CollectiveTag& tag) {
    const auto buffer = buffers_.holding(call.flat);
    if (!buffer) return gather_own(call, tag);
    check_in_place(*this, call, tag);
    return gather_shared(*buffer, call, tag);
  }

  // The parts of a flat buffer that the ranks of this rail own, in host order.
  struct RailCut {
    std::vector<int> ranks;
    std::vector<int64_t> bounds;  // of their parts, concatenated
  };
  RailCut cut_for_rail(std::span<const int64_t> bounds) const {
    RailCut cut{.ranks = table_.rail(index()), .bounds = {0}};
    for (const int r : cut.ranks)
      cut.bounds.push_back(cut.bounds.back() + bounds[r + 1] - bounds[r]);
    return cut;
  }

  // Returns the concatenated parts of `fetched` as pieces of the flat buffer.
  static std::vector<Piece> pieces_of_rail(const RailCut& cut, std::span<const int64_t> bounds,
                                           const at::Tensor& fetched) {
    std::vector<Piece> pieces;
    for (size_t h = 0; h < cut.ranks.size(); ++h) {
      const int64_t numel = cut.bounds[h + 1] - cut.bounds[h];
      pieces.push_back({bounds[cut.ranks[h]], fetched.narrow(0, cut.bounds[h], numel), numel});
    }
    return pieces;
  }

  // Gathers into memory that the ranks of a host do not share: each rank fetches the shards of its
  // rail and publishes them to the other ranks of the host.
  WorkPtr gather_own(const AllGather& call, const CollectiveTag& tag) {
    const auto& [flat, shard, bounds, encoding] = call;
    ArenaTicket ticket = local_->arena()->take_ticket(call.kName, tag, form_of(call, tag));
    const RailCut cut = cut_for_rail(bounds);
    // Not in `flat`: other ranks may still be reading when the owner of `flat` writes to it again.
    const at::Tensor fetched = at::empty(
        {cut.bounds.back()}, at::TensorOptions().dtype(flat.scalar_type()).requires_grad(false));
    std::vector<Piece> pieces = pieces_of_rail(cut, bounds, fetched);
    return start_steps(
        call, tag,
        {[fetched, shard = shard, rail_bounds = cut.bounds, encoding = encoding,
          rail = rail_](const CollectiveTag& rail_tag) {
           return std::vector{rail->all_gather(fetched, shard, rail_bounds, rail_tag, encoding)};
         },
         [ticket = std::move(ticket), pieces = std::move(pieces), flat = flat, local = local_](
             const CollectiveTag&) { return std::vector{local->gather_at(ticket, pieces, flat)}; }},
        /*sends=*/0);
  }

  // Returns the ranges owned by ranks of other hosts. Adjacent ranges are merged, because only
  // whole pages can be returned to the system.
  std::vector<ByteRange> foreign_ranges(size_t begin, int64_t item,
                                        std::span<const int64_t> bounds) const {
    std::vector<ByteRange> ranges;
    bool joins = false;
    for (int r = 0; r < size(); ++r) {
      const bool is_foreign = table_.host_of(r) != table_.host_of(rank());
      const size_t end = begin + bounds[r + 1] * item;
      if (is_foreign && !joins) ranges.push_back({begin + bounds[r] * item, end});
      if (is_foreign && joins) ranges.back().end = end;
      joins = is_foreign;
    }
    return ranges;
  }

  WorkPtr gather_shared(HostBuffer& buffer, const AllGather& call, const CollectiveTag& tag) {
    const auto& [flat, shard, bounds, encoding] = call;
    const auto item = static_cast<int64_t>(flat.element_size());
    const size_t begin = buffer.offset_of(flat);
    CollectiveForm form = form_of(call, tag);
    form.mix(static_cast<int64_t>(begin));
    ArenaTicket before = local_->arena()->take_ticket(call.kName, tag, form, 2);
    ArenaTicket after = before;
    after.number += 1;
    std::vector<at::Tensor> slices;
    std::vector<ByteRange> ranges;
    for (const int r : table_.rail(index())) {
      slices.push_back(flat.narrow(0, bounds[r], bounds[r + 1] - bounds[r]));
      ranges.push_back({begin + bounds[r] * item, begin + bounds[r + 1] * item});
    }
    buffer.begin_gather(foreign_ranges(begin, item, bounds));
    // After this, no rank of the host reads the previous gather, and its pages have been returned.
    const WorkPtr all_have_come = local_->arrive_at(std::move(before));
    const auto fetch = [slices, ranges, encoding = encoding, memory = buffer.shared_memory(),
                        rail = rail_](const CollectiveTag& rail_tag) {
      std::vector<WorkPtr> works;
      for (int h = 0; h < rail->size(); ++h) {
        memory->reserve(ranges[h].begin, ranges[h].end);
        works.push_back(rail->broadcast(slices[h], h, rail_tag, encoding));
      }
      return works;
    };
    return start_steps(
        call, tag,
        {[all_have_come](const CollectiveTag&) { return std::vector{all_have_come}; }, fetch,
         [local = local_, after](const CollectiveTag&) {
           return std::vector{local->arrive_at(after)};
         }},
        /*sends=*/1);
  }

  WorkPtr start(ReduceScatter& call, const CollectiveTag& tag) {
    const auto& [out, pieces, bounds, options] = call;
    const at::ScalarType dtype = call.dtype();
    const RailCut cut = cut_for_rail(bounds);
    // The host's sums of the ranges that the ranks of this rail own.
    const at::Tensor sums =
        at::empty({cut.bounds.back()}, at::TensorOptions().dtype(dtype).requires_grad(false));
    auto* const data = static_cast<std::byte*>(sums.mutable_data_ptr());
    const auto item = static_cast<int64_t>(sums.element_size());
    std::vector<ArenaReduction> reductions;
    std::vector<Piece> rail_pieces;
    for (size_t h = 0; h < cut.ranks.size(); ++h) {
      const int64_t begin = bounds[cut.ranks[h]], end = bounds[cut.ranks[h] + 1];
      reductions.push_back({begin, end, data + cut.bounds[h] * item, {dtype, ReduceOp::kSum}});
      add_pieces(rail_pieces, pieces, begin, end, cut.bounds[h], sums);
    }
    CollectiveForm form = form_of(call, tag);
    const WorkPtr host_sums = local_->reduce(sums, pieces, std::move(reductions), form, tag);
    ReduceScatterOptions rail_options = options;
    rail_options.dtype = dtype;
    at::Tensor rail_out = out;
    const bool gathers = options.gather_into.defined();
    if (gathers) {
      // Gathers into other memory than `gather_into`, for the reason given in gather_own().
      rail_options.gather_into = at::empty(
          {cut.bounds.back()}, at::TensorOptions().dtype(out.scalar_type()).requires_grad(false));
      rail_out = rail_options.gather_into.narrow(0, cut.bounds[rail_->rank()], out.numel());
    }
    std::vector<CollectiveStep> steps{
        [host_sums](const CollectiveTag&) { return std::vector{host_sums}; },
        [out = out, rail_out, rail_pieces, rail_bounds = cut.bounds, rail_options,
         rail = rail_](const CollectiveTag& rail_tag) {
          // The values of `out` to add to, and those in gaps between pieces.
          if (rail_options.gather_into.defined()) copy_values(rail_out, out);
          return std::vector{
              rail->reduce_scatter(rail_out, rail_pieces, rail_bounds, rail_options, rail_tag)};
        }};
    if (gathers) {
      ArenaTicket ticket = local_->arena()->take_ticket(call.kName, tag, form.mix("gather"));
      steps.emplace_back([ticket = std::move(ticket), flat = options.gather_into,
                          fetched = pieces_of_rail(cut, bounds, rail_options.gather_into),
                          local = local_](const CollectiveTag&) {
        return std::vector{local->gather_at(ticket, fetched, flat)};
      });
    }
    return start_steps(call, tag, std::move(steps), /*sends=*/1);
  }

  WorkPtr start(AllReduce& call, const CollectiveTag& tag) {
    return is_reduced_whole(call.tensor) ? all_reduce_whole(call, tag)
                                         : all_reduce_parts(call, tag);
  }

  WorkPtr all_reduce_whole(const AllReduce& call, const CollectiveTag& tag) {
    const auto& [tensor, op] = call;
    const WorkPtr inside = issue_on(*local_, {tag, call});
    return start_steps(call, tag,
                       {[inside](const CollectiveTag&) { return std::vector{inside}; },
                        [tensor = tensor, op = op, rail = rail_](const CollectiveTag& rail_tag) {
                          return std::vector{rail->all_reduce(tensor, op, rail_tag)};
                        }},
                       /*sends=*/1);
  }

  // Each rank sums one part over its host, then over its rail, whose ranks hold the same part.
  WorkPtr all_reduce_parts(const AllReduce& call, const CollectiveTag& tag) {
    const auto& [tensor, op] = call;
    const std::vector<int64_t> bounds = even_bounds(tensor.numel(), local_->size());
    const int64_t begin = bounds[index()], end = bounds[index() + 1];
    const at::ScalarType dtype = tensor.scalar_type();
    const at::Tensor part =
        at::empty({end - begin}, at::TensorOptions().dtype(dtype).requires_grad(false));
    const ArenaReduction reduction{
        begin, end, static_cast<std::byte*>(part.mutable_data_ptr()), {dtype, op}};
    CollectiveForm form = form_of(call, tag);
    const WorkPtr inside =
        local_->reduce(part, {{0, tensor, tensor.numel()}}, {reduction}, form, tag);
    ArenaTicket ticket = local_->arena()->take_ticket(call.kName, tag, form.mix("gather"));
    return start_steps(
        call, tag,
        {[inside](const CollectiveTag&) { return std::vector{inside}; },
         [part, op = op, rail = rail_](const CollectiveTag& rail_tag) {
           return std::vector{rail->all_reduce(part, op, rail_tag)};
         },
         [inside, ticket = std::move(ticket), begin, part, tensor = tensor,
          local = local_](const CollectiveTag&) {
           inside->wait_inputs();  // `tensor` is overwritten now: others must have read it
           return std::vector{local->gather_at(ticket, {{begin, part, part.numel()}}, tensor)};
         }},
        /*sends=*/1);
  }

  WorkPtr start(Broadcast& call, const CollectiveTag& tag) {
    const auto& [tensor, root, encoding] = call;
    ArenaTicket ticket = local_->arena()->take_ticket(call.kName, tag, form_of(call, tag));
    std::vector<CollectiveStep> steps;
    if (table_.index_of(root) == index()) {
      steps.emplace_back([tensor = tensor, from = table_.host_of(root), encoding = encoding,
                          rail = rail_](const CollectiveTag& rail_tag) {
        return std::vector{rail->broadcast(tensor, from, rail_tag, encoding)};
      });
    }
    steps.emplace_back([ticket = std::move(ticket), tensor = tensor, from = table_.index_of(root),
                        local = local_](const CollectiveTag&) {
      return std::vector{local->broadcast_at(ticket, tensor, from)};
    });
    return start_steps(call, tag, std::move(steps), /*sends=*/0);
  }

  WorkPtr start(AllToAll& call, const CollectiveTag& tag) { return start_on_whole(call, tag); }
  WorkPtr start(Barrier& call, const CollectiveTag& tag) { return start_on_whole(call, tag); }

  template <class Call>  // as a step: so it has a place among the collectives that ranks compare
  WorkPtr start_on_whole(const Call& call, const CollectiveTag& tag) {
    const CollectiveStep send = [call, whole = whole_](const CollectiveTag& of_step) {
      return std::vector{issue_on(*whole, {of_step, call})};
    };
    return start_steps(call, tag, {send}, /*sends=*/0);
  }

  const HostTable table_;
  const std::shared_ptr<ArenaProcessGroup> local_;
  const ProcessGroupPtr rail_;
  const ProcessGroupPtr whole_;
  ChannelOrder order_;
  std::array<StepThreads, 3> threads_;  // by channel
  SharedBuffers<HostBuffer> buffers_;
};

}  // namespace

ProcessGroupPtr hosted_process_group(ProcessGroupPtr whole,
                                     const c10::intrusive_ptr<c10d::Store>& store,
                                     const HostTable& table, const std::string& address,
                                     const std::string& key) {
  const auto timeout = whole->timeout();
  const int host = table.host_of(whole->rank()), index = table.index_of(whole->rank());
  const auto connect = [&](const std::string& name, int rank, int size, const std::string& at) {
    const auto keys = c10::make_intrusive<c10d::PrefixStore>(name, store);
    return gloo_process_group(keys, rank, size, timeout, at);
  };
  const ProcessGroupPtr inside =
      connect("host_" + std::to_string(host), index, table.ranks_per_host(), loopback_address());
  const ProcessGroupPtr rail =
      connect("rail_" + std::to_string(index), host, table.hosts(), address);
  // If one host can't share memory, all hosts fail.
  std::string why_not;
  auto arena = Arena::connect(*inside, key, why_not);
  for (const auto& failure : all_gather_bytes(*whole, why_not, {"hosts", Channel::kControl}))
    TORCH_CHECK_NOT_IMPLEMENTED(failure.empty(),
                                "[arena] the ranks of a host can't share memory: ", failure);
  return std::make_shared<HostedProcessGroup>(
      table, std::make_shared<ArenaProcessGroup>(std::move(arena)), rail, std::move(whole));
}

}  // namespace tessera
