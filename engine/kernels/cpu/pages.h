// Memory of the KV pool made resident a little before a step needs it, by a thread of its own.
//
// A first touch costs more than the arithmetic on what is stored there, above all in a virtual machine,
// and would come in the middle of a step. Knows nothing of blocks or layers.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class PagesAhead {
 public:
  PagesAhead() = default;
  ~PagesAhead();
  PagesAhead(const PagesAhead&) = delete;
  PagesAhead& operator=(const PagesAhead&) = delete;

  // Regions of `bytes` each, which are filled from their starts and outlive this. May throw.
  void start(std::vector<uint8_t*> regions, size_t bytes);
  // The first `bytes` of each region will be used soon.
  void want(size_t bytes);

 private:
  void work();

  std::vector<uint8_t*> regions_;
  size_t size_ = 0, wanted_ = 0;
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace paceline
