"""Runs `hybridspec.serve.ray:app` in a Ray of its own, as people with a cluster do.

    python tests/helpers/cluster_app.py FOLDER PORT

Each line of standard input is a number of replicas to go on with; its end ends all.
"""

from __future__ import annotations

import logging
import os
import sys

import ray
from ray import serve

from hybridspec.serve.ray import app


def main() -> None:
    folder, port = sys.argv[1], int(sys.argv[2])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2,
             object_store_memory=100 << 20, logging_level=logging.ERROR)  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    line = "2"
    while line:
        replicas = {"num_replicas": int(line), "ray_actor_options": {"num_cpus": 1}}
        args = {"model": folder, "engine": {"device": "cpu"}, "replicas": replicas,
                "server": {"model_name": "small", "drain_s": 120}}  # fmt: skip
        serve.run(app(args), name="hybridspec")
        print("running", line.strip(), flush=True)
        line = sys.stdin.readline()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
