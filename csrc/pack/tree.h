// SPDX-License-Identifier: Apache-2.0
// The pack tree: the forest of all queries' radix paths, reduced to the nodes that several queries
// share. Built from node ids and spans alone; no token and no slot is compared.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "../check.h"
#include "../plan.h"

namespace pat {

inline constexpr int32_t kNoNode = -1;

// Consecutive tokens of a query's sequence that stand under one radix node.
struct PathElement {
  int64_t node_id;     // any distinct values
  int64_t start, end;  // token positions: [start, end)
};

// Root-to-node paths of a batch: query q owns the elements [offsets[q], offsets[q + 1]).
struct Paths {
  std::vector<int64_t> offsets{0};
  std::vector<PathElement> elements;

  int64_t num_queries() const { return static_cast<int64_t>(offsets.size()) - 1; }
  void clear() {
    offsets.assign(1, 0);
    elements.clear();
  }

  // What was added since the last query is the next query's path.
  void end_query() { offsets.push_back(static_cast<int64_t>(elements.size())); }
};

// A node that at least two queries share. Chains of nodes with equal query sets are one node.
struct PackNode {
  int64_t id;      // radix node id of the deepest node of the chain
  int32_t parent;  // index into PackTree::nodes, or kNoNode
  int32_t start;   // token positions
  int32_t end;
  int32_t num_queries;  // queries of the whole subtree
};

struct PackTree {
  std::vector<PackNode> nodes;        // parents before children
  std::vector<int32_t> query_node;    // [num_queries] deepest shared node of a query, or kNoNode
  std::vector<int32_t> query_prefix;  // [num_queries] tokens up to the end of that node
};

// Indices of nodes by a radix node's id. Open addressing, at most half full. Cleared, not made, for
// every batch: it keeps its memory.
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

// Builds the tree in time linear in the number of path elements, but for sorting the shared nodes.
//
// Paths that name the same node agree on its parent and start; they may end inside it (a clipped
// path), which splits the node. Lengths of sequences count the draft tokens (plan.h), which no path
// holds. Throws std::invalid_argument naming query, node and positions for a
// gap, an overlap, an empty or negative span, a path longer than its sequence, or a node with two
// parents or two starts (which is what a cycle comes down to).
class TreeBuilder {
 public:
  const PackTree& build(const Paths& paths, const int64_t* seq_lens, int32_t draft_tokens) {
    reset(paths.num_queries());
    for (int64_t query = 0; query < paths.num_queries(); ++query) {
      PAT_CHECK(seq_lens[query] >= 0 && seq_lens[query] <= INT32_MAX, "query ", query,
                ": sequence length ", seq_lens[query], " is not in [0, 2^31)");
      PAT_CHECK(seq_lens[query] == 0 || seq_lens[query] >= draft_tokens, "query ", query,
                ": a sequence of ", seq_lens[query], " tokens does not hold the ", draft_tokens,
                " draft tokens: lengths count them");
      int32_t node = kRoot;
      int64_t position = 0;
      const int64_t first = paths.offsets[query];
      const int64_t depth = paths.offsets[query + 1] - first;
      for (int64_t level = 0; level < depth; ++level) {
        const auto [id, start, end] = paths.elements[first + level];
        PAT_CHECK(
            start == position, "query ", query, ": node ", id, " starts at ", start,
            start > position ? " and leaves a gap after " : " and overlaps the tokens before ",
            position);
        PAT_CHECK(end > start, "query ", query, ": node ", id, " has the empty or negative span [",
                  start, ", ", end, ")");
        PAT_CHECK(end <= seq_lens[query], "query ", query, ": node ", id, " ends at ", end,
                  " beyond its sequence of ", seq_lens[query], " tokens");
        PAT_CHECK(draft_tokens == 1 || end <= seq_lens[query] - draft_tokens, "query ", query,
                  ": node ", id, " ends at ", end, ", among the ", draft_tokens,
                  " draft tokens at the end of its sequence of ", seq_lens[query],
                  ", which no other query has");
        // Neighbours in a batch mostly share their first nodes: skip the hash table for those.
        const int32_t guess = level < count_of(last_path_) ? last_path_[level] : kNoNode;
        if (guess != kNoNode && raw_[guess].id == id && raw_[guess].parent == node &&
            raw_[guess].end == end) {
          node = guess;
        } else {
          node = enter(query, node, id, static_cast<int32_t>(start), static_cast<int32_t>(end));
          last_path_.resize(level);
          last_path_.push_back(node);
        }
        position = end;
      }
      raw_query_node_[query] = node;
    }
    count_queries();
    reduce();
    return tree_;
  }

 private:
  static constexpr int32_t kRoot = 0;  // raw node 0: virtual root of the forest, no tokens

  struct RawNode {
    int64_t id;
    int32_t parent;
    int32_t start;
    int32_t end;
    int32_t next;  // continuation of the same id beyond a clip, or kNoNode
    int32_t num_queries;
    int32_t num_ending;  // queries whose path ends here
  };
  void reset(int64_t num_queries) {
    PAT_CHECK(num_queries >= 0 && num_queries <= INT32_MAX, "a batch of ", num_queries, " queries");
    raw_.clear();
    raw_.push_back({-1, kNoNode, 0, 0, kNoNode, 0, 0});
    raw_query_node_.assign(num_queries, kRoot);
    last_path_.clear();
    table_.clear();
  }

  // Follows, or creates, the node `id` below `parent` and returns the node that ends at `end`.
  int32_t enter(int64_t query, int32_t parent, int64_t id, int32_t start, int32_t end) {
    int32_t node = table_.find_or_add(id, count_of(raw_));
    if (node == kNoNode) return add(id, parent, start, end);
    const RawNode& known = raw_[node];
    PAT_CHECK(known.parent == parent, "query ", query, ": node ", id, " stands under node ",
              raw_[parent].id, ", another query has it under node ",
              raw_[known.parent == kNoNode ? kRoot : known.parent].id,
              " (-1 is the root): a radix node has one parent");
    PAT_CHECK(known.start == start, "query ", query, ": node ", id, " starts at ", start,
              ", another query has it start at ", known.start);
    while (raw_[node].end < end) {
      const int32_t reached = raw_[node].end;
      int32_t next = raw_[node].next;
      if (next == kNoNode) {
        next = add(id, node, reached, end);
        raw_[node].next = next;
      }
      node = next;
    }
    if (raw_[node].end > end) cut(query, node, end);
    return node;
  }

  int32_t add(int64_t id, int32_t parent, int32_t start, int32_t end) {
    raw_.push_back({id, parent, start, end, kNoNode, 0, 0});
    return count_of(raw_) - 1;
  }

  // Splits a node that the path of `query` ends inside of: `node` keeps the tokens before
  // `position`. Rare (one clip per protected length), so a scan over the nodes and queries so far
  // is fine.
  void cut(int64_t query, int32_t node, int32_t position) {
    const RawNode whole = raw_[node];
    const int32_t rest = add(whole.id, node, position, whole.end);
    raw_[rest].next = whole.next;
    raw_[node].next = rest;
    raw_[node].end = position;
    for (int32_t i = 1; i < rest; ++i) {
      if (raw_[i].parent == node) raw_[i].parent = rest;
    }
    for (int64_t i = 0; i < query; ++i) {
      if (raw_query_node_[i] == node) raw_query_node_[i] = rest;
    }
    last_path_.clear();
  }

  void count_queries() {
    for (const int32_t node : raw_query_node_) ++raw_[node].num_ending;
    order_.resize(raw_.size());
    bool parents_first = true;
    for (int32_t i = 0; i < count_of(raw_); ++i) {
      order_[i] = i;
      parents_first = parents_first && raw_[i].parent < i;
    }
    if (!parents_first) {  // only after a cut
      std::sort(order_.begin() + 1, order_.end(),
                [&](int32_t a, int32_t b) { return raw_[a].end < raw_[b].end; });
    }
    for (int32_t i = count_of(order_); i-- > 1;) {
      RawNode& node = raw_[order_[i]];
      node.num_queries += node.num_ending;
      raw_[node.parent].num_queries += node.num_queries;
    }
  }

  // Keeps the nodes that several queries share and joins chains with equal query sets.
  void reduce() {
    std::vector<PackNode>& nodes = tree_.nodes;
    nodes.clear();
    mapped_.assign(raw_.size(), kNoNode);
    for (int32_t i = 1; i < count_of(order_); ++i) {
      const int32_t raw_index = order_[i];
      const RawNode& raw = raw_[raw_index];
      const int32_t parent = mapped_[raw.parent];
      if (raw.num_queries < 2) {
        mapped_[raw_index] = parent;
      } else if (parent != kNoNode && nodes[parent].num_queries == raw.num_queries) {
        nodes[parent].end = raw.end;
        nodes[parent].id = raw.id;
        mapped_[raw_index] = parent;
      } else {
        mapped_[raw_index] = count_of(nodes);
        nodes.push_back({raw.id, parent, raw.start, raw.end, raw.num_queries});
      }
    }

    sort_nodes();
  }

  // Orders the kept nodes by queries, tokens, start and id, and tells each query which of them it
  // ends with. A child has strictly fewer queries than its parent, so parents come first.
  void sort_nodes() {
    std::vector<PackNode>& nodes = tree_.nodes;
    const int32_t num_nodes = count_of(nodes);
    order_.resize(nodes.size());
    for (int32_t i = 0; i < num_nodes; ++i) order_[i] = i;
    std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      const PackNode& x = nodes[a];
      const PackNode& y = nodes[b];
      if (x.num_queries != y.num_queries) return x.num_queries > y.num_queries;
      if (x.end - x.start != y.end - y.start) return x.end - x.start > y.end - y.start;
      if (x.start != y.start) return x.start < y.start;
      return x.id < y.id;
    });
    std::vector<int32_t> rank(nodes.size());
    std::vector<PackNode> sorted(nodes.size());
    for (int32_t i = 0; i < num_nodes; ++i) {
      rank[order_[i]] = i;
      sorted[i] = nodes[order_[i]];
    }
    for (PackNode& node : sorted) {
      if (node.parent != kNoNode) node.parent = rank[node.parent];
    }
    nodes.swap(sorted);

    const int32_t num_queries = count_of(raw_query_node_);
    tree_.query_node.resize(num_queries);
    tree_.query_prefix.resize(num_queries);
    for (int32_t query = 0; query < num_queries; ++query) {
      const int32_t node = mapped_[raw_query_node_[query]];
      tree_.query_node[query] = node == kNoNode ? kNoNode : rank[node];
      tree_.query_prefix[query] = node == kNoNode ? 0 : nodes[tree_.query_node[query]].end;
    }
  }

  std::vector<RawNode> raw_;
  std::vector<int32_t> raw_query_node_;
  std::vector<int32_t>
      last_path_;    // nodes of the previous query's path: the next one often shares it
  NodeTable table_;  // of raw_, by id
  std::vector<int32_t> order_;
  std::vector<int32_t> mapped_;
  PackTree tree_;
};

}  // namespace pat
