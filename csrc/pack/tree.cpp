// SPDX-License-Identifier: Apache-2.0
#include "tree.h"

#include <algorithm>

#include "../check.h"

namespace pat {
namespace {

constexpr int32_t kRoot = 0;  // raw node 0: virtual root of the forest, no tokens

}  // namespace

const PackTree& TreeBuilder::build(const PathView& paths, const int64_t* seq_lens) {
  reset(paths.num_queries);
  for (int64_t query = 0; query < paths.num_queries; ++query) {
    PAT_CHECK(seq_lens[query] >= 0 && seq_lens[query] <= INT32_MAX, "query ", query,
              ": sequence length ", seq_lens[query], " is not in [0, 2^31)");
    int32_t node = kRoot;
    int64_t position = 0;
    const int64_t first = paths.offsets[query];
    const int64_t last = paths.offsets[query + 1];
    PAT_CHECK(first <= last, "query ", query, ": path offsets decrease from ", first, " to ", last);
    const size_t depth = static_cast<size_t>(last - first);
    for (size_t level = 0; level < depth; ++level) {
      const int64_t id = paths.node_ids[first + static_cast<int64_t>(level)];
      const int64_t start = paths.starts[first + static_cast<int64_t>(level)];
      const int64_t end = paths.ends[first + static_cast<int64_t>(level)];
      PAT_CHECK(start == position, "query ", query, ": node ", id, " starts at ", start,
                start > position ? " and leaves a gap after " : " and overlaps the tokens before ",
                position);
      PAT_CHECK(end > start, "query ", query, ": node ", id, " has the empty or negative span [",
                start, ", ", end, ")");
      PAT_CHECK(end <= seq_lens[query], "query ", query, ": node ", id, " ends at ", end,
                " beyond its sequence of ", seq_lens[query], " tokens");
      // Neighbours in a batch mostly share their first nodes: skip the hash table for those.
      const int32_t guess = level < last_path_.size() ? last_path_[level] : kNoNode;
      if (guess != kNoNode && raw_[static_cast<size_t>(guess)].id == id &&
          raw_[static_cast<size_t>(guess)].parent == node &&
          raw_[static_cast<size_t>(guess)].end == end) {
        node = guess;
      } else {
        node = enter(query, node, id, static_cast<int32_t>(start), static_cast<int32_t>(end));
        last_path_.resize(level);
        last_path_.push_back(node);
      }
      position = end;
    }
    raw_query_node_[static_cast<size_t>(query)] = node;
  }
  count_queries();
  reduce();
  return tree_;
}

void TreeBuilder::reset(int64_t num_queries) {
  PAT_CHECK(num_queries >= 0 && num_queries <= INT32_MAX, "a batch of ", num_queries, " queries");
  raw_.clear();
  raw_.push_back({-1, kNoNode, 0, 0, kNoNode, 0, 0, 0});
  raw_query_node_.assign(static_cast<size_t>(num_queries), kRoot);
  last_path_.clear();
  table_.clear();
}

int32_t TreeBuilder::add(int64_t id, int32_t parent, int32_t start, int32_t end) {
  raw_.push_back({id, parent, start, end, kNoNode, 0, 0, 0});
  return static_cast<int32_t>(raw_.size()) - 1;
}

// Follows, or creates, the node `id` below `parent` and returns the node that ends at `end`.
int32_t TreeBuilder::enter(int64_t query, int32_t parent, int64_t id, int32_t start, int32_t end) {
  int32_t node = table_.find_or_add(id, static_cast<int32_t>(raw_.size()));
  if (node == kNoNode) return add(id, parent, start, end);
  const RawNode& known = raw_[static_cast<size_t>(node)];
  PAT_CHECK(known.parent == parent, "query ", query, ": node ", id, " stands under node ",
            raw_[static_cast<size_t>(parent)].id, ", another query has it under node ",
            raw_[static_cast<size_t>(known.parent == kNoNode ? kRoot : known.parent)].id,
            " (-1 is the root): a radix node has one parent");
  PAT_CHECK(known.start == start, "query ", query, ": node ", id, " starts at ", start,
            ", another query has it start at ", known.start);
  while (raw_[static_cast<size_t>(node)].end < end) {
    const int32_t reached = raw_[static_cast<size_t>(node)].end;
    int32_t next = raw_[static_cast<size_t>(node)].next;
    if (next == kNoNode) {
      next = add(id, node, reached, end);
      raw_[static_cast<size_t>(node)].next = next;
    }
    node = next;
  }
  if (raw_[static_cast<size_t>(node)].end > end) cut(node, end);
  return node;
}

// Splits a node that a clipped path ends inside of: `node` keeps the tokens before `position`.
// Rare (one clip per protected length), so a scan over all nodes is fine.
void TreeBuilder::cut(int32_t node, int32_t position) {
  const RawNode whole = raw_[static_cast<size_t>(node)];
  const int32_t rest = add(whole.id, node, position, whole.end);
  raw_[static_cast<size_t>(rest)].next = whole.next;
  raw_[static_cast<size_t>(node)].next = rest;
  raw_[static_cast<size_t>(node)].end = position;
  for (size_t i = 1; i + 1 < raw_.size(); ++i) {
    if (raw_[i].parent == node) raw_[i].parent = rest;
  }
  for (int32_t& query_node : raw_query_node_) {
    if (query_node == node) query_node = rest;
  }
  last_path_.clear();
}

void TreeBuilder::count_queries() {
  for (const int32_t node : raw_query_node_) ++raw_[static_cast<size_t>(node)].num_ending;
  order_.resize(raw_.size());
  bool parents_first = true;
  for (size_t i = 0; i < raw_.size(); ++i) {
    order_[i] = static_cast<int32_t>(i);
    parents_first = parents_first && raw_[i].parent < static_cast<int32_t>(i);
  }
  if (!parents_first) {  // only after a cut
    std::sort(order_.begin() + 1, order_.end(), [&](int32_t a, int32_t b) {
      return raw_[static_cast<size_t>(a)].end < raw_[static_cast<size_t>(b)].end;
    });
  }
  for (size_t i = order_.size(); i-- > 1;) {
    RawNode& node = raw_[static_cast<size_t>(order_[i])];
    node.num_queries += node.num_ending;
    raw_[static_cast<size_t>(node.parent)].num_queries += node.num_queries;
  }
}

// Keeps the nodes that several queries share, joins chains with equal query sets, and orders nodes
// by queries, tokens and id: a child has strictly fewer queries than its parent, so parents come
// first.
void TreeBuilder::reduce() {
  std::vector<PackNode>& nodes = tree_.nodes;
  nodes.clear();
  mapped_.assign(raw_.size(), kNoNode);
  for (size_t i = 1; i < order_.size(); ++i) {
    const size_t raw_index = static_cast<size_t>(order_[i]);
    const RawNode& raw = raw_[raw_index];
    const int32_t parent = mapped_[static_cast<size_t>(raw.parent)];
    if (raw.num_queries < 2) {
      mapped_[raw_index] = parent;
    } else if (parent != kNoNode &&
               nodes[static_cast<size_t>(parent)].num_queries == raw.num_queries) {
      nodes[static_cast<size_t>(parent)].end = raw.end;
      nodes[static_cast<size_t>(parent)].id = raw.id;
      mapped_[raw_index] = parent;
    } else {
      mapped_[raw_index] = static_cast<int32_t>(nodes.size());
      nodes.push_back({raw.id, parent, raw.start, raw.end, raw.num_queries});
    }
  }

  order_.resize(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) order_[i] = static_cast<int32_t>(i);
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    const PackNode& x = nodes[static_cast<size_t>(a)];
    const PackNode& y = nodes[static_cast<size_t>(b)];
    if (x.num_queries != y.num_queries) return x.num_queries > y.num_queries;
    if (x.end - x.start != y.end - y.start) return x.end - x.start > y.end - y.start;
    if (x.start != y.start) return x.start < y.start;
    return x.id < y.id;
  });
  std::vector<int32_t> rank(nodes.size());
  std::vector<PackNode> sorted(nodes.size());
  for (size_t i = 0; i < order_.size(); ++i) {
    rank[static_cast<size_t>(order_[i])] = static_cast<int32_t>(i);
    sorted[i] = nodes[static_cast<size_t>(order_[i])];
  }
  for (PackNode& node : sorted) {
    if (node.parent != kNoNode) node.parent = rank[static_cast<size_t>(node.parent)];
  }
  nodes.swap(sorted);

  const size_t num_queries = raw_query_node_.size();
  tree_.query_node.resize(num_queries);
  tree_.query_prefix.resize(num_queries);
  for (size_t query = 0; query < num_queries; ++query) {
    const int32_t node = mapped_[static_cast<size_t>(raw_query_node_[query])];
    tree_.query_node[query] = node == kNoNode ? kNoNode : rank[static_cast<size_t>(node)];
    tree_.query_prefix[query] =
        node == kNoNode ? 0 : nodes[static_cast<size_t>(tree_.query_node[query])].end;
  }
}

}  // namespace pat
