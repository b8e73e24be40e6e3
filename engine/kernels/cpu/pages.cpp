// The thread that asks the system for pages ahead of their use. See pages.h.
#include "pages.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace paceline {
namespace {

constexpr size_t kStep = size_t{2} << 20;  // of a region at a time
constexpr size_t kPage = 4096;

// Without a change to what is there, so others may write it meanwhile. False where it cannot be done.
bool populate(uint8_t* from, size_t bytes) {
#if defined(__linux__)
  constexpr int populate_write = 23;  // MADV_POPULATE_WRITE of Linux 5.14, which older headers lack
  const uintptr_t first = reinterpret_cast<uintptr_t>(from) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(from) + bytes) / kPage * kPage;
  return madvise(reinterpret_cast<void*>(first), last - first, populate_write) == 0;
#else
  (void)from, (void)bytes;
  return false;
#endif
}

}  // namespace

PagesAhead::~PagesAhead() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void PagesAhead::start(std::vector<uint8_t*> regions, size_t bytes) {
  regions_ = std::move(regions);
  size_ = bytes;
  thread_ = std::thread([this] { work(); });
}

void PagesAhead::want(size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    bytes = std::min(size_, (bytes + kStep - 1) / kStep * kStep);
    if (bytes <= wanted_) return;
    wanted_ = bytes;
  }
  changed_.notify_one();
}

void PagesAhead::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (size_t done = 0;;) {
    changed_.wait(lock, [&] { return stop_ || wanted_ > done; });
    if (stop_) return;
    const size_t end = wanted_;
    lock.unlock();
    for (uint8_t* region : regions_)
      if (!populate(region + done, end - done)) return;
    done = end;
    lock.lock();
  }
}

}  // namespace paceline
