"""Runs a real MLflow server and compares its runs with what was logged:

    mlflow_server.py FOLDER

Needs the package `mlflow` (made with 3.17.2). The server keeps its data in a SQLite database in FOLDER and listens on a
free port of the loopback interface, whose address is the first line of the output. Each line of the input is a command,
which is answered by a line:

    stop            stops the server: "stopped"
    start           starts it again at the same address, with the same data: "started"
    {"run_id": …}   compares a run: "all values agree with mlflow VERSION", or the difference

`mlflow.tracking.MlflowClient` reads the run. Values must be equal bit for bit, and each must be there once.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import mlflow
from mlflow.tracking import MlflowClient

folder = sys.argv[1]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
address = f"http://127.0.0.1:{port}"


def start():
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/artifacts"]
    log = open(f"{folder}/server.log", "ab")
    server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health") as answer:
                if answer.status == 200:
                    return server
        except (urllib.error.URLError, ConnectionError):
            pass
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}; see {folder}/server.log")
        time.sleep(0.2)


def stop(server):
    # The server has worker processes.
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def difference(expected):
    client = MlflowClient(address)
    run = client.get_run(expected["run_id"])
    found = {
        "run_id": run.info.run_id,
        "run_name": run.info.run_name,
        "experiment": client.get_experiment(run.info.experiment_id).name,
        "status": run.info.status,
        "runs": len(client.search_runs([run.info.experiment_id])),
        "params": run.data.params,
        "tags": {key: value for key, value in run.data.tags.items() if key in expected["tags"]},
        "metrics": {},
    }
    for name in run.data.metrics:
        history = client.get_metric_history(expected["run_id"], name)
        points = sorted([metric.step, metric.value] for metric in history)
        found["metrics"][name] = points
        if any(abs(metric.timestamp / 1000 - time.time()) > 3600 for metric in history):
            return f"{name} has a time that is not of this hour"
    for key, value in expected.items():
        if found[key] != value:
            return f"`{key}` differs: mlflow has {found[key]}, logged was {value}"
    points = sum(len(points) for points in found["metrics"].values())
    return f"all values agree with mlflow {mlflow.__version__}: {len(found['metrics'])} metrics, {points} points"


server = start()
try:
    print(address, flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "stop":
            stop(server)
            print("stopped", flush=True)
        elif command == "start":
            server = start()
            print("started", flush=True)
        else:
            print(difference(json.loads(command)), flush=True)
finally:
    if server.poll() is None:
        stop(server)
