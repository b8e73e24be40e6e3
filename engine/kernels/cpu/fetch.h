// Memory that is wanted soon, fetched a few cache lines at a time while something else is computed.
//
// Into the second cache: requests for the first one wait for a dozen misses, and a core that asks
// for scattered pieces of memory there gets half the bandwidth.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

class Fetch {
 public:
  Fetch() = default;
  // `count` pieces of `bytes` each, which must outlive this.
  Fetch(const void* const* pieces, int count, size_t bytes)
      : pieces_(pieces), num_left_(count), bytes_(bytes) {
    next_piece();
  }
  template <int Count>
  void lines() {
    if (at_ == end_) return;
    for (int i = 0; i < Count; ++i) __builtin_prefetch(at_ + i * kLine, 0, 2);
    at_ += Count * kLine;
    if (at_ >= end_) next_piece();
  }
  void rest() {
    while (at_ != end_) lines<4>();
  }

 private:
  static constexpr int kLine = 64;
  void next_piece() {
    if (num_left_ == 0) {
      at_ = end_ = nullptr;
      return;
    }
    --num_left_;
    at_ = static_cast<const uint8_t*>(*pieces_++);
    end_ = at_ + bytes_;
  }

  const void* const* pieces_ = nullptr;
  int num_left_ = 0;
  size_t bytes_ = 0;
  const uint8_t *at_ = nullptr, *end_ = nullptr;
};

}  // namespace paceline
