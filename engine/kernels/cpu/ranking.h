// The best tokens of a row, and questions about their ranking answered without sorting them.
//
// The ranking goes by logit, equal ones by the lower id. A question names a place in it, by the
// number of tokens or by the weight up to there; the place is found in a histogram over the logits,
// then in one of its buckets, until few tokens or equal ones are left. Knows no parameters.
#pragma once

#include <cstddef>
#include <memory>

#include "fixed.h"

namespace paceline {

// Unique in a row; greater = better.
inline uint64_t rank_key(float logit, int id) {
  const float plain = logit + 0.0f;  // -0.0 equals 0.0
  uint32_t bits;
  std::memcpy(&bits, &plain, sizeof bits);
  bits = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
inline int id_of(uint64_t key) { return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key)); }

struct Found {
  int place;        // among the candidates
  uint64_t before;  // what precedes it in the ranking, in the unit of the question
};

// One thread's candidates; memory for a whole row.
class Ranking {
 public:
  bool allocate(int vocab);
  void clear() { size_ = 0; }
  int size() const { return size_; }
  int id(int place) const { return ids_[place]; }
  uint64_t weight(int place) const { return weights_[place]; }
  uint64_t key(int place) const { return rank_key(logits_[place], ids_[place]); }

  // Adds those of n logits that are at least `bound`; the first has id `first_id`. In order of ids.
  void gather(const float* logits, int n, int first_id, float bound);
  // Weights exp((logit - peak) / temperature) for all candidates.
  void weigh(float peak, float temperature);
  uint64_t total() const;
  uint64_t total_from(uint64_t last) const;  // of those that rank at or above a key
  // Drops what ranks below `last` and what weighs less than min_weight.
  void cut(uint64_t last, float min_weight);

  // The candidate before which `count` others rank; count < size().
  Found by_count(uint64_t count);
  // The first candidate with more than `weight` at or before it; weight < total().
  Found by_weight(uint64_t weight);
  // Keys of the `count` best, in order; count <= size(). Valid until the next question.
  const uint64_t* best(int count);
  float* spare() { return parts_.get(); }  // memory until the next weigh()

 private:
  static constexpr int kBuckets = 1024;

  // Candidates, in the order of their ids, with their highest and lowest logit.
  struct Part {
    const float* logits;
    const int32_t* places;  // null: all candidates
    int count;
    float low, high;
    int place(int i) const { return places ? places[i] : i; }
  };
  // The logits of a part in kBuckets equal steps, the best in bucket 0.
  struct Histogram {
    std::unique_ptr<float[]> buckets;  // by member
    uint64_t sums[kBuckets];
    bool filled = false;
  };

  static Part part_of(float* logits, const int32_t* places, int count);
  template <class Measure>
  static void fill(Histogram& histogram, const Part& part, const Measure& measure);
  Part bucket_of(const Histogram& histogram, const Part& part, int bucket);
  template <class Measure>
  Found find(uint64_t target, Histogram& first, const Measure& measure);

  int size_ = 0;
  std::unique_ptr<float[]> logits_, parts_;  // parts_: weights as floats
  std::unique_ptr<int32_t[]> ids_;
  std::unique_ptr<uint64_t[]> weights_, keys_;
  std::unique_ptr<float[]> part_logits_;
  std::unique_ptr<int32_t[]> part_places_;
  Histogram whole_;  // of all candidates by weight: two questions often share it
  Histogram inner_;
};

}  // namespace paceline
