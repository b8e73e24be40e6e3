// A step's batch: checked once before it runs, cut into attention items; and copies of KV blocks.
#include <algorithm>

#include "model.h"

namespace paceline {

constexpr int kBlocksAhead = 128;  // a second's work or so, and none before the first are nearly full

bool Model::valid(const paceline_batch& b) const {
  if (b.num_tokens < 0 || b.num_tokens > c_.max_tokens || b.num_rows < 0 ||
      b.table_stride < 0 || b.row_starts[0] != 0 ||
      b.row_starts[b.num_rows] != b.num_tokens || b.num_outputs < (b.num_tokens > 0) ||
      b.num_outputs > b.num_tokens)
    return false;
  for (int i = 0; i < b.num_outputs; ++i)
    if (b.outputs[i] <= (i ? b.outputs[i - 1] : -1) || b.outputs[i] >= b.num_tokens) return false;
  for (int i = 0; i < b.num_tokens; ++i)
    if (b.token_ids[i] < 0 || b.token_ids[i] >= c_.vocab || b.positions[i] < 0 ||
        b.positions[i] >= c_.max_positions)
      return false;
  for (int row = 0; row < b.num_rows; ++row) {
    const int first = b.row_starts[row], last = b.row_starts[row + 1] - 1;
    if (first > last || last >= b.num_tokens) return false;
    for (int i = first; i < last; ++i)
      if (b.positions[i + 1] != b.positions[i] + 1) return false;
    const int num_blocks = b.positions[last] / c_.block_size + 1;
    if (num_blocks > b.table_stride) return false;
    const int32_t* table = b.block_tables + static_cast<size_t>(row) * b.table_stride;
    // blocks that lie wholly before the window are never read
    const int seen = widest_window_ ? std::max(0, b.positions[first] + 1 - widest_window_) : 0;
    for (int i = seen / c_.block_size; i < num_blocks; ++i)
      if (table[i] < 0 || table[i] >= c_.num_blocks) return false;
  }
  return true;
}

StepSizes Model::plan_attention(const paceline_batch& b) {
  StepSizes sizes{b.num_tokens, 0, b.num_outputs, 0};
  const auto add_heads = [&](AttentionItem* items, int& size, AttentionItem item) {
    for (; item.kv_head < c_.num_kv_heads; ++item.kv_head) items[size++] = item;
  };
  int output = 0;
  for (int row = 0; row < b.num_rows; ++row) {
    const int end = b.row_starts[row + 1];
    std::fill(&token_rows_[b.row_starts[row]], &token_rows_[end - 1] + 1, row);
    for (int token = b.row_starts[row]; token < end; token += kQueryTile)
      add_heads(items_.data(), sizes.items,
                {row, token, token, std::min(kQueryTile, end - token), 0});
    while (output < b.num_outputs && b.outputs[output] < end) {
      const int32_t* run = b.outputs + output;  // of adjacent tokens
      const int most = std::min({kQueryTile, b.num_outputs - output, end - run[0]});
      int count = 1;
      while (count < most && run[count] == run[0] + count) ++count;
      add_heads(output_items_.data(), sizes.output_items, {row, run[0], output, count, 0});
      output += count;
    }
  }
  return sizes;
}

// Blocks come in ascending order while there are any that were never used.
void Model::expect_blocks(const paceline_batch& b) {
  int last = 0;
  for (int row = 0; row < b.num_rows; ++row) {
    const int block = b.positions[b.row_starts[row + 1] - 1] / c_.block_size;
    last = std::max(last, b.block_tables[static_cast<size_t>(row) * b.table_stride + block]);
  }
  kv_pages_.want(kv_.block_bytes(c_.kv_kind) * (last + kBlocksAhead));
}

int Model::forward(const paceline_batch& batch, float* hidden) {
  if (!complete()) return PACELINE_INCOMPLETE;
  if (!valid(batch)) return PACELINE_BAD_BATCH;
  if (batch.num_tokens == 0) return 0;
  const StepSizes sizes = plan_attention(batch);
  expect_blocks(batch);
  batch_ = batch;
  hidden_out_ = hidden;
  run_timed([this, sizes](Phases& phases) { step(phases, sizes); });
  return 0;
}

int Model::copy_blocks(const int32_t* pairs, int num_pairs) {
  const size_t bytes = kv_.block_bytes(c_.kv_kind);
  for (int i = 0; i < 2 * num_pairs; ++i)
    if (pairs[i] < 0 || pairs[i] >= c_.num_blocks) return PACELINE_BAD_BATCH;
  for (int i = 0; i < num_pairs; ++i) {
    const size_t from = pairs[2 * i], to = pairs[2 * i + 1];
    if (from == to) continue;
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      uint8_t* base = kv_pool<uint8_t>(layer);
      std::memcpy(base + to * bytes, base + from * bytes, bytes);
    }
  }
  return 0;
}

}  // namespace paceline
