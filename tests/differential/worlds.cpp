#include "differential/worlds.h"

#include <arpa/inet.h>
#include <sys/prctl.h>
#include <tessera/comm/spawn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <list>

#include "comm/start/spawned_rank.h"
#include "support/forked.h"
#include "support/test_device.h"

namespace tessera::differential {
namespace {

constexpr auto kTimeout = std::chrono::seconds(20);  // of each wait for another rank
constexpr unsigned kSeconds = 90;                    // of each process

int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  socklen_t size = sizeof(address);
  auto* const its = reinterpret_cast<sockaddr*>(&address);
  TORCH_CHECK(::bind(socket, its, size) == 0 && ::getsockname(socket, its, &size) == 0);
  ::close(socket);
  return ntohs(address.sin_port);
}

void write_trace(const Trace& trace, const std::string& path) {
  c10::List<std::string> names;
  c10::List<torch::Tensor> values;
  for (const auto& [name, value] : trace.items) {
    names.push_back(name);
    values.push_back(value);
  }
  const auto bytes = torch::pickle_save(
      c10::ivalue::Tuple::create({static_cast<int64_t>(trace.op), trace.error, std::move(names),
                                  std::move(values), trace.state}));
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
}

Trace read_trace(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const auto fields = torch::pickle_load({std::istreambuf_iterator<char>(in), {}}).toTuple();
  Trace trace{.op = static_cast<int>(fields->elements()[0].toInt()),
              .error = fields->elements()[1].toStringRef()};
  const auto names = fields->elements()[2].toListRef();
  const auto values = fields->elements()[3].toTensorVector();
  for (size_t i = 0; i < values.size(); ++i)
    trace.items.push_back({names[i].toStringRef(), values[i]});
  trace.state = fields->elements()[4].toInt();
  return trace;
}

// A rank's process, from its begin to its end.
void train_here(const Program& program, int rank, int port, const std::string& path) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const auto& [name, value] :
       {std::pair("RANK", rank), std::pair("LOCAL_RANK", rank),
        std::pair("WORLD_SIZE", program.ranks), std::pair("LOCAL_WORLD_SIZE", program.ranks),
        std::pair("MASTER_PORT", port)})
    ::setenv(name, std::to_string(value).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  // By one thread: LibTorch then makes anew a pool that did not survive the fork.
  at::set_num_threads(1);
  std::freopen((path + ".err").c_str(), "w", stderr);
  Trace trace;
  try {
    const World world = init({.timeout = kTimeout, .transport = program.transport});
    trace = train_sharded(program, world);
  } catch (const std::exception& error) {
    trace.error = error.what();
  }
  write_trace(trace, path);
}

}  // namespace

void run_threads(int ranks, Transport transport,
                 const std::function<void(int rank, const World& world)>& fn) {
  testing::forget_device_faults();  // of a program that some rank could not end
  spawn(ranks, [&] {
    const int rank = SpawnedRank::current()->info().rank;
    testing::take_test_device(rank);
    fn(rank,
       init({.timeout = kTimeout, .backend = testing::test_backend(), .transport = transport}));
  });
}

Traces train_in_processes(const Program& program) {
  const int port = free_port();
  const auto path_of = [&](int rank) { return c10::str(directory_of(program), ".rank", rank); };
  std::list<Forked> processes;
  for (int rank = 0; rank < program.ranks; ++rank)
    processes.emplace_back([&] { train_here(program, rank, port, path_of(rank)); }, kSeconds);
  Traces traces;
  for (Forked& process : processes) {
    const int rank = static_cast<int>(traces.size()), status = process.wait();
    if (status == 0) {
      traces.push_back(read_trace(path_of(rank)));
    } else {
      std::ifstream in(path_of(rank) + ".err");
      traces.push_back({.error = c10::str("the process ends with status ", status, ": ",
                                          std::string(std::istreambuf_iterator<char>(in), {}))});
    }
    std::filesystem::remove(path_of(rank));
    std::filesystem::remove(path_of(rank) + ".err");
  }
  return traces;
}

Traces reload(const Program& program) {
  Program other = program;
  other.ranks = program.reload_ranks;
  other.reload_ranks = other.shard_size = 0;
  other.plan.level = program.reload_level;
  other.owners = false;
  Traces traces(other.ranks);
  run_threads(other.ranks, other.transport,
              [&](int rank, const World& world) { traces[rank] = load_sharded(other, world); });
  return traces;
}

}  // namespace tessera::differential
