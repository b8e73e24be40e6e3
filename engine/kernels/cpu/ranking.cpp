// Candidates gathered, weighed and searched. See ranking.h.
#include "ranking.h"

#include <algorithm>
#include <functional>
#include <new>

namespace paceline {
namespace {

constexpr int kFew = 48;                // as many are sorted
constexpr int kSparse = 5;              // of 16 lanes: fewer are picked one by one
constexpr float kSmallest = 1e-30f;     // a range that can be cut into buckets

template <class T>
bool allocate_array(std::unique_ptr<T[]>& array, size_t n) {
  array.reset(new (std::nothrow) T[n]);
  return array != nullptr;
}

}  // namespace

bool Ranking::allocate(int vocab) {
  const size_t n = static_cast<size_t>(vocab) + kLanes;  // a last vector is written whole
  return allocate_array(logits_, n) && allocate_array(parts_, n) && allocate_array(ids_, n) &&
         allocate_array(weights_, n) && allocate_array(keys_, n) &&
         allocate_array(part_logits_, n) && allocate_array(part_places_, n) &&
         allocate_array(whole_.buckets, n) && allocate_array(inner_.buckets, n);
}

void Ranking::gather(const float* logits, int n, int first_id, float bound) {
  const F16 bounds = splat(bound);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    uint32_t lanes = at_least(load(logits + i), bounds);
    if (__builtin_popcount(lanes) < kSparse) {
      for (; lanes; lanes &= lanes - 1) {
        const int j = i + __builtin_ctz(lanes);
        logits_[size_] = logits[j];
        ids_[size_++] = first_id + j;
      }
      continue;
    }
    for (int j = i; j < i + kLanes; ++j, lanes >>= 1) {  // no branch to guess
      logits_[size_] = logits[j];
      ids_[size_] = first_id + j;
      size_ += lanes & 1;
    }
  }
  for (; i < n; ++i) {
    logits_[size_] = logits[i];
    ids_[size_] = first_id + i;
    size_ += logits[i] >= bound;
  }
}

void Ranking::weigh(float peak, float temperature) {
  const F16 top = splat(peak), scale = splat(1.0f / temperature);
  std::fill(&logits_[size_], &logits_[size_] + kLanes, peak);
  for (int i = 0; i < size_; i += kLanes)
    store(&parts_[i], exp((load(&logits_[i]) - top) * scale));
  for (int i = 0; i < size_; ++i) weights_[i] = fixed(parts_[i]);
  whole_.filled = false;
}

uint64_t Ranking::total() const {
  uint64_t sum = 0;
  for (int i = 0; i < size_; ++i) sum += weights_[i];
  return sum;
}

uint64_t Ranking::total_from(uint64_t last) const {
  uint64_t sum = 0;
  for (int i = 0; i < size_; ++i) sum += key(i) >= last ? weights_[i] : 0;
  return sum;
}

void Ranking::cut(uint64_t last, float min_weight) {
  int kept = 0;
  for (int i = 0; i < size_; ++i) {
    if (parts_[i] < min_weight || key(i) < last) continue;
    logits_[kept] = logits_[i];
    parts_[kept] = parts_[i];
    ids_[kept] = ids_[i];
    weights_[kept++] = weights_[i];
  }
  size_ = kept;
  whole_.filled = false;
}

Ranking::Part Ranking::part_of(float* logits, const int32_t* places, int count) {
  std::fill(logits + count, logits + count + kLanes, logits[0]);  // a last vector is read whole
  F16 least = splat(logits[0]), most = least;
  for (int i = 0; i < count; i += kLanes) {
    least = min(load(logits + i), least);
    most = max(load(logits + i), most);
  }
  return {logits, places, count, -reduce_max(splat(0.0f) - least), reduce_max(most)};
}

template <class Measure>
void Ranking::fill(Histogram& histogram, const Part& part, const Measure& measure) {
  const F16 high = splat(part.high), scale = splat((kBuckets - 1) / (part.high - part.low));
  for (int i = 0; i < part.count; i += kLanes)
    store(&histogram.buckets[i], to_float(round_to_int((high - load(part.logits + i)) * scale)));
  std::fill(std::begin(histogram.sums), std::end(histogram.sums), 0);
  for (int i = 0; i < part.count; ++i)
    histogram.sums[static_cast<int>(histogram.buckets[i])] += measure(part.place(i));
  histogram.filled = true;
}

Ranking::Part Ranking::bucket_of(const Histogram& histogram, const Part& part, int bucket) {
  const F16 wanted = splat(static_cast<float>(bucket));
  int kept = 0;
  for (int i = 0; i < part.count; i += kLanes) {
    const F16 buckets = load(&histogram.buckets[i]);
    uint32_t lanes = at_least(buckets, wanted) & at_least(wanted, buckets);
    if (part.count - i < kLanes) lanes &= (1u << (part.count - i)) - 1;
    for (; lanes; lanes &= lanes - 1) {
      const int member = i + __builtin_ctz(lanes);
      part_logits_[kept] = part.logits[member];  // of the same array or another: kept <= member
      part_places_[kept++] = part.place(member);
    }
  }
  return part_of(part_logits_.get(), part_places_.get(), kept);
}

template <class Measure>
Found Ranking::find(uint64_t target, Histogram& first, const Measure& measure) {
  uint64_t before = 0;
  Part part = part_of(logits_.get(), nullptr, size_);
  for (Histogram* h = &first; part.count > kFew && part.high - part.low > kSmallest; h = &inner_) {
    if (h != &whole_ || !h->filled) fill(*h, part, measure);
    int bucket = 0;
    while (bucket < kBuckets - 1 && before + h->sums[bucket] <= target) before += h->sums[bucket++];
    part = bucket_of(*h, part, bucket);
  }
  int32_t* places = part_places_.get();
  if (!part.places)
    for (int i = 0; i < part.count; ++i) places[i] = i;
  if (part.low < part.high)  // equal logits lie in the order of their ids already
    std::sort(places, places + part.count, [&](int a, int b) { return key(a) > key(b); });
  int i = 0;
  while (i < part.count - 1 && before + measure(places[i]) <= target) before += measure(places[i++]);
  return {places[i], before};
}

Found Ranking::by_count(uint64_t count) {
  return find(count, inner_, [](int) { return uint64_t{1}; });
}

Found Ranking::by_weight(uint64_t weight) {
  return find(weight, whole_, [&](int place) { return weights_[place]; });
}

const uint64_t* Ranking::best(int count) {
  for (int i = 0; i < size_; ++i) keys_[i] = key(i);
  std::partial_sort(keys_.get(), keys_.get() + count, keys_.get() + size_, std::greater<>());
  return keys_.get();
}

}  // namespace paceline
