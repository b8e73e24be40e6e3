// The threads of a step: start, park, end. See team.h.
#include "team.h"

namespace paceline {

Team::Team(int num_threads, int max_phases)
    : num_threads_(num_threads), max_phases_(max_phases), last_(&runs_[0]) {
  for (Run& run : runs_) {
    run.progress.reset(new Progress[max_phases]);
    run.taken.reset(new Taken[static_cast<size_t>(max_phases) * num_threads]);
  }
  for (int t = 1; t < num_threads; ++t) threads_.emplace_back([this, t] { worker(t); });
}

Team::~Team() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    number_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& t : threads_) t.join();
}

// The memory of the next run. No thread comes in late: it would see that the number has moved on.
Team::Run& Team::prepare(Work work) {
  Run& run = runs_[(number_.load() + 1) % kRuns];
  Phases::wait_until([&] { return run.inside.load() == 0; });
  for (int i = 0; i < max_phases_; ++i) {
    run.progress[i].done.store(0, std::memory_order_relaxed);
    run.progress[i].ended_ns.store(0, std::memory_order_relaxed);
  }
  for (int i = 0; i < max_phases_ * num_threads_; ++i)
    run.taken[i].count.store(0, std::memory_order_relaxed);
  run.work = std::move(work);
  last_ = &run;
  return run;
}

void Team::run(Work work) {
  if (num_threads_ == 1) return run_alone(std::move(work));
  Run& run = prepare(std::move(work));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    number_.fetch_add(1);
  }
  wake_.notify_all();
  Phases phases(run, num_threads_, 0);
  run.work(phases);
}

void Team::run_alone(Work work) {
  Run& run = prepare(std::move(work));
  Phases phases(run, num_threads_, 0);
  run.work(phases);
}

void Team::worker(int thread) {
  for (uint32_t seen = 0;;) {
    if (!Phases::spin_until([&] { return number_.load() != seen; })) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return number_.load() != seen; });
    }
    seen = number_.load();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stop_) return;
    }
    Run& run = runs_[seen % kRuns];
    run.inside.fetch_add(1);
    if (number_.load() == seen) {  // else its memory may be another run's by now
      Phases phases(run, num_threads_, thread);
      run.work(phases);
    }
    run.inside.fetch_sub(1);
  }
}

}  // namespace paceline
