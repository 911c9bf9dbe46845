"""Put faults into runs, collections and services: `python -m jobs.faults [OPTIONS]`, as the benchmark's part faults."""

import json
import sys

from jobs.bench.part import measured

if __name__ == "__main__":
    figures = measured("faults", sys.argv[1:])
    print(json.dumps({"faults": figures}))
    sys.exit(0 if figures.get("sound", "left_out" in figures) else 1)
