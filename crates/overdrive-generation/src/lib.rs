//! Text generation: sampling, stop conditions, generation over a key/value cache.
