"""What a cluster is given to do: scripts over the library, each with a config, one output folder and an end."""
