// SPDX-License-Identifier: Apache-2.0
// Indices of nodes by a 64-bit key: a radix node's id, or the address of an object.
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
  void clear() {
    nodes_.assign(std::max(nodes_.size(), kFirstSlots), kNoNode);
    keys_.resize(nodes_.size());
    count_ = 0;
  }

  // The node of `key`, or kNoNode.
  int32_t find(int64_t key) const { return nodes_[slot_of(key)]; }

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

  // The one that holds `key`, or is free for it.
  size_t slot_of(int64_t key) const {
    // Ids are small consecutive integers, the low bits of addresses are alike.
    const uint64_t x = static_cast<uint64_t>(key) * 0x9E3779B97F4A7C15ull;
    const size_t mask = nodes_.size() - 1;
    size_t slot = static_cast<size_t>(x ^ (x >> 29)) & mask;
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
