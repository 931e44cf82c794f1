// The whole search: bound and choices in turns.
#pragma once

#include <cstdint>

#include "compact.h"
#include "model.h"

namespace autopar::pairwise {

// Told now and then: seconds, cost of the best choice that fits (infinity: none yet), bound. Not 0: stop.
using Told = std::int32_t (*)(double seconds, double cost, double bound);

struct Found {
    std::vector<std::int32_t> choice;  // of the compact nodes; empty where none that fits was found
    double cost, bound;                // the model's constant not in them
    bool ended;                        // by itself or by its rounds, not by time or by being told to
};

struct Limits {
    double seconds;
    std::int64_t rounds;
    std::int32_t threads;
    Told told;
};

Found search(const Compact& problem, const Limits& limits);

}  // namespace autopar::pairwise
