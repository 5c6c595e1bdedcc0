#pragma once

#include <string>
#include <vector>

namespace tessera {

/// Two hosts joined by a cable: network namespaces of this machine, which only root can make.
class Cable {
 public:
  Cable();
  ~Cable();
  Cable(const Cable&) = delete;
  Cable& operator=(const Cable&) = delete;

  static bool can_be_laid();

  void cut();
  /// Words to put before a command that is to run on host 0 or 1.
  std::vector<std::string> on_host(int host) const;
  std::string address(int host) const { return "10.213.72." + std::to_string(1 + host); }
  static constexpr const char* kInterface = "cable";

 private:
  std::string name(int host) const;
};

}  // namespace tessera
