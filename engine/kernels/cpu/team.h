// A team of threads that runs one step together, phase after phase, and sleeps between steps.
//
// A phase ends when its tasks are done, not when all threads have come by: on a busy machine a
// thread that the system has put aside holds nobody up, and whoever runs takes its share; nor does
// the next run wait for it. A waiting thread spins briefly, then yields; between runs it spins as
// briefly, then parks, so an idle server uses no CPU.
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

class Phases;

class Team {
 public:
  using Work = std::function<void(Phases&)>;

  Team(int num_threads, int max_phases);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return num_threads_; }
  // Calls work on the threads, the caller being thread 0, and returns when its own call does: then
  // all tasks are done. Other calls may still be on their way out, without a task, or even begin:
  // what `work` looks at outside of tasks must be its own, by value. It must not throw.
  void run(Work work);
  // The same on the calling thread only: for work that is done before another thread is awake.
  void run_alone(Work work);
  // When the tasks of the last run's phase were done, on any thread; 0 if it had none.
  uint64_t ended_ns(int phase) const {
    return last_->progress[phase].ended_ns.load(std::memory_order_relaxed);
  }
  static uint64_t now_ns() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                 std::chrono::nanoseconds(1));
  }

 private:
  friend class Phases;
  struct Progress {  // of one phase
    alignas(64) std::atomic<int> done{0};
    std::atomic<uint64_t> ended_ns{0};
  };
  struct Taken {  // tasks of a phase out of a thread's share
    alignas(64) std::atomic<int> count{0};
  };
  struct Run {
    std::unique_ptr<Progress[]> progress;  // [phases]
    std::unique_ptr<Taken[]> taken;        // [phases][threads]
    Work work;
    std::atomic<int> inside{0};  // threads that may look at it, but the caller
  };
  // A run's memory is taken again after so many: until then a thread may be late in it.
  static constexpr uint32_t kRuns = 4;

  Run& prepare(Work work);
  void worker(int thread);

  const int num_threads_, max_phases_;
  Run runs_[kRuns];
  Run* last_;
  std::atomic<uint32_t> number_{0};  // of the run that threads may join
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

// One thread's walk through the phases of a run: every thread makes the same calls.
class Phases {
 public:
  // Runs task(0) .. task(count - 1) and returns when all are done. A thread begins with its share, so
  // that phases alike leave it what is in its cache already; then it takes of the others' shares.
  template <class Task>
  void each(int count, const Task& task) {
    Team::Progress& phase = run_.progress[index_];
    Team::Taken* const taken = &run_.taken[index_++ * num_threads_];
    const auto share = [&](int owner) { return (count * owner + num_threads_ - 1) / num_threads_; };
    int mine = 0;
    for (int turn = 0; turn < num_threads_; ++turn) {
      const int owner = (thread_ + turn) % num_threads_, end = share(owner + 1);
      const auto take = [&] {
        return share(owner) + taken[owner].count.fetch_add(1, std::memory_order_relaxed);
      };
      for (int i = take(); i < end; i = take(), ++mine) task(i);
    }
    if (mine > 0 && phase.done.fetch_add(mine, std::memory_order_release) + mine == count)
      phase.ended_ns.store(Team::now_ns(), std::memory_order_relaxed);
    wait_until([&] { return phase.done.load(std::memory_order_acquire) >= count; });
  }

  int num_done() const { return index_; }
  int thread() const { return thread_; }

 private:
  friend class Team;
  static constexpr int kSpins = 2000;  // some tens of microseconds

  Phases(Team::Run& run, int num_threads, int thread)
      : run_(run), num_threads_(num_threads), thread_(thread) {}

  template <class Condition>
  static void wait_until(const Condition& condition) {
    if (!spin_until(condition))
      while (!condition()) std::this_thread::yield();
  }
  template <class Condition>
  static bool spin_until(const Condition& condition) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (condition()) return true;
      pause();
    }
    return false;
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Team::Run& run_;
  const int num_threads_, thread_;
  int index_ = 0;
};

}  // namespace paceline
