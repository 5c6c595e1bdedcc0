// Waits for as many seconds as WORLD_PROBE_LATE says, joins the world that its environment
// describes, sums 1 + rank over all ranks and prints the result. Then, by its arguments:
//
//   world_probe                   ends
//   world_probe --note WORDS...   the same
//   world_probe TEXT              fails with TEXT as the message of an error of LibTorch
//   world_probe --linger FILE     prints "listening ADDRESS:PORT" for each listening socket, waits
//                                 until FILE exists, and sums once more: "again SUM"
//   world_probe --twice           calls init() once more, and prints the error; sums once more
//   world_probe --remake N        joins and leaves N times in all, and prints "world I descriptors
//   N
//                                 threads N" in the tenth and in the last
//   world_probe --child fork|exec the last rank forks a child ("child PID"), which sleeps or starts
//                                 `sleep`, and sleeps; the others sum once more

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

double sum_of_ranks(const tessera::World& world) {
  const torch::Tensor sum = torch::full({4}, 1.0 + world.rank());
  world.process_group()->all_reduce(sum, tessera::ReduceOp::kSum, {"probe"})->wait();
  return sum[3].item<double>();
}

void print_if_listening(int fd) {
  int listens = 0;
  socklen_t size = sizeof(listens);
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || listens == 0) return;
  sockaddr_storage address{};
  size = sizeof(address);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  char text[INET6_ADDRSTRLEN] = "";
  const auto* const v4 = reinterpret_cast<const sockaddr_in*>(&address);
  const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&address);
  const bool is_v4 = address.ss_family == AF_INET;
  ::inet_ntop(address.ss_family, is_v4 ? static_cast<const void*>(&v4->sin_addr) : &v6->sin6_addr,
              text, sizeof(text));
  std::printf("listening %s:%d\n", text, ntohs(is_v4 ? v4->sin_port : v6->sin6_port));
}

void wait_for_file(const tessera::World& world, const std::string& file) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    print_if_listening(std::stoi(entry.path().filename()));
  std::printf("lingers\n");
  std::fflush(stdout);
  while (!std::filesystem::exists(file)) ::usleep(20'000);
  std::printf("again %.0f\n", sum_of_ranks(world));
}

void sleep_long() { ::sleep(60); }

void start_child(const tessera::World& world, const std::string& kind) {
  if (world.rank() + 1 < world.size()) return static_cast<void>(sum_of_ranks(world));
  const pid_t child = ::fork();
  if (child == 0) {
    if (kind == "exec") ::execlp("sleep", "sleep", "60", nullptr);
    sleep_long();
    ::_exit(0);
  }
  std::printf("child %d\n", static_cast<int>(child));
  std::fflush(stdout);
  sleep_long();
}

void join_twice(const tessera::World& world) {
  try {
    const auto second = tessera::init();
  } catch (const c10::Error& error) {
    std::printf("%s\n", error.what_without_backtrace());
  }
  std::printf("again %.0f\n", sum_of_ranks(world));
}

long entries_of(const char* folder) {
  const std::filesystem::directory_iterator all(folder);
  return std::distance(begin(all), end(all));
}

int remake(int count) {
  for (int i = 1; i <= count; ++i) {
    const auto world = tessera::init();
    const double sum = sum_of_ranks(world), expected = world.size() * (world.size() + 1) / 2.0;
    TORCH_CHECK(sum == expected, "world ", i, " has the sum ", sum, " for ", expected);
    if (i == 10 || i == count)
      std::printf("world %d descriptors %ld threads %ld\n", i, entries_of("/proc/self/fd"),
                  entries_of("/proc/self/task"));
  }
  return 0;
}

// Ends the process of rank 1 by an exception, while the others wait for it.
void throw_uncaught(const tessera::World& world) {
  if (world.rank() == 1)
    std::thread([] { throw std::runtime_error("the file has 3 bytes too few"); }).join();
  world.process_group()->barrier({"probe"});
}

}  // namespace

int main(int argc, char** argv) {
  if (const char* const late = std::getenv("WORLD_PROBE_LATE")) ::sleep(std::atoi(late));
  try {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "--remake") return remake(std::atoi(argv[2]));
    const auto world = tessera::init();
    std::printf("rank %d of %d, local rank %d, started by %s, sum %.0f, over %s\n", world.rank(),
                world.size(), world.local_rank(), world.info().source.c_str(), sum_of_ranks(world),
                world.process_group()->backend_name().c_str());
    std::fflush(stdout);
    if (mode == "--linger") return wait_for_file(world, argv[2]), 0;
    if (mode == "--twice") return join_twice(world), 0;
    if (mode == "--throw") return throw_uncaught(world), 0;
    if (mode == "--child") return start_child(world, argv[2]), 0;
    world.process_group()->barrier({"probe"});
    TORCH_CHECK(argc == 1 || mode == "--note", argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "world_probe: %s\n", error.what());
    return 1;
  }
  return 0;
}
