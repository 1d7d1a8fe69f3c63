"""Stores that are no folder: in memory, and on a file server of this machine over HTTP."""

from __future__ import annotations

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import dask
import pytest
import xarray as xr

from geomstats_lm.cube import (
    IncompleteError,
    SettingsError,
    has_leaf,
    list_leaves,
    open_cube,
    open_leaf,
    open_study,
    write_leaf,
)
from geomstats_lm.import_activations import import_activations
from geomstats_lm.storage import open_zarr_store
from geomstats_lm.verify import verify_study
from tests.cube_samples import activations


class FileServer(BaseHTTPRequestHandler):
    """As much of the WebHDFS protocol as fsspec's file system of that name speaks."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    files: dict[str, bytes]
    lock = threading.Lock()

    def log_message(self, *args):
        pass

    def answer(self, status=200, content=b"", **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def missing(self, path):
        what = {"exception": "FileNotFoundException", "message": path}
        self.answer(404, {"RemoteException": what})

    def status_of(self, path):
        if path in self.files:
            return {"type": "FILE", "length": len(self.files[path])}
        if any(name.startswith(path.rstrip("/") + "/") for name in self.files):
            return {"type": "DIRECTORY", "length": 0}
        return None

    def handle_request(self):
        url = urlsplit(self.path)
        path = unquote(url.path).removeprefix("/webhdfs/v1")
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        operation, again = query.get("op"), f"http://{self.headers['Host']}{url.path}?data="
        with self.lock:
            if "data" in query:
                if query["data"] == "append":
                    data = self.files.get(path, b"") + data
                self.files[path] = data
                self.answer(201)
            elif operation in ("CREATE", "APPEND"):
                self.answer(307, Location=again + operation.lower())
            elif operation == "MKDIRS":
                self.answer(200, {"boolean": True})
            elif operation == "DELETE":
                gone = [f for f in self.files if f == path or f.startswith(path.rstrip("/") + "/")]
                for name in gone:
                    del self.files[name]
                self.answer(200, {"boolean": bool(gone)})
            elif (status := self.status_of(path)) is None:
                self.missing(path)
            elif operation == "GETFILESTATUS":
                self.answer(200, {"FileStatus": status})
            elif operation == "OPEN":
                start = int(query.get("offset", 0))
                stop = start + int(query.get("length", len(self.files[path])))
                self.answer(200, self.files[path][start:stop])
            elif operation == "LISTSTATUS":
                start = path.rstrip("/") + "/"
                names = {f[len(start) :].split("/")[0] for f in self.files if f.startswith(start)}
                found = [self.status_of(start + n) | {"pathSuffix": n} for n in sorted(names)]
                self.answer(200, {"FileStatuses": {"FileStatus": found}})

    do_GET = do_PUT = do_POST = do_DELETE = handle_request


@pytest.fixture(scope="module")
def server():
    FileServer.files = {}
    http = ThreadingHTTPServer(("127.0.0.1", 0), FileServer)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"webhdfs://127.0.0.1:{http.server_port}"
    http.shutdown()
    http.server_close()


@pytest.fixture(params=["memory", pytest.param("server", marks=pytest.mark.slow)])
def store(request):
    name = uuid.uuid4().hex
    if request.param == "memory":
        return f"memory://{name}"
    pytest.importorskip("requests")
    return f"{request.getfixturevalue('server')}/{name}"


def write(dataset, store, key="tiny", leaf="activations", *, made="once", **how):
    return write_leaf(dataset, store, key, leaf, settings={"made": made}, progress=False, **how)


def test_a_study_at_a_url(store):
    made = activations()
    back = write(made, store)
    xr.testing.assert_equal(back.load(), made.compute())
    write(activations(5, 32, 7, key="wide"), store, "wide")
    assert list_leaves(store) == ["tiny/activations", "wide/activations"]
    assert has_leaf(store, "wide", "activations") and not has_leaf(store, "wide", "geometry")
    assert open_study(store)["wide/activations"].sizes["dim"] == 7
    assert open_cube(store, models=["tiny"]).sizes["layer"] == 4
    assert verify_study(store, sample=None, quiet=True).empty


def test_a_small_study_on_a_file_server(server):
    pytest.importorskip("requests")
    made = activations(1, 8, 3, run=8)
    back = write(made, f"{server}/small")
    xr.testing.assert_equal(back.load(), made.compute())
    assert list(xr.open_datatree(f"{server}/small", engine="zarr", chunks={}).children) == ["tiny"]


def test_resuming_refusing_and_overwriting_at_a_url(store):
    made, calls = activations(), []

    def failing(block):
        if block.size:
            calls.append(1)
        if len(calls) == 5:
            raise OSError("the line went dead")
        return block

    torn = made.assign(hidden=made.hidden.copy(data=made.hidden.data.map_blocks(failing)))
    with dask.config.set(scheduler="sync"):
        calls.clear()
        with pytest.raises(OSError, match="line"):
            write(torn, store)
        with pytest.raises(IncompleteError):
            open_leaf(store, "tiny", "activations")
        calls.extend([1] * 100)
        write(torn, store)
    assert len(calls) == 105 + 12 - 4
    with pytest.raises(SettingsError, match="made: stored 'once', now 'twice'"):
        write(made, store, made="twice")
    again = write(activations(seed=4), store, made="twice", overwrite=True)
    xr.testing.assert_equal(again.load(), activations(seed=4).compute())


def test_plain_xarray_at_a_url(store):
    write(activations(), store)
    tree = xr.open_datatree(store, engine="zarr", chunks={})
    leaf = tree["tiny/activations"].to_dataset()
    assert float(leaf.hidden.sum()) == pytest.approx(float(activations().hidden.sum()), rel=1e-5)
    assert set(activations().coords) == set(leaf.coords)


def test_a_store_opened_to_be_read_takes_no_writes(store):
    write(activations(), store)
    read_only = open_zarr_store(store, read_only=True)
    assert read_only.read_only
    with pytest.raises(FileNotFoundError):
        open_study(store + "-elsewhere")


def test_a_dump_at_a_url_is_imported(store):
    import numpy as np
    import pandas as pd
    import zarr

    states = np.random.default_rng(0).normal(size=(2, 12, 3)).astype(np.float32)
    zarr.create_array(f"{store}-dump", data=states)
    labels = pd.DataFrame({"document": np.arange(12) // 3, "split": [0] * 6 + [1] * 6})
    cube = import_activations(f"{store}-dump", labels, store, model="theirs", progress=False)
    np.testing.assert_array_equal(cube.hidden.values[0], states)
