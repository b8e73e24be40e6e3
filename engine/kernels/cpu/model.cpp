// Building a model: what is supported, memory, weights, and blocks of KV. The step is in step.cpp.
#include "model.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace paceline {
namespace {

constexpr int kPhasesPerLayer = 8;
constexpr size_t kHugePage = size_t{2} << 20;

bool positive(std::initializer_list<int32_t> values) {
  return std::all_of(values.begin(), values.end(), [](int32_t v) { return v > 0; });
}

}  // namespace

bool Buffer::allocate(size_t bytes, Pages pages) {
  size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  data.reset(static_cast<uint8_t*>(std::aligned_alloc(kHugePage, size)));
  if (!data) return false;
#if defined(__linux__)
  madvise(data.get(), size, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
  (void)pages;
#endif
  return true;
}

bool Model::supported(const paceline_config& c) {
  if (!positive({c.hidden, c.intermediate, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim,
                 c.vocab, c.max_positions, c.rotary_dim, c.num_blocks, c.block_size, c.max_tokens,
                 c.num_threads}))
    return false;
  return c.hidden % kBlock == 0 && c.intermediate % kBlock == 0 && c.head_dim % kBlock == 0 &&
         c.num_heads % c.num_kv_heads == 0 && c.num_heads / c.num_kv_heads <= kMaxHeadsPerKv &&
         c.block_size % kLanes == 0 && c.kv_kind >= kKvFloat && c.kv_kind <= kKvInt8 &&
         c.head_dim <= kMaxHeadDim &&
         c.rotary_dim % 2 == 0 && c.rotary_dim <= c.head_dim;
}

Model::Model(const paceline_config& config, const float* rope_cos, const float* rope_sin,
             const int32_t* layer_windows)
    : c_(config),
      kv_{config.block_size, config.num_kv_heads, config.head_dim},
      layers_(config.num_layers),
      team_(config.num_threads, config.num_layers * kPhasesPerLayer + 4) {
  const size_t rope = static_cast<size_t>(c_.max_positions) * (c_.rotary_dim / 2);
  rope_cos_.assign(rope_cos, rope_cos + rope);
  rope_sin_.assign(rope_sin, rope_sin + rope);
  for (int i = 0; i < c_.num_layers; ++i) layers_[i].window = layer_windows[i];
  const int32_t* end = layer_windows + c_.num_layers;
  if (std::find(layer_windows, end, 0) == end) widest_window_ = *std::max_element(layer_windows, end);
}

bool Model::allocate() {
  const size_t tokens = static_cast<size_t>(c_.max_tokens);
  const size_t kv = layer_kv_bytes() * c_.num_layers;
  items_.resize(tokens * c_.num_kv_heads);
  output_items_.resize(tokens * c_.num_kv_heads);
  token_rows_.resize(tokens);
  marked_.reserve(c_.num_layers * kPhasesPerLayer + 4);
  const bool allocated = sampling_.allocate(c_.vocab, c_.num_threads) &&
         weights_.allocate(c_.weight_bytes) && kv_pool_.allocate(kv, Pages::kHuge) &&
         hidden_.allocate(tokens * c_.hidden * sizeof(float)) &&
         qkv_.allocate(tokens * qkv_width() * sizeof(float)) &&
         norm_act_.allocate(activation_bytes(c_.max_tokens, whole_rows(norm_act_, c_.hidden))) &&
         attention_act_.allocate(activation_bytes(
             c_.max_tokens, activations(attention_act_, c_.num_heads * c_.head_dim))) &&
         mlp_act_.allocate(
             activation_bytes(c_.max_tokens, activations(mlp_act_, c_.intermediate))) &&
         scratch_.allocate(scratch_floats() * sizeof(float) * c_.num_threads);
  if (!allocated) return false;
  std::vector<uint8_t*> pools;
  for (int layer = 0; layer < c_.num_layers; ++layer)
    pools.push_back(kv_pool<uint8_t>(layer));
  kv_pages_.start(std::move(pools), layer_kv_bytes());
  return true;
}

// Attention scratch, and the outputs of an item's rows.
size_t Model::scratch_floats() const {
  const int rows = kQueryTile * (c_.num_heads / c_.num_kv_heads);
  return AttentionScratch::floats(rows, c_.head_dim) + static_cast<size_t>(rows) * c_.head_dim;
}

Activations Model::activations(const Buffer& buffer, int k) const {
  Activations a;
  a.data = buffer.data.get();
  a.num_blocks = k / kBlock;
  a.dense = c_.dense != 0;
  return a;
}

Activations Model::whole_rows(const Buffer& buffer, int k) const {
  Activations a = activations(buffer, k);
  a.refined = !a.dense;
  return a;
}

int Model::set_linear(int layer, int which, Kind kind, int n, int k, const uint8_t* weight,
                      size_t row_bytes, const float* bias) {
  const int q = c_.num_heads * c_.head_dim, kv = c_.num_kv_heads * c_.head_dim;
  const int h = c_.hidden, m = c_.intermediate;
  const int shapes[][2] = {{q, h}, {kv, h}, {kv, h}, {h, q}, {m, h}, {m, h}, {h, m},
                           {c_.vocab, h}, {c_.vocab, h}};
  if (which < 0 || which > PACELINE_HEAD || n != shapes[which][0] || k != shapes[which][1] ||
      is_dense(kind) != (c_.dense != 0) ||
      (which < PACELINE_EMBEDDING && (layer < 0 || layer >= c_.num_layers)))
    return PACELINE_BAD_SHAPE;
  Linear& w = which == PACELINE_EMBEDDING ? embedding_
              : which == PACELINE_HEAD    ? head_
                                          : layers_[layer].linears[which];
  if (w.tiles) return PACELINE_BAD_SHAPE;
  w.kind = kind;
  w.spread = which == PACELINE_HEAD && kind == Kind::kQ8_0;
  w.n = n;
  w.k = k;
  const size_t bytes = w.tile_bytes() * w.num_tiles();
  if (weights_used_ + bytes > weights_.size) return PACELINE_NO_MEMORY;
  uint8_t* tiles = weights_.data.get() + weights_used_;
  weights_used_ += bytes;
  team_.run([w, weight, row_bytes, tiles](Phases& phases) {
    phases.each(w.num_tiles(), [&](int t) {
      pack_tile(w, t, weight, row_bytes, tiles + t * w.tile_bytes());
    });
  });
  if (bias) {
    biases_.emplace_back(w.num_tiles() * kTile, 0.0f);
    std::copy(bias, bias + n, biases_.back().begin());
    w.bias = biases_.back().data();
  }
  w.tiles = tiles;
  return 0;
}

int Model::set_norm(int layer, int which, const float* weight) {
  if (which == PACELINE_FINAL_NORM) {
    final_norm_.assign(weight, weight + c_.hidden);
    return 0;
  }
  if (which < 0 || which > PACELINE_K_NORM || layer < 0 || layer >= c_.num_layers)
    return PACELINE_BAD_SHAPE;
  const bool per_head = which == PACELINE_Q_NORM || which == PACELINE_K_NORM;
  layers_[layer].norms[which].assign(weight, weight + (per_head ? c_.head_dim : c_.hidden));
  return 0;
}

bool Model::complete() const {
  const auto ready = [](const Layer& layer) {
    return std::all_of(std::begin(layer.linears), std::end(layer.linears),
                       [](const Linear& w) { return w.tiles != nullptr; }) &&
           !layer.norms[PACELINE_ATTENTION_NORM].empty() && !layer.norms[PACELINE_MLP_NORM].empty();
  };
  return head_.tiles && !final_norm_.empty() &&
         std::all_of(layers_.begin(), layers_.end(), ready);
}

}  // namespace paceline
