// Checksums of what one library of CPU kernels computes, a line for each kernel and shape: tiers and
// machines that agree bit for bit print the same lines.
//   checksums LIBRARY
//   checksums LIBRARY TIER      only says 1 if this CPU runs the tier, else 0
// Inputs come from a generator of integers and are exact; all nans count as one, since their bits
// differ between machines. Knows the C interface only, see engine/kernels/cpu/api.h.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "api.h"

namespace {

void* library;

#define KERNEL(name) reinterpret_cast<decltype(&name)>(dlsym(library, #name))

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const char* const kKinds[] = {"Q4_0", "Q4_1", "Q8_0", "F32", "F16", "BF16"};
const char* const kKvKinds[] = {"float32", "int16", "int8"};

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// SplitMix64.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>((next() >> 33) % static_cast<uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  // Bell-shaped, of standard deviation 1 or so, in steps of 2^-16.
  float bell() {
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += between(-0xffff, 0xffff);
    return static_cast<float>(sum) * 0x1p-16f;
  }
  Floats bells(size_t n, float scale = 1.0f) {  // a power of two keeps them exact
    Floats x(n);
    for (float& v : x) v = bell() * scale;
    return x;
  }
  std::vector<uint8_t> bytes(size_t n) {
    std::vector<uint8_t> x(n);
    for (uint8_t& v : x) v = static_cast<uint8_t>(next() >> 56);
    return x;
  }

 private:
  uint64_t state_;
};

// FNV-1a.
class Checksum {
 public:
  void add(const void* data, size_t size) {
    for (size_t i = 0; i < size; ++i)
      hash_ = (hash_ ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  }
  void add(const Floats& x) {
    for (const float v : x) {
      const float plain = std::isnan(v) ? kNan : v;
      add(&plain, sizeof plain);
    }
  }
  template <class T>
  void add(const std::vector<T>& x) {
    add(x.data(), x.size() * sizeof(T));
  }
  void add(int32_t code) { add(&code, sizeof code); }
  void print(const std::string& what) const {
    std::printf("%s %016llx\n", what.c_str(), static_cast<unsigned long long>(hash_));
  }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

// A weight matrix as a file has it.
struct Matrix {
  int kind, n, k;
  uint64_t row_bytes;
  std::vector<uint8_t> data;
};

bool is_quantised(int kind) { return kind <= 2; }

// Random halves are finite, of either sign, down to subnormals.
uint16_t small_half(Numbers& numbers, int exponents) {
  const int magnitude = numbers.below(exponents << 10);
  return static_cast<uint16_t>(magnitude | numbers.below(2) << 15);
}

enum class Quants { kRandom, kExtreme };

Matrix matrix(Numbers& numbers, int kind, int n, int k, Quants quants = Quants::kRandom) {
  constexpr int block_bytes[] = {18, 20, 34}, value_bytes[] = {4, 2, 2};
  Matrix m{kind, n, k, 0, {}};
  m.row_bytes = is_quantised(kind) ? k / 32 * block_bytes[kind] : k * value_bytes[kind - 3];
  m.data = numbers.bytes(n * m.row_bytes);
  if (quants == Quants::kExtreme) m.data.assign(m.data.size(), kind == 2 ? 0x80 : 0xff);
  const size_t values = static_cast<size_t>(n) * k;
  if (is_quantised(kind)) {
    for (size_t at = 0; at < m.data.size(); at += block_bytes[kind])
      for (int i = 0; i < (kind == 1 ? 2 : 1); ++i) {
        const uint16_t scale = small_half(numbers, 11);  // below 1/16
        std::memcpy(&m.data[at + 2 * i], &scale, 2);
      }
  } else if (kind == 4) {
    for (size_t i = 0; i < values; ++i) {
      const uint16_t x = small_half(numbers, 14);
      std::memcpy(&m.data[2 * i], &x, 2);
    }
  } else {
    for (size_t i = 0; i < values; ++i) {
      const float x = numbers.bell() * 0.125f;  // of bf16 the upper half; both are little-endian
      std::memcpy(&m.data[m.row_bytes / k * i], reinterpret_cast<const char*>(&x) + (kind == 5 ? 2 : 0),
                  m.row_bytes / k);
    }
  }
  return m;
}

Floats multiplied(const Matrix& m, const Floats& x, int rows, const float* bias) {
  Floats out(static_cast<size_t>(rows) * m.n, kNan);
  const int code = KERNEL(paceline_multiply)(m.kind, m.n, m.k, m.data.data(), m.row_bytes, bias, rows,
                                             x.data(), out.data());
  if (code != 0) std::abort();
  return out;
}

void multiplications() {
  for (int kind = 0; kind < 6; ++kind) {
    Numbers numbers(100 + kind);
    const auto name = [&](const std::string& what) {
      return std::string("multiply ") + kKinds[kind] + " " + what;
    };
    for (int rows = 1; rows <= 9; ++rows) {
      Checksum sum;
      for (int i = 0; i < 6; ++i) {
        const int n = numbers.between(1, 100), k = 32 * numbers.between(1, 12);
        const Matrix m = matrix(numbers, kind, n, k);
        const Floats bias = numbers.bells(n), x = numbers.bells(static_cast<size_t>(rows) * k);
        sum.add(multiplied(m, x, rows, i % 2 ? bias.data() : nullptr));
      }
      sum.print(name(std::to_string(rows) + " rows"));
    }
    Checksum edges;
    for (const float scale : {0.0f, 0x1p-140f, 0x1p-117f, 0x1p-100f, 0x1p100f, 0x1p124f}) {
      const Floats x = numbers.bells(5 * 64, scale);
      edges.add(multiplied(matrix(numbers, kind, 33, 64), x, 5, nullptr));
    }
    for (const float bad : {kNan, kInfinity, -kInfinity}) {
      Floats x = numbers.bells(9 * 96);
      x[numbers.below(9 * 96)] = bad;
      edges.add(multiplied(matrix(numbers, kind, 40, 96), x, 9, nullptr));
    }
    if (is_quantised(kind)) {
      Floats x(4 * 64, 127.0f);
      for (size_t i = 64; i < 128; ++i) x[i] = -127.0f;
      for (size_t i = 128; i < 256; i += 1 + i / 192) x[i] = -127.0f;
      edges.add(multiplied(matrix(numbers, kind, 33, 64, Quants::kExtreme), x, 4, nullptr));
    }
    edges.print(name("edges"));
    Matrix any = matrix(numbers, kind, 32, 96);  // nans, infinities and subnormals among the weights
    any.data = numbers.bytes(any.data.size());
    Checksum anything;
    anything.add(multiplied(any, numbers.bells(3 * 96), 3, nullptr));
    anything.print(name("any bytes"));
  }
}

void attentions() {
  for (int kv = 0; kv < 3; ++kv)
    for (const int head_dim : {32, 64, 96, 128}) {
      Numbers numbers(200 + 10 * kv + head_dim);
      Checksum sum;
      for (int i = 0; i < 12; ++i) {
        const int block_size = 16 * numbers.between(1, 2), kv_heads = numbers.between(1, 2);
        const int group = numbers.between(1, 7), queries = numbers.between(1, 9);
        const int num_keys = numbers.between(queries, 300), blocks = (num_keys - 1) / block_size + 1;
        const int window = i % 3 == 0 ? numbers.between(1, 200) : num_keys;
        Ints table(blocks), first(queries), last(queries);
        for (int b = 0; b < blocks; ++b) table[b] = blocks - b;  // block 0 is nobody's
        for (int q = 0; q < queries; ++q) {
          last[q] = num_keys - queries + q + 1;
          first[q] = last[q] > window ? last[q] - window : 0;
        }
        const size_t kv_size = static_cast<size_t>(num_keys) * kv_heads * head_dim;
        const size_t q_size = static_cast<size_t>(queries) * kv_heads * group * head_dim;
        Floats keys = numbers.bells(kv_size), values = numbers.bells(kv_size);
        Floats q = numbers.bells(q_size, i % 4 == 1 ? 4.0f : 0.125f), out(q_size, kNan);
        if (i == 5) q[numbers.below(static_cast<int>(q_size))] = kNan;
        if (i == 6) keys[numbers.below(static_cast<int>(kv_size))] = kInfinity;
        if (i == 7) values[numbers.below(static_cast<int>(kv_size))] = -kInfinity;
        if (i == 8) q = numbers.bells(q_size, 0x1p100f), keys = numbers.bells(kv_size, 0x1p20f);
        if (i == 9) values = numbers.bells(kv_size, 0x1p-130f);
        sum.add(KERNEL(paceline_attend)(kv, block_size, blocks + 1, kv_heads, group, head_dim,
                                        num_keys, keys.data(), values.data(), table.data(), queries,
                                        q.data(), first.data(), last.data(), out.data()));
        sum.add(out);
      }
      sum.print(std::string("attend ") + kKvKinds[kv] + " head of " + std::to_string(head_dim));
    }
}

void functions() {
  Numbers numbers(300);
  Floats x;
  for (uint32_t i = 0; i < 1 << 16; ++i) x.push_back(float_of(static_cast<uint32_t>(numbers.next())));
  for (int i = 0; i < 1 << 16; ++i) x.push_back(numbers.bell() * 16.0f);
  for (int e = -30; e < -10; ++e)
    for (const float m : {1.0f, 1.5f, 1.25f}) x.push_back(m * std::ldexp(1.0f, e));
  for (const float v : {0.0f, -0.0f, 65504.0f, 65519.0f, 65520.0f, kInfinity, -kInfinity, kNan, 88.5f})
    x.push_back(v);
  x.resize((x.size() + 15) / 16 * 16);
  const int count = static_cast<int>(x.size());
  Floats out(x.size());
  Checksum exponentials, halves;
  KERNEL(paceline_exp)(x.data(), out.data(), count);
  exponentials.add(out);
  exponentials.print("exp");
  std::vector<uint16_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  out.resize(bits.size());
  KERNEL(paceline_widen_half)(bits.data(), out.data(), static_cast<int>(bits.size()));
  halves.add(out);
  halves.print("halves");
}

void choices() {
  for (const int vocab : {1, 7, 1000, 4099, 40000}) {
    Numbers numbers(400 + vocab);
    constexpr int rows = 40;
    const int max_top = vocab < 20 ? vocab : 20;
    Floats logits = numbers.bells(static_cast<size_t>(rows) * vocab, 4.0f);
    std::vector<paceline_parameters> parameters(rows);
    std::vector<int64_t> indices(rows), given(rows);
    for (int r = 0; r < rows; ++r) {
      float* row = &logits[static_cast<size_t>(r) * vocab];
      if (r % 5 == 3)  // many equal ones
        for (int i = 0; i < vocab; ++i) row[i] = std::floor(row[i]);
      if (r % 10 == 8)  // none above zero, and zeros of either sign
        for (int i = 0; i < vocab; ++i) row[i] = row[i] > 0 ? 0.0f : row[i] > -1 ? -0.0f : row[i];
      if (r == 11) row[numbers.below(vocab)] = kNan;
      if (r == 12) row[numbers.below(vocab)] = kInfinity;
      if (r % 10 == 4 && vocab > 1) row[vocab / 2] = row[0] = -kInfinity;
      constexpr double top_ps[] = {1.0, 0.95, 0.5, 1.0, 0.999};
      constexpr float temperatures[] = {1.0f, 0.5f, 0.0625f, 2.0f}, min_ps[] = {0.0f, 0.0f, 0.125f, 1.0f};
      const int64_t top_ks[] = {0, 0, 40, 1, vocab / 2};
      parameters[r] = {static_cast<int64_t>(numbers.next() >> 1), top_ks[numbers.below(5)],
                       numbers.between(-1, max_top), top_ps[numbers.below(5)],
                       temperatures[numbers.below(4)], min_ps[numbers.below(4)],
                       static_cast<uint8_t>(numbers.below(5) == 0)};
      indices[r] = numbers.below(1000);
      given[r] = numbers.below(vocab);
    }
    constexpr int num_masks = 9;
    const int mask_words = (vocab + 31) / 32 + vocab % 2;
    std::vector<uint32_t> masks(num_masks * mask_words);
    for (size_t i = 0; i < masks.size(); ++i) {
      const uint32_t any = static_cast<uint32_t>(numbers.next()), kind = i / mask_words % 5;
      masks[i] = kind == 0 ? any : kind == 1 ? ~0u : kind == 2 ? any & any << 7 & any << 13 : 0;
      if (kind == 3 && i % 40 == 0) masks[i] = any | 1;  // of kind 4 none
    }
    Ints mask_rows(rows, -1);
    for (int r = 0; r < rows; r += 1 + r % 2) mask_rows[r] = numbers.below(num_masks);
    const Floats unmasked = logits;
    enum Form { kChoose, kScore, kMasked };
    const char* const names[] = {"choose ", "score ", "choose by masks of "};
    for (const int threads : {1, 2})
      for (const Form form : {kChoose, kScore, kMasked}) {
        std::vector<int64_t> tokens(rows), top_ids(rows * max_top);
        Floats peaks(rows), logprobs(rows), top(rows * max_top);
        logits = unmasked;
        const paceline_choice choice{logits.data(), vocab, rows, vocab, masks.data(),
                                     form == kMasked ? mask_rows.data() : nullptr, num_masks,
                                     mask_words, parameters.data(),
                                     sizeof(paceline_parameters), indices.data(),
                                     form == kScore ? given.data() : nullptr, tokens.data(), peaks.data(),
                                     logprobs.data(), top.data(), top_ids.data(), max_top};
        Checksum sum;
        sum.add(KERNEL(paceline_choose_alone)(threads, &choice));
        sum.add(tokens);
        sum.add(peaks);
        sum.add(logprobs);
        sum.add(top);
        sum.add(top_ids);
        sum.add(logits);
        sum.print(names[form] + std::to_string(vocab) + " tokens, " +
                  std::to_string(threads) + " threads");
      }
  }
}

struct ModelShape {
  const char* name;
  int kind, kv_kind, hidden, intermediate, heads, kv_heads, head_dim, rotary, window, threads;
  bool biases, head_norms, own_head;
};

class RandomModel {
 public:
  RandomModel(const ModelShape& shape, uint64_t seed) : shape_(shape), numbers_(seed) {
    const int pairs = shape.rotary / 2;
    Floats cos(kPositions * pairs), sin(kPositions * pairs);
    for (float& v : cos) v = numbers_.between(-256, 256) * 0x1p-8f;  // no rotation, but exact
    for (float& v : sin) v = numbers_.between(-256, 256) * 0x1p-8f;
    const int32_t windows[kLayers] = {0, shape.window};
    const int q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
    const int sizes[][2] = {{q, shape.hidden}, {kv, shape.hidden}, {kv, shape.hidden},
                            {shape.hidden, q}, {shape.intermediate, shape.hidden},
                            {shape.intermediate, shape.hidden}, {shape.hidden, shape.intermediate},
                            {kVocab, shape.hidden}, {kVocab, shape.hidden}};
    uint64_t bytes = 0;
    for (int which = 0; which <= PACELINE_HEAD; ++which)
      bytes += (which < PACELINE_EMBEDDING ? kLayers : 1) *
               KERNEL(paceline_packed_bytes)(kind_of(which), sizes[which][0], sizes[which][1]);
    const paceline_config config{shape.hidden, shape.intermediate, kLayers, shape.heads,
                                 shape.kv_heads, shape.head_dim, kVocab, kPositions, shape.rotary,
                                 !is_quantised(shape.kind), shape.kv_kind, kBlocks, 16, kPositions,
                                 shape.threads, 0x1p-20f, bytes};
    int32_t error = 0;
    model_ = KERNEL(paceline_create)(&config, cos.data(), sin.data(), windows, &error);
    if (!model_) std::abort();
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int which = 0; which < PACELINE_EMBEDDING; ++which)
        set_linear(layer, which, sizes[which][0], sizes[which][1]);
      set_norm(layer, PACELINE_ATTENTION_NORM, shape.hidden);
      set_norm(layer, PACELINE_MLP_NORM, shape.hidden);
      if (!shape.head_norms) continue;
      set_norm(layer, PACELINE_Q_NORM, shape.head_dim);
      set_norm(layer, PACELINE_K_NORM, shape.head_dim);
    }
    set_norm(0, PACELINE_FINAL_NORM, shape.hidden);
    set_linear(0, PACELINE_EMBEDDING, kVocab, shape.hidden);
    if (shape.own_head) set_linear(0, PACELINE_HEAD, kVocab, shape.hidden);
  }
  ~RandomModel() { KERNEL(paceline_destroy)(model_); }
  RandomModel(const RandomModel&) = delete;
  RandomModel& operator=(const RandomModel&) = delete;

  // A prompt in chunks, then steps of mixed rows, one of them on copied blocks.
  Checksum run() {
    step({{0, 0, 37}});
    step({{0, 37, 30}, {1, 0, 1}});
    const int32_t pairs[][2] = {{0, 2 * kTable}, {1, 2 * kTable + 1}};
    sum_.add(KERNEL(paceline_copy_blocks)(model_, pairs[0], 2));
    step({{0, 67, 1}, {2, 32, 20}, {1, 1, 1}});
    for (int i = 0; i < 4; ++i) step({{0, 68 + i, 1}, {1, 2 + i, 1}, {2, 52 + i, 1}});
    step({{1, 6, 70}, {0, 72, 1}});
    return sum_;
  }

 private:
  static constexpr int kLayers = 2, kVocab = 100, kPositions = 80, kTable = 5, kBlocks = 15;
  struct Span {
    int sequence, start, count;
  };

  // Models of files mix kinds: the quantised ones have their heads in 8 bits.
  int kind_of(int which) const {
    return is_quantised(shape_.kind) && which >= PACELINE_DOWN ? 2 : shape_.kind;
  }
  void set_linear(int layer, int which, int n, int k) {
    const Matrix m = matrix(numbers_, kind_of(which), n, k);
    const Floats bias = numbers_.bells(n, 0.25f);
    const bool has_bias = shape_.biases && which <= PACELINE_V;
    sum_.add(KERNEL(paceline_set_linear)(model_, layer, which, m.kind, n, k, m.data.data(), m.row_bytes,
                                         has_bias ? bias.data() : nullptr));
  }
  void set_norm(int layer, int which, int n) {
    sum_.add(KERNEL(paceline_set_norm)(model_, layer, which, numbers_.bells(n).data()));
  }

  void step(const std::vector<Span>& spans) {
    Ints tokens, positions, starts{0}, tables;
    for (const Span& span : spans) {
      for (int i = 0; i < span.count; ++i) {
        tokens.push_back(numbers_.below(kVocab));
        positions.push_back(span.start + i);
      }
      starts.push_back(static_cast<int32_t>(tokens.size()));
      for (int i = 0; i < kTable; ++i) tables.push_back(span.sequence * kTable + i);
    }
    Ints outputs;  // the last of each row, and some others
    for (int32_t i = 0; i < starts.back(); ++i)
      if (std::count(starts.begin(), starts.end(), i + 1) || numbers_.below(2)) outputs.push_back(i);
    const int32_t count = static_cast<int32_t>(outputs.size());
    const paceline_batch batch{starts.back(), static_cast<int32_t>(spans.size()), kTable, count,
                               tokens.data(), positions.data(), starts.data(), tables.data(),
                               outputs.data()};
    Floats hidden(static_cast<size_t>(count) * shape_.hidden);
    Floats logits(static_cast<size_t>(count) * kVocab);
    sum_.add(KERNEL(paceline_forward)(model_, &batch, hidden.data()));
    sum_.add(KERNEL(paceline_logits)(model_, hidden.data(), count, logits.data()));
    sum_.add(hidden);
    sum_.add(logits);
  }

  const ModelShape shape_;
  Numbers numbers_;
  paceline_model* model_;
  Checksum sum_;
};

void models() {
  const ModelShape shapes[] = {
      {"grouped", 0, 0, 128, 256, 6, 2, 32, 32, 0, 1, false, false, false},
      {"biases, window", 0, 0, 96, 160, 4, 4, 32, 32, 50, 2, true, false, true},
      {"head norms, half rotated", 0, 0, 64, 96, 9, 1, 64, 32, 0, 1, false, true, false},
  };
  uint64_t seed = 500;
  for (int kind = 0; kind < 6; ++kind)
    for (int kv = 0; kv < 3; ++kv) {
      ModelShape shape = shapes[(kind + kv) % 3];
      shape.kind = kind;
      shape.kv_kind = kv;
      RandomModel model(shape, seed++);
      model.run().print(std::string("model ") + kKinds[kind] + ", KV " + kKvKinds[kv] + ", " +
                        shape.name);
    }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    std::fprintf(stderr, "checksums LIBRARY [TIER]: %s\n", count > 1 ? dlerror() : "no library");
    return 2;
  }
  if (count > 2) {
    std::printf("%d\n", KERNEL(paceline_tier_runs)(arguments[2]));
    return 0;
  }
  functions();
  multiplications();
  attentions();
  choices();
  models();
  return 0;
}
