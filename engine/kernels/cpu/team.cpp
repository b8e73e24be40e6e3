// The threads of a step: start, park, end. See team.h.
#include "team.h"

namespace paceline {

Team::Team(int num_threads, int max_phases)
    : num_threads_(num_threads), max_phases_(max_phases), progress_(new Progress[max_phases]) {
  for (int t = 1; t < num_threads; ++t) threads_.emplace_back([this, t] { worker(t); });
}

Team::~Team() {
  settle();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    step_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Team::settle() {
  Phases::wait_until([&] { return running_.load(std::memory_order_acquire) == 0; });
}

void Team::run(std::function<void(int)> work) {
  settle();
  for (int i = 0; i < max_phases_; ++i) {
    progress_[i].taken.store(0, std::memory_order_relaxed);
    progress_[i].done.store(0, std::memory_order_relaxed);
    progress_[i].ended_ns.store(0, std::memory_order_relaxed);
  }
  work_ = std::move(work);
  if (num_threads_ > 1) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      running_.store(num_threads_ - 1, std::memory_order_relaxed);
      step_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  work_(0);
}

void Team::worker(int thread) {
  for (uint32_t seen = 0;; ++seen) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return step_.load(std::memory_order_relaxed) != seen; });
      if (stop_) return;
    }
    work_(thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace paceline
