// Sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing for energy
// minimization", PAMI 2006) on cost + price * usage. With messages M, belief b_n = cost + messages to n, and n's weight
// w_n = 1 / max(links forward, links back), a pass forward leaves
//
//     min over x of [ w_n b_n(x) + t(x, y) - M_mn(x) - M_nm(y) ] = 0    for each link n -> m forward, and each y
//
// so that sum over n of (1 - w_n links forward) min b_n is no more than any choice costs. With prices l >= 0 on rows,
// less sum l * room. Prices move along the usage of the choice that the sweep decodes, less the room (a subgradient in
// all but name, as the messages have not settled), by Polyak's step towards what a choice is known to cost.
#include "dual.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace autopar::pairwise {
namespace {

using std::int32_t;
using std::int64_t;
using std::size_t;
using std::vector;

constexpr double kSmoothing = 0.7;   // of the slope: a part of the last one stays
constexpr double kHope = 0.1;        // where no choice is known, one is hoped for this part above the bound
constexpr int32_t kPatience = 30;    // steps without a better bound before the steps get smaller
constexpr double kFirstPace = 0.3, kSlower = 0.8, kSlowest = 1e-3;
constexpr double kRounding = 1e-10;  // of the sum of all terms of a bound: much more than their rounding

}  // namespace

int64_t sweep_work(const Compact& p) {
    return static_cast<int64_t>(p.entries.size() / 2 + p.amounts.size() + p.room.size() + p.cost.size());
}

double Dual::infinite() { return std::numeric_limits<double>::infinity(); }

Dual::Dual(const Compact& problem)
    : p(problem), price(p.rows, 0.0), paid(p.cost), used(p.rows + 1, 0.0), slope(p.rows, 0.0), best_price(price),
      best_paid(paid), decoded(p.nodes, 0), best(-infinite()), last(-infinite()), fitting(infinite()), pace(kFirstPace) {
    int64_t total = 0;
    int32_t widest = 0;
    for (int32_t n = 0; n < p.nodes; ++n) {
        widest = std::max(widest, p.size(n));
        for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l) slot.push_back(total), total += p.size(n);
    }
    message.assign(total, 0.0);
    belief.assign(widest, 0.0);
    share.assign(widest, 0.0);
}

void Dual::step(double known) {
    pay();
    const double forward = pass(true);
    look();
    last = std::max(forward, pass(false));
    look();
    settle();
    reprice(known);
    steps += sweep_work(p);
}

void Dual::pay() {
    vector<double>& before = used;
    before[0] = 0.0;
    for (int32_t r = 0; r < p.rows; ++r) before[r + 1] = before[r] + price[r];
    paid = p.cost;
    for (int32_t n = 0; n < p.nodes; ++n)
        for (int32_t k = p.load_from[n]; k < p.load_from[n + 1]; ++k) {
            const double each = before[p.last[k]] - before[p.first[k]];
            if (each == 0.0) continue;
            const Usage* amount = p.amounts.data() + p.usage[k];
            for (int32_t x = 0; x < p.size(n); ++x) paid[p.start[n] + x] += each * static_cast<double>(amount[x]);
        }
}

double Dual::pass(bool forward) {
    double bound = 0.0, terms = 0.0;
    for (int32_t i = 0; i < p.nodes; ++i) {
        const int32_t n = forward ? i : p.nodes - 1 - i, size = p.size(n);
        double* b = belief.data();
        std::copy_n(paid.data() + p.start[n], size, b);
        int32_t onward = 0;
        for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l) {
            const double* in = message.data() + slot[l];
            for (int32_t x = 0; x < size; ++x) b[x] += in[x];
            onward += (p.neighbour[l] > n) == forward;
        }
        const int32_t back = p.from[n + 1] - p.from[n] - onward;
        const double weight = onward + back ? 1.0 / std::max(onward, back) : 0.0;
        const double low = (1.0 - weight * onward) * *std::min_element(b, b + size);
        bound += low, terms += std::fabs(low);
        decode(n, forward);
        for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l) {
            if ((p.neighbour[l] > n) != forward) continue;
            const double* in = message.data() + slot[l];
            const int32_t other = p.neighbour[l], others = p.size(other), back_link = p.reverse[l];
            double* out = message.data() + slot[back_link];
            for (int32_t x = 0; x < size; ++x) {
                const double mine = weight * b[x] - in[x];
                const double* t = p.row(back_link, other, x);
                if (x == 0)
                    for (int32_t y = 0; y < others; ++y) out[y] = mine + t[y];
                else
                    for (int32_t y = 0; y < others; ++y) out[y] = mine + t[y] < out[y] ? mine + t[y] : out[y];
            }
        }
    }
    for (int32_t r = 0; r < p.rows; ++r) {
        const double rent = price[r] * static_cast<double>(p.room[r]);
        bound -= rent, terms += rent;
    }
    return bound - kRounding * terms;
}

// The best strategy against what the nodes before have taken and what those after say.
void Dual::decode(int32_t n, bool forward) {
    const int32_t size = p.size(n);
    double* sum = share.data();
    std::copy_n(paid.data() + p.start[n], size, sum);
    for (int32_t l = p.from[n]; l < p.from[n + 1]; ++l) {
        const int32_t other = p.neighbour[l];
        const double* in = (other > n) == forward ? message.data() + slot[l] : p.row(l, n, decoded[other]);
        for (int32_t x = 0; x < size; ++x) sum[x] += in[x];
    }
    decoded[n] = static_cast<int32_t>(std::min_element(sum, sum + size) - sum);
}

// What the decoded choice uses, and whether it is the cheapest that fits.
void Dual::look() {
    std::fill(used.begin(), used.end(), 0.0);
    for (int32_t n = 0; n < p.nodes; ++n)
        for (int32_t k = p.load_from[n]; k < p.load_from[n + 1]; ++k) {
            const auto amount = static_cast<double>(p.amounts[p.usage[k] + decoded[n]]);
            used[p.first[k]] += amount, used[p.last[k]] -= amount;
        }
    bool inside = true;
    for (int32_t r = 0; r < p.rows; ++r) {
        if (r > 0) used[r] += used[r - 1];
        inside &= used[r] <= static_cast<double>(p.room[r]);
    }
    if (!inside) return;
    const double cost = cost_of(p, decoded);
    if (cost < fitting && cost < p.large) fitting = cost, fits = decoded;
}

// Keeps the prices of the best bound, and goes back to them with smaller steps where it has not risen for long.
void Dual::settle() {
    if (last > best) {
        best = last, best_price = price, best_paid = paid, idle = 0;
    } else if (++idle >= kPatience) {
        idle = 0;
        pace = std::max(kSlowest, kSlower * pace);
        price = best_price;
    }
}

void Dual::reprice(double known) {
    double length = 0.0;
    for (int32_t r = 0; r < p.rows; ++r) {
        slope[r] = kSmoothing * slope[r] + (1.0 - kSmoothing) * (used[r] - static_cast<double>(p.room[r]));
        if (price[r] > 0.0 || slope[r] > 0.0) length += slope[r] * slope[r];
    }
    if (length == 0.0) return;
    const double target = std::min(known, best + kHope * std::fabs(best) + 1.0);
    const double step = pace * std::max(target - last, 1e-6 * std::fabs(target)) / length;
    for (int32_t r = 0; r < p.rows; ++r) price[r] = std::max(0.0, price[r] + step * slope[r]);
}

}  // namespace autopar::pairwise
