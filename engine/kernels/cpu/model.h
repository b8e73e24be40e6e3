// A decoder-only transformer on the CPU: its weights, KV pool, workspaces, and one step through it.
// Everything is allocated when the model is created; a step allocates nothing.
#pragma once

#include <memory>
#include <vector>

#include "api.h"
#include "attention.h"
#include "linear.h"
#include "pages.h"
#include "sampling.h"
#include "team.h"

namespace paceline {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
enum class Pages { kHuge, kSmall };  // huge spare TLB misses; small grow with what is touched

struct Buffer {
  std::unique_ptr<uint8_t, FreeDeleter> data;
  size_t size = 0;
  bool allocate(size_t bytes, Pages pages = Pages::kHuge);
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data.get());
  }
};

struct Layer {
  int window = 0;  // positions a query sees, 0 = all
  Linear linears[PACELINE_DOWN + 1];
  std::vector<float> norms[PACELINE_K_NORM + 1];  // empty: absent
};

// `count` query tokens of a row from `token` on, for one KV head. Their results are tokens `to` and
// on of what the layer goes on with.
struct AttentionItem {
  int row, token, to, count, kv_head;
};

// The sizes of a step. In its last layer only the outputs go on after their keys and values are there.
struct StepSizes {
  int tokens, items, outputs, output_items;
};

constexpr int kQueryTile = 16;     // query tokens of an attention item
constexpr int kMaxHeadsPerKv = 16;  // query heads that share a KV head
constexpr int kNumPhaseKinds = 9;

class Model {
 public:
  Model(const paceline_config& config, const float* rope_cos, const float* rope_sin,
        const int32_t* layer_windows);
  static bool supported(const paceline_config& config);
  bool allocate();

  int set_linear(int layer, int which, Kind kind, int n, int k, const uint8_t* weight,
                 size_t row_bytes, const float* bias);
  int set_norm(int layer, int which, const float* weight);
  int forward(const paceline_batch& batch, float* hidden);
  int logits(const float* hidden, int rows, float* logits);
  int choose(const paceline_choice& choice) { return sampling_.choose(team_, choice); }
  int copy_blocks(const int32_t* pairs, int num_pairs);
  void profile(uint64_t* out);

 private:
  bool complete() const;
  bool valid(const paceline_batch& batch) const;
  StepSizes plan_attention(const paceline_batch& batch);
  void expect_blocks(const paceline_batch& batch);
  void step(Phases& phases, StepSizes sizes);
  void layer_step(Phases& phases, int layer, StepSizes sizes);
  void embed(int token);
  void project_qkv(Phases& phases, const Layer& layer, const Activations& normed, int tokens);
  void gate_and_up(Phases& phases, const Layer& layer, const Activations& normed,
                   const Activations& gated, int tokens);
  void rope_and_store(const Layer& layer, int index, int token);
  template <class T>
  void attend_item(int layer, int thread, const AttentionItem& item, const AttentionItem* next);
  template <class T>
  HeadKv<T> head_kv(int layer, const AttentionItem& item) const;
  template <class T>
  RangePieces<T> first_pieces(int layer, const AttentionItem& item) const;
  Span seen(int layer, int token) const;
  // Activations of a whole row at a time, which are refined; of parts of rows, which are not.
  Activations whole_rows(const Buffer& buffer, int k) const;
  Activations activations(const Buffer& buffer, int k) const;
  size_t scratch_floats() const;  // of one thread
  int qkv_width() const { return (c_.num_heads + 2 * c_.num_kv_heads) * c_.head_dim; }
  size_t layer_kv_bytes() const { return kv_.block_bytes(c_.kv_kind) * c_.num_blocks; }
  template <class T>
  T* kv_pool(int layer) const {
    return reinterpret_cast<T*>(kv_pool_.data.get() + layer_kv_bytes() * layer);
  }
  // A run of the team whose phases are timed; mark() tells what the last ones were.
  void run_timed(Team::Work work);
  void mark(const Phases& phases, int kind);

  const paceline_config c_;
  const KvShape kv_;
  std::vector<float> rope_cos_, rope_sin_;  // [max_positions][rotary_dim / 2]
  std::vector<Layer> layers_;
  int widest_window_ = 0;  // 0 if any layer sees everything
  Linear embedding_, head_;
  std::vector<float> final_norm_;
  std::vector<std::vector<float>> biases_;
  Buffer weights_;
  size_t weights_used_ = 0;
  Buffer kv_pool_;       // keys and values, layer by layer
  PagesAhead kv_pages_;
  Buffer hidden_;        // [max_tokens][hidden] fp32 residual stream
  Buffer qkv_;           // [max_tokens][q, k, v] fp32
  Buffer norm_act_, attention_act_, mlp_act_;  // activations of the next linear
  Buffer scratch_;       // per thread, for attention
  std::vector<AttentionItem> items_, output_items_;  // of the layers but the last, and of the last
  std::vector<int> token_rows_;  // [max_tokens] the row of each token
  paceline_batch batch_ = {};  // the step that runs
  float* hidden_out_ = nullptr;
  uint64_t phase_ns_[kNumPhaseKinds] = {};
  std::vector<int> marked_;  // kind of each phase so far; thread 0's
  Sampling sampling_;
  Team team_;
};

}  // namespace paceline
