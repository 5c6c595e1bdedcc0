#include "cable.h"

#include <unistd.h>

#include <stdexcept>

#include "program_run.h"

namespace tessera {
namespace {

bool ip(Command arguments) {
  arguments.insert(arguments.begin(), "ip");
  return run_program(arguments).status == 0;
}

}  // namespace

Cable::Cable() {
  bool ok = ip({"netns", "add", name(0)}) && ip({"netns", "add", name(1)}) &&
            ip({"link", "add", "name", kInterface, "netns", name(0), "type", "veth", "peer", "name",
                kInterface, "netns", name(1)});
  for (int host = 0; host < 2; ++host) {
    ok = ok && ip({"-n", name(host), "addr", "add", address(host) + "/24", "dev", kInterface}) &&
         ip({"-n", name(host), "link", "set", kInterface, "up"}) &&
         ip({"-n", name(host), "link", "set", "lo", "up"});
  }
  if (!ok) throw std::runtime_error("cannot join two network namespaces");
}

Cable::~Cable() {
  for (int host = 0; host < 2; ++host) ip({"netns", "del", name(host)});
}

bool Cable::can_be_laid() {
  static const bool can = [] {
    const std::string probe = "tessera-cable-" + std::to_string(::getpid());
    if (::getuid() != 0 || !ip({"netns", "add", probe})) return false;
    const bool runs = ip({"netns", "exec", probe, "true"});
    return ip({"netns", "del", probe}) && runs;
  }();
  return can;
}

void Cable::cut() { ip({"-n", name(0), "link", "set", kInterface, "down"}); }

std::vector<std::string> Cable::on_host(int host) const {
  return {"ip", "netns", "exec", name(host)};
}

std::string Cable::name(int host) const {
  return "tessera-cable-" + std::to_string(::getpid()) + "-" + std::to_string(host);
}

}  // namespace tessera
