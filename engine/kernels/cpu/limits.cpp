// What this machine can do at most: reading memory, multiplying 8-bit and 16-bit integers and fp32
// numbers, with the instructions of this tier. For python -m tests.limits, which holds the kernels
// against it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "api.h"
#include "dot.h"
#include "model.h"
#include "pairs.h"

using namespace paceline;

namespace {

#if defined(PACELINE_AVX512)
constexpr int kChains = 12;  // independent sums: enough to hide the latency, few enough for registers
#else
constexpr int kChains = 6;
#endif
constexpr int kRounds = 7;
constexpr size_t kBytes = size_t{256} << 20;
constexpr int kSteps = 1000000;

// Seconds of the fastest of some rounds of work(thread), on all threads at once.
template <class Work>
double seconds(int num_threads, const Work& work) {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<std::chrono::steady_clock::time_point> ends(num_threads);
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t)
      threads.emplace_back([&, t] {
        ready.fetch_add(1);
        while (!go.load()) {
        }
        work(t);
        ends[t] = std::chrono::steady_clock::now();
      });
    while (ready.load() < num_threads) std::this_thread::yield();
    const auto begin = std::chrono::steady_clock::now();
    go.store(true);
    for (std::thread& thread : threads) thread.join();
    const auto end = *std::max_element(ends.begin(), ends.end());
    best = std::min(best, std::chrono::duration<double>(end - begin).count());
  }
  return best;
}

// The compiler must believe that x is used and may have changed.
template <class X>
inline void touch(X& x) {
  asm volatile("" : : "r"(&x) : "memory");
}

double bytes_per_second(int num_threads) {
  Buffer buffer;
  if (!buffer.allocate(kBytes)) return 0;
  std::fill(buffer.as<float>(), buffer.as<float>() + kBytes / sizeof(float), 1.0f);
  return kBytes / seconds(num_threads, [&](int thread) {
           const size_t count = kBytes / sizeof(float) / num_threads / (4 * kLanes) * (4 * kLanes);
           const float* x = buffer.as<float>() + count * thread;
           F16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
           for (size_t i = 0; i < count; i += 4 * kLanes)
             for (int j = 0; j < 4; ++j) sums[j] = max(sums[j], load(x + i + j * kLanes));
           touch(sums);
         });
}

double fused_per_second(int num_threads) {
  const double work = static_cast<double>(kSteps) * kChains * kLanes * num_threads;
  return work / seconds(num_threads, [](int) {
           F16 sums[kChains];
           for (F16& sum : sums) sum = splat(0.0f);
           F16 a = splat(0.5f), b = splat(0.25f);
           touch(a), touch(b);
           for (int i = 0; i < kSteps; ++i)
             for (F16& sum : sums) sum = fma(sum, a, b);
           touch(sums);
         });
}

double pairs_per_second(int num_threads) {
  const double work = static_cast<double>(kSteps) * kChains * 2 * kLanes * num_threads;
  return work / seconds(num_threads, [](int) {
           I16 sums[kChains];
           for (I16& sum : sums) sum = splat(0);
           int16_t values[2 * kLanes] = {1, 2, 3};
           touch(values);
           const Pairs a = load_terms(values), b = splat_terms(values);
           for (int i = 0; i < kSteps; ++i)
             PACELINE_UNROLL for (int j = 0; j < kChains; ++j) sums[j] = add_products(sums[j], a, b);
           touch(sums);
         });
}

double products_per_second(int num_threads) {
  constexpr int rows = std::min(kMaxRows, kFewRows);
  alignas(64) uint8_t weights[kGroupBytes * 8] = {1, 2, 3};
  alignas(64) int8_t x[rows * kBlock] = {1, 2, 3};
  const int steps = kSteps / 8;
  const double work = static_cast<double>(steps) * rows * 2 * kLanes * kBlock * num_threads;
#if defined(PACELINE_AVX512)
  return work / seconds(num_threads, [&](int) {
           I16 acc[rows][2];
           for (auto& row : acc) row[0] = row[1] = splat(0);
           __m512i w = _mm512_loadu_si512(weights), four = _mm512_loadu_si512(x);
           for (int i = 0; i < steps * 8; ++i) {
             asm volatile("" : "+v"(w), "+v"(four));
             for (auto& row : acc)
               for (I16& sum : row) sum.v = _mm512_dpbusd_epi32(sum.v, w, four);
           }
           touch(acc);
         });
#else
  const int32_t none[rows] = {};
  return work / seconds(num_threads, [&](int) {
           I16 acc[rows][2];
           for (auto& row : acc) row[0] = row[1] = splat(0);
           const uint8_t* w = weights;
           const int8_t* a = x;
           for (int i = 0; i < steps; ++i) {
             asm volatile("" : "+r"(w), "+r"(a));
             dot_block<true, rows>(w, a, none, acc);
           }
           touch(acc);
         });
#endif
}

}  // namespace

extern "C" double paceline_limit(int32_t what, int32_t num_threads) {
  if (num_threads < 1) return 0;
  switch (what) {
    case PACELINE_READ_BYTES: return bytes_per_second(num_threads);
    case PACELINE_INT8_PRODUCTS: return products_per_second(num_threads);
    case PACELINE_INT16_PRODUCTS: return pairs_per_second(num_threads);
    case PACELINE_FP32_PRODUCTS: return fused_per_second(num_threads);
    default: return 0;
  }
}
