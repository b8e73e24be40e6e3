// One step through the model: the phases of a layer, spread over the team.
//
// Eight phases a layer, each cut into tasks that any thread may take; a task writes memory that no
// other task of its phase touches, and sums in an order that depends on its own rows only.
#include <algorithm>

#include "model.h"

namespace paceline {
namespace {

constexpr int kChunkPanels = 16;  // rows of a GEMM task: 128, so activations stay in the L2 cache
constexpr int kManyTokens = 64;

enum PhaseKind { kEmbed, kNorm, kQkv, kRope, kAttention, kOutput, kMlp, kDown, kHead };

// Gives x / sqrt(square + eps) * weight to put(i, values i .. i + 31), where square is the mean of x^2.
// All are nan where it is not finite: a row that overflows must fail, not turn into zeros.
template <class Put>
void rms_norm(const float* x, float square, const std::vector<float>& weight, float eps,
              const Put& put) {
  const int n = static_cast<int>(weight.size());
  const F16 inverse = splat(1.0f / std::sqrt(square + eps) + (square - square));
  for (int i = 0; i < n; i += kBlock) {
    float y[kBlock];
    for (int j = 0; j < kBlock; j += kLanes)
      store(y + j, load(x + i + j) * inverse * load(&weight[i + j]));
    put(i, y);
  }
}

// As row `row` of `out`.
void rms_norm_rounded(const float* x, const std::vector<float>& weight, float eps,
                      const Activations& out, int row) {
  const int n = static_cast<int>(weight.size());
  F16 sum = splat(0.0f), weighed = splat(0.0f);
  for (int i = 0; i < n; i += kLanes) {
    const F16 v = load(x + i), y = v * load(&weight[i]);
    sum = fma(v, v, sum);
    weighed = fma(y, y, weighed);
  }
  const float square = reduce_add(sum) / static_cast<float>(n);
  const float weighed_square = reduce_add(weighed) / static_cast<float>(n);
  const float limit = kOutlier * std::sqrt(weighed_square / (square + eps));
  rms_norm(x, square, weight, eps,
           [&](int i, const float* y) { out.put_refined(row, i / kBlock, y, limit); });
}

void rms_norm_in_place(float* x, const std::vector<float>& weight, float eps) {
  const float square = mean_square(x, static_cast<int>(weight.size()));
  rms_norm(x, square, weight, eps,
           [&](int i, const float* y) { std::memcpy(x + i, y, sizeof(float) * kBlock); });
}

// Rotates pairs (i, i + half) of the first 2 * half dims.
void rotate(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

F16 silu_times(F16 gate, F16 up) { return gate / (splat(1.0f) + exp(splat(0.0f) - gate)) * up; }

// body(token) for all tokens. A task is a whole panel of activations, or of a prefill two, which is
// a tile of keys: threads that wrote neighbouring tokens would fight for cache lines.
template <class Body>
void each_token(Phases& phases, int tokens, const Body& body) {
  const int size = tokens < kManyTokens ? kPanel : 2 * kPanel;
  phases.each((tokens + size - 1) / size, [&](int task) {
    for (int t = task * size; t < std::min((task + 1) * size, tokens); ++t) body(t);
  });
}

// How a product of `rows` rows is cut: chunks of rows, and groups of adjacent tiles. If there are two
// panels for each thread, a thread has rows of its own, in all phases: what another core wrote is far
// away. Fewer share one reading of the weights.
class Cut {
 public:
  Cut(int rows, int tiles, int threads) : tiles_(tiles) {
    panels_ = (rows + kPanel - 1) / kPanel;
    // a panel with a few rows takes longer than they would in a full one
    work_ = rows + std::min(2, panels_ * kPanel - rows);
    num_chunks_ = (panels_ + kChunkPanels - 1) / kChunkPanels;
    if (panels_ >= 2 * threads) num_chunks_ = (num_chunks_ + threads - 1) / threads * threads;
    // enough to even out the threads; but taking one costs as much as some tiles of a few rows
    const int per_thread = rows <= 4 ? 2 : rows <= 32 ? 3 : 6;
    const int tasks = std::max(1, threads * per_thread / num_chunks_);
    group_ = std::max(1, tiles / tasks);
    num_groups_ = (tiles + group_ - 1) / group_;
  }
  int num_tasks() const { return num_chunks_ * num_groups_; }
  // Calls body(tile, first panel, last panel) for all of a task's tiles.
  template <class Body>
  void each(int task, const Body& body) const {
    const int chunk = task / num_groups_, first = task % num_groups_ * group_;
    for (int tile = first; tile < std::min(first + group_, tiles_); ++tile)
      body(tile, first_panel(chunk, tile), first_panel(chunk + 1, tile));
  }

 private:
  // Chunks have the same work. Where that ends within a panel, the panel belongs to the chunk before
  // for as much of the tiles.
  int first_panel(int chunk, int tile) const {
    if (chunk == num_chunks_) return panels_;
    const int64_t before = int64_t{work_} * tiles_ * chunk / num_chunks_, all = int64_t{kPanel} * tiles_;
    return static_cast<int>(before / all) + (tile * kPanel < before % all);
  }

  int tiles_, panels_, work_, num_chunks_, group_, num_groups_;
};

int rows_of(int panel, int rows) { return std::min(kPanel, rows - panel * kPanel); }

// The next tile, while panels are multiplied with this one. A few rows take no longer than reading the
// weights, and there the hardware fetches far enough ahead.
Ahead next_tile(const Linear& w, int tile, int num_panels, int rows) {
  return rows < kPanel ? Ahead() : Ahead(w, tile, num_panels);
}

// epilogue(tile, row, 32 outputs) for every tile and row.
template <class Epilogue>
void product(Phases& phases, int threads, const Linear& w, const Activations& a, int rows,
             const Epilogue& epilogue) {
  const Cut cut(rows, w.num_tiles(), threads);
  phases.each(cut.num_tasks(), [&](int task) {
    cut.each(task, [&](int tile, int begin, int end) {
      Ahead ahead = next_tile(w, tile, end - begin, rows);
      for (int panel = begin; panel < end; ++panel) {
        alignas(64) float out[kPanel][kTile];
        const int n = rows_of(panel, rows);
        multiply(w, tile, a, panel, n, ahead, out);
        for (int r = 0; r < n; ++r) epilogue(tile, panel * kPanel + r, out[r]);
      }
    });
  });
}

}  // namespace

void Model::mark(const Phases& phases, int kind) {
  if (phases.thread() == 0) marked_.resize(phases.num_done(), kind);
}

// A phase lasts from the end of the one before it, whichever threads that were: on a busy machine
// the calling thread may have slept through some.
void Model::run_timed(Team::Work work) {
  marked_.clear();
  uint64_t last = Team::now_ns();
  team_.run(std::move(work));
  for (size_t i = 0; i < marked_.size(); ++i) {
    const bool is_last = i + 1 == marked_.size();
    const uint64_t ended = is_last ? Team::now_ns() : team_.ended_ns(static_cast<int>(i));
    if (ended <= last) continue;  // had no task, or its last thread has not said so yet
    phase_ns_[marked_[i]] += ended - last;
    last = ended;
  }
}

void Model::profile(uint64_t* out) {
  std::copy(std::begin(phase_ns_), std::end(phase_ns_), out);
  std::fill(std::begin(phase_ns_), std::end(phase_ns_), 0);
}

void Model::embed(int token) {
  unpack_row(embedding_.tiles ? embedding_ : head_, batch_.token_ids[token],
             hidden_.as<float>() + static_cast<size_t>(token) * c_.hidden);
}

// The sizes come as arguments since a thread may be late, when the next batch is there.
void Model::step(Phases& phases, StepSizes sizes) {
  each_token(phases, sizes.tokens, [&](int token) { embed(token); });
  mark(phases, kEmbed);
  for (int layer = 0; layer < c_.num_layers; ++layer) layer_step(phases, layer, sizes);
  each_token(phases, sizes.outputs, [&](int i) {
    rms_norm_in_place(hidden_out_ + static_cast<size_t>(i) * c_.hidden, final_norm_, c_.norm_eps);
  });
  mark(phases, kNorm);
}

int Model::logits(const float* hidden, int rows, float* logits) {
  if (!complete()) return PACELINE_INCOMPLETE;
  if (rows < 0 || rows > c_.max_tokens) return PACELINE_BAD_BATCH;
  if (rows == 0) return 0;
  run_timed([=](Phases& phases) {
    const Activations a = whole_rows(norm_act_, c_.hidden);
    each_token(phases, rows, [&](int row) {
      const size_t first = static_cast<size_t>(row) * c_.hidden;
      const float* x = hidden + first;
      if (head_.spread) {
        spread(x, c_.hidden, hidden_.as<float>() + first);
        x = hidden_.as<float>() + first;
      }
      a.put_row(row, x);
    });
    product(phases, team_.size(), head_, a, rows, [&](int tile, int row, const float* out) {
      const size_t n = std::min(kTile, c_.vocab - tile * kTile);
      std::memcpy(logits + static_cast<size_t>(row) * c_.vocab + tile * kTile, out, n * sizeof *out);
    });
    mark(phases, kHead);
  });
  return 0;
}

void Model::layer_step(Phases& phases, int index, StepSizes sizes) {
  const Layer& layer = layers_[index];
  const int threads = team_.size();
  const bool is_last = index + 1 == c_.num_layers;
  const int rows = is_last ? sizes.outputs : sizes.tokens;  // from the attention's results on
  float* const before = hidden_.as<float>();
  float* const after = is_last ? hidden_out_ : before;
  const Activations normed = whole_rows(norm_act_, c_.hidden);
  const Activations attended = activations(attention_act_, c_.num_heads * c_.head_dim);
  const Activations gated = activations(mlp_act_, c_.intermediate);
  const auto norm = [&](const float* hidden, int count, int which) {
    each_token(phases, count, [&](int t) {
      rms_norm_rounded(hidden + static_cast<size_t>(t) * c_.hidden, layer.norms[which], c_.norm_eps,
                       normed, t);
    });
    mark(phases, kNorm);
  };
  const auto at = [&](int row, int tile) { return static_cast<size_t>(row) * c_.hidden + tile * kTile; };
  const auto add = [](const float* x, const float* more, float* sum) {
    for (int i = 0; i < kTile; i += kLanes) store(sum + i, load(x + i) + load(more + i));
  };

  norm(before, sizes.tokens, PACELINE_ATTENTION_NORM);
  project_qkv(phases, layer, normed, sizes.tokens);
  mark(phases, kQkv);
  each_token(phases, sizes.tokens, [&](int t) { rope_and_store(layer, index, t); });
  mark(phases, kRope);
  const AttentionItem* items = is_last ? output_items_.data() : items_.data();
  const int num_items = is_last ? sizes.output_items : sizes.items;
  phases.each(num_items, [&](int i) {
    const AttentionItem* next = i + 1 < num_items ? &items[i + 1] : nullptr;
    with_kv_type(c_.kv_kind,
                 [&](auto t) { attend_item<decltype(t)>(index, phases.thread(), items[i], next); });
  });
  mark(phases, kAttention);
  product(phases, threads, layer.linears[PACELINE_O], attended, rows,
          [&](int tile, int row, const float* out) {
            const int token = is_last ? batch_.outputs[row] : row;
            add(before + at(token, tile), out, after + at(row, tile));
          });
  mark(phases, kOutput);
  norm(after, rows, PACELINE_MLP_NORM);
  gate_and_up(phases, layer, normed, gated, rows);
  mark(phases, kMlp);
  product(phases, threads, layer.linears[PACELINE_DOWN], gated, rows,
          [&](int tile, int row, const float* out) {
            float* x = after + at(row, tile);
            add(x, out, x);
          });
  mark(phases, kDown);
}

// q, k and v side by side in one phase.
void Model::project_qkv(Phases& phases, const Layer& layer, const Activations& a, int tokens) {
  const Linear* parts[] = {&layer.linears[PACELINE_Q], &layer.linears[PACELINE_K],
                           &layer.linears[PACELINE_V]};
  const int q_tiles = parts[0]->num_tiles(), k_tiles = parts[1]->num_tiles();
  const int tiles = q_tiles + 2 * k_tiles;
  const Cut cut(tokens, tiles, team_.size());
  phases.each(cut.num_tasks(), [&](int task) {
    cut.each(task, [&](int tile, int begin, int end) {
      const int part = tile < q_tiles ? 0 : tile < q_tiles + k_tiles ? 1 : 2;
      const int before = part == 0 ? 0 : part == 1 ? q_tiles : q_tiles + k_tiles;
      Ahead ahead = next_tile(*parts[part], tile - before, end - begin, tokens);
      for (int panel = begin; panel < end; ++panel) {
        alignas(64) float out[kPanel][kTile];
        const int n = rows_of(panel, tokens);
        multiply(*parts[part], tile - before, a, panel, n, ahead, out);
        float* to = qkv_.as<float>() + static_cast<size_t>(panel) * kPanel * qkv_width() + tile * kTile;
        for (int r = 0; r < n; ++r)
          std::memcpy(to + static_cast<size_t>(r) * qkv_width(), out[r], sizeof out[r]);
      }
    });
  });
}

// silu(gate) * up; a tile of 32 columns is a block of the next activations.
static_assert(kTile == kBlock);
void Model::gate_and_up(Phases& phases, const Layer& layer, const Activations& a,
                        const Activations& gated, int tokens) {
  const Linear& gate = layer.linears[PACELINE_GATE];
  const Linear& up = layer.linears[PACELINE_UP];
  const int tiles = gate.num_tiles();
  const Cut cut(tokens, tiles, team_.size());
  phases.each(cut.num_tasks(), [&](int task) {
    cut.each(task, [&](int tile, int begin, int end) {
      Ahead next_gate = next_tile(gate, tile, end - begin, tokens);
      Ahead next_up = next_tile(up, tile, end - begin, tokens);
      for (int panel = begin; panel < end; ++panel) {
        alignas(64) float g[kPanel][kTile], u[kPanel][kTile];
        const int n = rows_of(panel, tokens);
        multiply(gate, tile, a, panel, n, next_gate, g);
        multiply(up, tile, a, panel, n, next_up, u);
        for (int r = 0; r < n; ++r)  // all before the first is rounded, which waits for its whole row
          for (int i = 0; i < kTile; i += kLanes)
            store(g[r] + i, silu_times(load(g[r] + i), load(u[r] + i)));
        for (int r = 0; r < n; ++r) gated.put(panel * kPanel + r, tile, g[r]);
      }
    });
  });
}

void Model::rope_and_store(const Layer& layer, int index, int token) {
  const paceline_batch& b = batch_;
  const int d = c_.head_dim, half_dim = c_.rotary_dim / 2, position = b.positions[token];
  const float* cos = &rope_cos_[static_cast<size_t>(position) * half_dim];
  const float* sin = &rope_sin_[static_cast<size_t>(position) * half_dim];
  const std::vector<float>& q_norm = layer.norms[PACELINE_Q_NORM];
  const std::vector<float>& k_norm = layer.norms[PACELINE_K_NORM];
  float* x = qkv_.as<float>() + static_cast<size_t>(token) * qkv_width();
  const F16 scale = splat(1.0f / std::sqrt(static_cast<float>(d)));
  for (int h = 0; h < c_.num_heads; ++h, x += d) {
    if (!q_norm.empty()) rms_norm_in_place(x, q_norm, c_.norm_eps);
    rotate(x, cos, sin, half_dim);
    for (int i = 0; i < d; i += kLanes) store(x + i, load(x + i) * scale);
  }
  const int row = token_rows_[token];
  const int block = b.block_tables[static_cast<size_t>(row) * b.table_stride + position / c_.block_size];
  const int i = position % c_.block_size;
  for (int h = 0; h < c_.num_kv_heads; ++h, x += d) {
    if (!k_norm.empty()) rms_norm_in_place(x, k_norm, c_.norm_eps);
    rotate(x, cos, sin, half_dim);
    const float* v = x + c_.num_kv_heads * d;
    with_kv_type(c_.kv_kind, [&](auto t) {
      using T = decltype(t);
      store_kv(x, v, d, i, kv_pool<T>(index) + kv_.tile_offset<T>(block, h, i));
    });
  }
}

template <class T>
HeadKv<T> Model::head_kv(int index, const AttentionItem& item) const {
  return {kv_pool<T>(index), kv_, item.kv_head,
          batch_.block_tables + static_cast<size_t>(item.row) * batch_.table_stride};
}

// The positions that query token `token` sees.
Span Model::seen(int index, int token) const {
  const int last = batch_.positions[token] + 1, window = layers_[index].window;
  return {window ? std::max(0, last - window) : 0, last};
}

// The range that an item begins with.
template <class T>
RangePieces<T> Model::first_pieces(int index, const AttentionItem& item) const {
  const int first = seen(index, item.token).first, last = seen(index, item.token + item.count - 1).last;
  return {head_kv<T>(index, item).tiles(first / kRange * kRange, first, last), c_.head_dim};
}

template <class T>
void Model::attend_item(int index, int thread, const AttentionItem& item,
                        const AttentionItem* next) {
  const int group = c_.num_heads / c_.num_kv_heads, d = c_.head_dim;
  const int max_rows = kQueryTile * group, num_rows = item.count * group;
  float* memory = scratch_.as<float>() + scratch_floats() * thread;
  const AttentionScratch scratch(memory, max_rows, d);
  float* out = memory + AttentionScratch::floats(max_rows, d);
  QueryRow rows[kQueryTile * kMaxHeadsPerKv];
  for (int r = 0; r < num_rows; ++r) {
    const int token = item.token + r / group, head = item.kv_head * group + r % group;
    const Span span = seen(index, token);
    rows[r] = {qkv_.as<float>() + static_cast<size_t>(token) * qkv_width() + head * d,
               out + static_cast<size_t>(r) * d, span.first, span.last};
  }
  const HeadKv<T> kv = head_kv<T>(index, item);
  if (next) {
    const RangePieces<T> pieces = first_pieces<T>(index, *next);
    attend(rows, num_rows, kv, scratch, pieces.fetch());
  } else {
    attend(rows, num_rows, kv, scratch, Fetch());
  }
  const Activations attended = activations(attention_act_, c_.num_heads * d);
  for (int r = 0; r < num_rows; ++r) {
    const int head = item.kv_head * group + r % group;
    for (int i = 0; i < d; i += kBlock)
      attended.put(item.to + r / group, (head * d + i) / kBlock, rows[r].out + i);
  }
}

}  // namespace paceline
