// SPDX-License-Identifier: Apache-2.0
// softmax e4m3|plain TOKENS PEAK MASKED OFFSET: attention of two rows as attend_wgmma() does it,
// with the softmax of the kernels and weights in e4m3 or fp32. Logits are random around OFFSET,
// that of the first token is PEAK more than OFFSET, and its V is small, as at the beginning of a
// text; in every MASKED-th tile (0: none) all are masked. Prints the relative error of the output
// and the greatest error of the LSE, against doubles.
#include "cuda/forward/softmax.cuh"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>
#include <thread>
#include <vector>

namespace {

using namespace pat;
constexpr int kColumns = 16, kRows = 2;
using Row = std::vector<double>;

// The nearest number that e4m3 has.
float rounded(float x) {
  if (x == 0.0f) return x;
  int exponent;
  std::frexp(std::fabs(x), &exponent);
  const float step = std::ldexp(1.0f, std::max(exponent - 1, -6) - 3);
  return std::copysign(std::min(std::nearbyint(std::fabs(x) / step) * step, 448.0f), x);
}

template <typename Exponent>
struct Attention {
  static constexpr bool kE4m3 = Exponent::kOfTile;
  const ForwardParams params{.exp_scale = 0.1275f};
  const float unscale[kRows] = {kE4m3 ? 0.25f : 1.0f, kE4m3 ? 2.0f : 1.0f};
  std::vector<float> scores[kRows];
  std::vector<std::vector<float>> v;

  float weights[kRows][kTileTokens];
  float factors[kRows];
  float o[kRows][kColumns] = {};
  SoftmaxState state[kRows];

  // What a lane does, between its barriers with the thread that multiplies.
  void lane(int index, std::barrier<>& tile) {
    this_lane = index;
    Exponent exponent{params};
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, factor[2];
    const int tokens = static_cast<int>(v.size());
    if constexpr (kE4m3) std::copy(unscale, unscale + kRows, exponent.unscale);
    for (int first = 0; first < tokens; first += kTileTokens) {
      float s[32];
      const auto column = [&](int i) { return (i >> 2) * 8 + 2 * index + (i & 1); };
      for (int i = 0; i < 32; ++i) {
        const int token = first + column(i);  // beyond the last there may be anything
        s[i] = token < tokens ? scores[(i >> 1) & 1][token] : NAN;
      }
      softmax<8, false>(params, exponent, s, row_max, row_sum, factor, 0, tokens - first,
                        [](float (&)[32]) {});
      for (int i = 0; i < 32; ++i) {
        weights[(i >> 1) & 1][column(i)] = kE4m3 ? rounded(s[i]) : s[i];
      }
      if (index == 0) std::copy(factor, factor + kRows, factors);
      tile.arrive_and_wait();
      tile.arrive_and_wait();
    }
    SoftmaxState states[2];
    finish_states(exponent, row_max, row_sum, states);
    if (index == 0) std::copy(states, states + kRows, state);
  }

  void run() {
    std::barrier<> tile(kLanes + 1);
    std::vector<std::thread> lanes;
    for (int i = 0; i < kLanes; ++i) lanes.emplace_back([&, i] { lane(i, tile); });
    for (size_t first = 0; first < v.size(); first += kTileTokens) {
      tile.arrive_and_wait();
      for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kColumns; ++c) {
          float sum = 0.0f;
          for (size_t k = first; k < std::min(v.size(), first + kTileTokens); ++k) {
            sum += weights[r][k - first] * v[k][c];
          }
          o[r][c] = fmaf(o[r][c], factors[r], sum);
        }
      }
      tile.arrive_and_wait();
    }
    for (std::thread& each : lanes) each.join();
  }
};

template <typename Exponent>
void check(int tokens, float peak, int masked, float offset) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  Attention<Exponent> a;
  for (int k = 0; k < tokens; ++k) {
    a.v.emplace_back();
    for (int c = 0; c < kColumns; ++c) {
      a.v[k].push_back(rounded(0.5f + normal(generator)) * (k == 0 ? 0.02f : 1.0f));
    }
    for (int r = 0; r < kRows; ++r) {
      const float logit = offset + (k == 0 ? peak : normal(generator));
      const bool hidden = masked > 0 && k / kTileTokens % masked == 0;
      a.scores[r].push_back(hidden ? -INFINITY : logit / (a.params.exp_scale * a.unscale[r]));
    }
  }
  a.run();
  double distance = 0.0, norm = 0.0, lse_error = 0.0;
  for (int r = 0; r < kRows; ++r) {
    Row out(kColumns);
    double sum = 0.0;  // over 2^offset, which may be infinite
    for (int k = 0; k < tokens; ++k) {
      const double logit = double{a.scores[r][k]} * a.params.exp_scale * a.unscale[r];
      const double w = std::exp2(logit - offset);
      sum += w;
      for (int c = 0; c < kColumns; ++c) out[c] += w * a.v[k][c];
    }
    for (int c = 0; c < kColumns; ++c) {
      const double truth = sum > 0.0 ? out[c] / sum : 0.0;
      const double got = a.o[r][c] * normalizer(a.state[r]);
      distance += (got - truth) * (got - truth);
      norm += truth * truth;
    }
    const double got = lse(a.state[r]), truth = offset + std::log2(sum);
    lse_error = std::max(lse_error, got == truth ? 0.0 : std::fabs(got - truth));
  }
  std::printf("%g %g\n", norm > 0.0 ? std::sqrt(distance / norm) : distance, lse_error);
}

}  // namespace

int main(int, char** argv) {
  const int tokens = std::atoi(argv[2]), masked = std::atoi(argv[4]);
  const auto peak = static_cast<float>(std::atof(argv[3]));
  const auto offset = static_cast<float>(std::atof(argv[5]));
  const bool e4m3 = std::string_view(argv[1]) == "e4m3";
  (e4m3 ? check<ScaledScores<false>> : check<PlainScores>)(tokens, peak, masked, offset);
}
