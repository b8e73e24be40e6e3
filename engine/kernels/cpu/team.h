// A team of threads that runs one step together, phase after phase, and sleeps between steps.
//
// A phase ends when its tasks are done, not when all threads have come by: on a busy machine a
// thread that the system has put aside holds nobody up, and whoever runs takes its share. A waiting
// thread spins briefly, then yields; between steps it parks, so an idle server uses no CPU.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

class Team {
 public:
  Team(int num_threads, int max_phases);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return num_threads_; }
  // Calls work(thread) on the threads, the caller being thread 0, and returns when its own call
  // does: then all tasks are done. Other calls may still be on their way out, without a task, until
  // the next run, so `work` must capture nothing that dies sooner. It must not throw.
  void run(std::function<void(int)> work);
  // When the tasks of the last run's phase were done, on any thread; 0 if it had none.
  uint64_t ended_ns(int phase) const { return progress_[phase].ended_ns.load(std::memory_order_relaxed); }
  static uint64_t now_ns() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                 std::chrono::nanoseconds(1));
  }
  // Waits until no thread is inside an earlier `work`.
  void settle();

 private:
  friend class Phases;
  struct Progress {  // of one phase
    alignas(64) std::atomic<int> taken{0};
    std::atomic<int> done{0};
    std::atomic<uint64_t> ended_ns{0};
  };

  void worker(int thread);

  const int num_threads_, max_phases_;
  std::function<void(int)> work_;
  std::unique_ptr<Progress[]> progress_;
  std::atomic<uint32_t> step_{0};
  std::atomic<int> running_{0};
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

// One thread's walk through the phases of a step: every thread makes the same calls.
class Phases {
 public:
  explicit Phases(Team& team) : team_(team) {}

  // Runs task(0) .. task(count - 1), each on whichever thread is free; returns when all are done.
  template <class Task>
  void each(int count, const Task& task) {
    Team::Progress& phase = team_.progress_[index_++];
    int mine = 0;
    for (int i = take(phase); i < count; i = take(phase), ++mine) task(i);
    if (mine > 0 && phase.done.fetch_add(mine, std::memory_order_release) + mine == count)
      phase.ended_ns.store(Team::now_ns(), std::memory_order_relaxed);
    wait_until([&] { return phase.done.load(std::memory_order_acquire) >= count; });
  }

  int num_done() const { return index_; }

  template <class Condition>
  static void wait_until(const Condition& condition) {
    for (int spins = 0; !condition(); ++spins) spins < kSpins ? pause() : std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 2000;  // some tens of microseconds
  static int take(Team::Progress& phase) {
    return phase.taken.fetch_add(1, std::memory_order_relaxed);
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Team& team_;
  int index_ = 0;
};

}  // namespace paceline
