"""Scripts over the library that take a while: benchmarks now, larger jobs as they come."""
