"""Plans: how many replicas sustain a rate of requests, by a simulation of the cascade from measured seconds."""
