"""Jobs for a cluster: configs of verbs, scripts over the library, benchmarks and faults."""
