#pragma once

#include <atomic>
#include <thread>

namespace tessera {

/// Another service on a port of this machine. It accepts every connection; as a web server it
/// answers all requests with an error, else it never says a word.
class Stranger {
 public:
  explicit Stranger(bool is_web_server);
  ~Stranger();
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  int port() const { return port_; }

 private:
  void serve();

  bool is_web_server_;
  int listener_ = -1, port_ = 0;
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

}  // namespace tessera
