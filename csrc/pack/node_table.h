// SPDX-License-Identifier: Apache-2.0
// Indices of nodes by a radix node's id.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pat {

inline constexpr int32_t kNoNode = -1;

// Open addressing, at most half full. Cleared, not made, for every batch: it keeps its memory.
class NodeTable {
 public:
  NodeTable() { clear(); }

  void clear() {
    nodes_.assign(std::max(nodes_.size(), kFirstSlots), kNoNode);
    keys_.resize(nodes_.size());
    count_ = 0;
  }

  // The node of `key`, or kNoNode.
  int32_t find(int64_t key) const { return nodes_[slot_of(key)]; }

  // Forgets `key`, which must be there. What a search for another key would have passed here moves
  // up, so that no search ends at the gap.
  void erase(int64_t key) {
    const size_t mask = nodes_.size() - 1;
    size_t gap = slot_of(key);
    nodes_[gap] = kNoNode;
    --count_;
    for (size_t slot = (gap + 1) & mask; nodes_[slot] != kNoNode; slot = (slot + 1) & mask) {
      const size_t home = home_of(keys_[slot]);
      if (((slot - home) & mask) < ((slot - gap) & mask)) continue;
      keys_[gap] = keys_[slot];
      nodes_[gap] = std::exchange(nodes_[slot], kNoNode);
      gap = slot;
    }
  }

  // The node of `key`; enters `node_if_new` and returns kNoNode if there was none.
  int32_t find_or_add(int64_t key, int32_t node_if_new) {
    const size_t slot = slot_of(key);
    if (nodes_[slot] != kNoNode) return nodes_[slot];
    keys_[slot] = key;
    nodes_[slot] = node_if_new;
    if (++count_ * 2 > nodes_.size()) grow();
    return kNoNode;
  }

 private:
  static constexpr size_t kFirstSlots = 256;

  // Where a search for `key` begins. Ids are small consecutive integers.
  size_t home_of(int64_t key) const {
    const uint64_t x = static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15ull;
    return static_cast<size_t>(x ^ (x >> 29)) & (nodes_.size() - 1);
  }

  // The one that holds `key`, or is free for it.
  size_t slot_of(int64_t key) const {
    const size_t mask = nodes_.size() - 1;
    size_t slot = home_of(key);
    while (nodes_[slot] != kNoNode && keys_[slot] != key) slot = (slot + 1) & mask;
    return slot;
  }

  void grow() {
    const std::vector<int64_t> keys = std::exchange(keys_, std::vector<int64_t>(2 * keys_.size()));
    const std::vector<int32_t> nodes =
        std::exchange(nodes_, std::vector<int32_t>(keys_.size(), kNoNode));
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i] == kNoNode) continue;
      const size_t slot = slot_of(keys[i]);
      keys_[slot] = keys[i];
      nodes_[slot] = nodes[i];
    }
  }

  std::vector<int64_t> keys_;
  std::vector<int32_t> nodes_;  // kNoNode where free; a power of two
  size_t count_ = 0;
};

}  // namespace pat
