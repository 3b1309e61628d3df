"""Reads a run of the tracker `Wandb` with the package `wandb` and compares it with what was logged:

    wandb_run.py FOLDER EXPECTED

FOLDER is the run's, `offline-run-…`, and EXPECTED a JSON file. Needs the package `wandb` (made with 0.31.0, and with
0.19.11). Three readers are compared with EXPECTED:

1. The records, as messages of `wandb.proto.wandb_internal_pb2`, in the framing that
   `wandb.sdk.internal.datastore.DataStore` documents.
2. `DataStore` itself, in the versions that have it (0.19.11 does, 0.31.0 does not): it must return the same records.
3. `wandb sync FOLDER`, which uploads to a server on the loopback interface that answers as W&B's does: the uploaded
   configuration, history, summary and exit code. Only this reader is W&B's own up to the end.
"""

import gzip
import json
import os
import pathlib
import struct
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import wandb
from wandb.proto import wandb_internal_pb2 as pb

BLOCK = 32 << 10


def framed_records(path):
    data = path.read_bytes()
    assert data[:7] == struct.pack("<4sHB", b":W&B", 0xBEE1, 0), data[:7]
    at, record = 7, b""
    while at < len(data):
        if BLOCK - at % BLOCK < 7:
            assert not any(data[at:at + BLOCK - at % BLOCK]), "padding is zero"
            at += BLOCK - at % BLOCK
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at:at + 7])
        chunk = data[at + 7:at + 7 + length]
        assert zlib.crc32(chunk, zlib.crc32(bytes([kind]))) == checksum, f"the checksum at {at}"
        at += 7 + length
        record += chunk
        if kind in (1, 4):
            yield record
            record = b""


def datastore_records(path):
    from wandb.sdk.internal.datastore import DataStore
    wandb._set_internal_process()
    store = DataStore()
    store.open_for_scan(str(path))
    while (record := store.scan_data()) is not None:
        yield bytes(record)


def equal(what, found, expected):
    if found != expected:
        sys.exit(f"{what} differs: wandb has {found}, logged was {expected}")


def values(items):
    return {item.key: json.loads(item.value_json) for item in items}


def without_times(row):
    return {key: value for key, value in row.items() if key not in ("_runtime", "_timestamp", "_wandb")}


def check_records(path, expected):
    raw = list(framed_records(path))
    records = []
    for bytes_ in raw:
        record = pb.Record()
        record.ParseFromString(bytes_)
        # No field is one that wandb does not know.
        assert record.SerializeToString() == bytes_, record
        records.append(record)
    equal("the numbers", [record.num for record in records], list(range(1, len(records) + 1)))
    kinds = [record.WhichOneof("record_type") for record in records]
    equal("the kinds", (kinds[:2], kinds[-1]), (["header", "run"], "exit"))
    run = records[1].run
    for field in ["run_id", "project", "entity", "display_name", "run_group", "job_type", "notes"]:
        equal(field, getattr(run, field), expected[field])
    equal("tags", list(run.tags), expected["tags"])
    assert run.start_time.seconds > 0
    config = values(run.config.update)
    history, steps, summary = [], [], {}
    for record in records:
        config |= values(record.config.update)
        summary |= values(record.summary.update)
        if record.HasField("history"):
            row = values(record.history.item)
            assert row["_timestamp"] >= run.start_time.seconds and row["_runtime"] >= 0, row
            history.append(without_times(row))
            steps.append(record.history.step.num)
    equal("config", config, expected["config"])
    equal("history", history, expected["history"])
    equal("the steps", steps, [row["_step"] for row in expected["history"]])
    equal("summary", without_times(summary), expected["summary"])
    equal("exit code", records[-1].exit.exit_code, expected["exit_code"])
    print(f"wandb {wandb.__version__}: {len(records)} records agree")
    try:
        equal("DataStore", list(datastore_records(path)), raw)
        print("DataStore agrees")
        return True
    except ImportError:
        print("DataStore is not a part of this version")
        return False


class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    uploads = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        answer = {}
        if self.path.startswith("/graphql"):
            answer = {"data": self.data(json.loads(body))}
        elif self.path.endswith("/file_stream"):
            self.uploads.append(json.loads(body))
        answer = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST

    def data(self, request):
        query, variables = request["query"], request.get("variables", {})
        if "upsertBucket" in query:
            self.uploads.append({"run": variables})
            entity = {"id": "ZW50aXR5", "name": variables.get("entity") or "me"}
            project = {"id": "cHJvamVjdA==", "name": variables.get("project"), "entity": entity}
            bucket = {"id": "cnVu", "name": variables.get("name"), "displayName": "a run", "config": "{}",
                      "historyLineCount": 0, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "cnVu", "uploadHeaders": [], "files": []}}
        if "viewer" in query:
            return {"viewer": {"id": "bWU=", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        return {}

    def log_message(self, *arguments):
        pass


def check_sync(folder, expected, is_old):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = dict(os.environ, WANDB_BASE_URL=f"http://127.0.0.1:{server.server_port}", WANDB_API_KEY="0" * 40,
                       WANDB_ERROR_REPORTING="false", WANDB_DIR=str(folder), HOME=str(folder))
    command = [sys.executable, "-m", "wandb", "sync", str(folder)]
    synced = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    output = synced.stdout + synced.stderr
    if synced.returncode or not Server.uploads:
        sys.exit(f"wandb sync ended with {synced.returncode}: {output}")
    config, history, summary, exit_code = {}, [], {}, None
    for upload in Server.uploads:
        run = upload.get("run", {})
        config |= {key: entry["value"] for key, entry in json.loads(run.get("config") or "{}").items()}
        files = upload.get("files") or {}
        for line in files.get("wandb-history.jsonl", {}).get("content", []):
            history.append(without_times(json.loads(line)))
        for line in files.get("wandb-summary.json", {}).get("content", []):
            summary = json.loads(line)
        exit_code = upload.get("exitcode", exit_code)
    runs = [upload["run"] for upload in Server.uploads if "run" in upload]
    equal("the uploaded ID", {run["name"] for run in runs}, {expected["run_id"]})
    equal("the uploaded project", {run["project"] for run in runs}, {expected["project"]})
    config.pop("_wandb", None)
    # The older `wandb sync` uploads later values of the configuration only as a file.
    if not is_old:
        equal("the uploaded config", config, expected["config"])
    equal("the uploaded history", history, expected["history"])
    equal("the uploaded summary", without_times(summary), expected["summary"])
    equal("the uploaded exit code", exit_code, expected["exit_code"])
    print(f"wandb sync has uploaded {len(history)} steps, which agree")


folder = pathlib.Path(sys.argv[1])
expected = json.loads(pathlib.Path(sys.argv[2]).read_text())
is_old = check_records(folder / f"run-{expected['run_id']}.wandb", expected)
check_sync(folder, expected, is_old)
print("all values agree with wandb", wandb.__version__)
