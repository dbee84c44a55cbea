// Which parts a step's attention is computed in, and in what order: planned once per step, the same for every layer.
//
//     sequence s, KV head k:  rows = query tokens × query heads that share the KV head, numbered token by token
//
//         keys →   segment 0     segment 1     segment 2
//     rows 0 … a  │■■■■■■■■■■■■│■■■■■■■■■■■■│■■■          one item: some rows against all the keys that they see,
//     rows a … b  │■■■■■■■■■■■■│■■■■■■■■■■■■│■■■■■■       or, where an item is so long that threads would wait for
//                                                          it, one item per segment, and a merge
//
// Segments are counted from the sequence's first key and each is summed on its own, so a row's result is the same to the
// last bit whoever computes what. With a sliding window an item begins with the first key that its first row sees; what
// lies before that is not touched, as its blocks may be another sequence's by now.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "threads.h"

struct AttentionTile {
  int64_t width;  // lanes of a vector
  int64_t rows;   // of a register tile, at most
};

// Keys in the order in which they are read: vectors of at most `width` keys, each of one block.
struct KeyOrder {
  int64_t block_size;
  int64_t width;
  int64_t vectors_per_block() const { return (block_size + width - 1) / width; }
  int64_t first_key(int64_t vector) const {
    return vector / vectors_per_block() * block_size + vector % vectors_per_block() * width;
  }
  int64_t vector_of(int64_t key) const { return key / block_size * vectors_per_block() + key % block_size / width; }
};

// Lanes of a chunk: its scores, of one register tile, stay in the first-level cache. Of 64, 128 and 256 a prefill chunk
// of 512 in 4096 (D = 64) ran at 312, 323 and 341 GFLOP/s on one Zen 5 core; decodes did not differ.
constexpr int64_t CHUNK = 256;
constexpr int64_t SEGMENT = 2 * CHUNK;

// A row of partial results: its sums, its maximum and the sum of its weights.
inline int64_t partial_floats(int64_t head_size) { return head_size + 2; }

inline int64_t segment_of(const KeyOrder& order, int64_t key) {
  return order.vector_of(key) / (SEGMENT / order.width);
}

// The first key that a row at a position sees, and the end of those that it sees.
inline int64_t first_visible(int64_t position, int64_t window) {
  return window < 0 ? position / window * window : std::max<int64_t>(0, position + 1 - window);
}
inline int64_t end_visible(int64_t position, int64_t window, bool is_causal, int64_t seq_len) {
  return is_causal ? position + 1 : std::min(seq_len, position + window);
}

// Rows of an item: what share one pass over the keys. Their sums stay in the second-level cache.
constexpr int64_t ITEM_FLOATS = 16384;
constexpr int64_t ITEM_ROWS = 240;

inline int64_t item_rows(const AttentionTile& tile, int64_t head_size) {
  return std::max<int64_t>(1, std::min(ITEM_ROWS, ITEM_FLOATS / head_size) / tile.rows) * tile.rows;
}

// Reading a key and its value from memory takes as long as computing about 8 rows with them.
inline int64_t item_cost(int64_t rows, int64_t keys) { return (rows + 8) * (keys + 32); }

struct PlannedItem {
  AttentionItem item;
  int64_t cost;
};

// 1. Cut the rows of each sequence and KV head into items.
inline std::vector<PlannedItem> items_of_rows(const PlanCall& call, int64_t most_rows) {
  std::vector<PlannedItem> items;
  const int64_t group = call.heads / call.kv_heads;
  for (int64_t sequence = 0; sequence < call.sequences; sequence++) {
    const int64_t query_len = call.query_start_loc[sequence + 1] - call.query_start_loc[sequence];
    const int64_t context = call.seq_lens[sequence] - query_len, rows = query_len * group;
    for (int64_t first = 0; first < rows; first += most_rows) {
      const int64_t count = std::min(most_rows, rows - first);
      // Of several tokens' rows, half see less than the last one does: the mean is near enough.
      const int64_t middle = context + (first + count / 2) / group;
      const int64_t keys = end_visible(middle, call.window, call.is_causal != 0, call.seq_lens[sequence]) -
                           first_visible(middle, call.window);
      for (int64_t kv_head = 0; kv_head < call.kv_heads; kv_head++)
        items.push_back({{static_cast<int32_t>(sequence), static_cast<int32_t>(kv_head), static_cast<int32_t>(first),
                          static_cast<int32_t>(count), -1, -1},
                         item_cost(count, keys)});
    }
  }
  return items;
}

// 2. Split those that would keep one thread busy when the others are done. Returns the merges that follow.
inline std::vector<AttentionItem> split_long_items(const PlanCall& call, const KeyOrder& order,
                                                   std::vector<PlannedItem>& items, AttentionPlan& plan) {
  std::vector<AttentionItem> merges;
  int64_t total = 0;
  for (const PlannedItem& planned : items) total += planned.cost;
  const int64_t threads = pool().threads(), longest = total / (4 * threads) + 1;
  if (threads == 1) return merges;
  std::vector<PlannedItem> result;
  for (const PlannedItem& planned : items) {
    AttentionItem item = planned.item;
    const int64_t query_len = call.query_start_loc[item.sequence + 1] - call.query_start_loc[item.sequence];
    const int64_t group = call.heads / call.kv_heads, context = call.seq_lens[item.sequence] - query_len;
    const int64_t first = segment_of(order, first_visible(context + item.first_row / group, call.window));
    const int64_t end = end_visible(context + (item.first_row + item.rows - 1) / group, call.window,
                                    call.is_causal != 0, call.seq_lens[item.sequence]);
    const int64_t last = segment_of(order, end - 1);
    const int64_t segments = last - first + 1;
    if (planned.cost <= longest || segments == 1) {
      result.push_back(planned);
      continue;
    }
    item.segment = static_cast<int32_t>(segments);
    item.partial = static_cast<int32_t>(plan.partials);
    merges.push_back(item);
    for (int64_t segment = first; segment <= last; segment++) {
      item.segment = static_cast<int32_t>(segment);
      item.partial = static_cast<int32_t>(plan.partials);
      result.push_back({item, planned.cost / segments});
      plan.partials += item.rows;
    }
  }
  items.swap(result);
  return merges;
}

// 3. Longest first, and bundled so that short ones are not dealt out one by one: threads take the next bundle as they
//    become free, which also makes up for one that is slowed down by other processes.
inline std::vector<int32_t> bundle_items(std::vector<PlannedItem>& items) {
  std::stable_sort(items.begin(), items.end(),
                   [](const PlannedItem& a, const PlannedItem& b) { return a.cost > b.cost; });
  int64_t total = 0, bundled = 0;
  for (const PlannedItem& planned : items) total += planned.cost;
  const int64_t enough = total / (16 * pool().threads());
  std::vector<int32_t> ends;
  for (size_t i = 0; i < items.size(); i++) {
    bundled += items[i].cost;
    if (bundled < enough && i + 1 < items.size()) continue;
    ends.push_back(static_cast<int32_t>(i + 1));
    bundled = 0;
  }
  return ends;
}

inline int64_t plan_attention(const PlanCall& call, const AttentionTile& tile) {
  AttentionPlan plan{};
  std::vector<PlannedItem> items = items_of_rows(call, item_rows(tile, call.head_size));
  const std::vector<AttentionItem> merges = split_long_items(call, {call.block_size, tile.width}, items, plan);
  const std::vector<int32_t> ends = bundle_items(items);
  plan.items = static_cast<int64_t>(items.size());
  plan.bundles = static_cast<int64_t>(ends.size());
  plan.merges = static_cast<int64_t>(merges.size());
  plan.partials *= partial_floats(call.head_size);  // counted in rows so far
  const size_t item_bytes = sizeof(AttentionItem);
  const size_t bytes = sizeof(plan) + (items.size() + merges.size()) * item_bytes + ends.size() * sizeof(int32_t);
  if (static_cast<int64_t>(bytes) > call.capacity) return static_cast<int64_t>(bytes);
  char* out = static_cast<char*>(call.plan);
  std::memcpy(out, &plan, sizeof(plan));
  out += sizeof(plan);
  for (const PlannedItem& planned : items) {
    std::memcpy(out, &planned.item, item_bytes);
    out += item_bytes;
  }
  std::copy(ends.begin(), ends.end(), reinterpret_cast<int32_t*>(out));
  std::copy(merges.begin(), merges.end(), reinterpret_cast<AttentionItem*>(out + ends.size() * sizeof(int32_t)));
  return static_cast<int64_t>(bytes);
}
