"""examples/serving/client.py against a server with the exported model behind the real protocol.

And examples/ask.py, which asks the export itself.
"""

import json
import runpy
import subprocess
import sys
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import tensorflow as tf
import tensorflow_text  # noqa: F401 (operators of the tokenizer)
from tensorflow_serving.apis import (
    predict_pb2,
    prediction_service_pb2_grpc,
)

from tf_teaforn.export import export
from tf_teaforn.inference import load

EXAMPLES = Path(__file__).parents[1] / "examples"
SENTENCES = ["the cat sees the dog today", "", "un œuf — 卵"]


class PredictionService(prediction_service_pb2_grpc.PredictionServiceServicer):
    """TF Serving's gRPC service over one signature."""

    def __init__(self, signature):
        self.signature = signature

    def Predict(self, request, context):  # noqa: N802 (the protocol's name)
        if request.model_spec.name != "translate":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        inputs = {name: tf.make_ndarray(value) for name, value in request.inputs.items()}
        response = predict_pb2.PredictResponse()
        for name, value in self.signature(**inputs).items():
            response.outputs[name].CopyFrom(tf.make_tensor_proto(value.numpy()))
        return response


def rest_handler(signature):
    """TF Serving's REST API, column format: {"inputs": …} -> {"outputs": {name: …}}."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802 (the library's name)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = signature(inputs=tf.constant(body["inputs"]))
            outputs = {name: value.numpy().tolist() for name, value in answer.items()}
            self.send_response(200 if self.path == "/v1/models/translate:predict" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"outputs": outputs}, default=bytes.decode).encode())

        def log_message(self, *arguments):
            pass

    return Handler


@pytest.fixture(scope="module", params=[1, 2])
def n_best(request):
    return request.param


@pytest.fixture(scope="module")
def version(n_best, trained, tmp_path_factory):
    return export(trained.model_dir, tmp_path_factory.mktemp("export"), n_best=n_best)


@pytest.fixture(scope="module")
def signature(version):
    return tf.saved_model.load(str(version)).signatures["serving_default"]


@pytest.fixture(scope="module")
def expected(n_best, trained):
    """Lines: every sentence, and below it its outputs."""
    found = load(trained.model_dir, n_best=n_best).decode(SENTENCES)
    lines = []
    for sentence, hypotheses in zip(SENTENCES, found, strict=True):
        lines += [sentence, *(f"  -> {text}" for text, _, _ in hypotheses)]
    return lines


@pytest.fixture
def lines_of(n_best, capsys, monkeypatch):
    """What a script prints: as it is started, and once more in this process, which is sooner."""

    def run(script, *arguments):
        command = [str(EXAMPLES / script), *arguments, *SENTENCES]
        if n_best == 1:
            command = [sys.executable, *command]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return done.stdout.splitlines()
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(command[0], run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def client_lines(lines_of):
    """What examples/serving/client.py prints, without the scores."""

    def run(*arguments):
        lines = lines_of("serving/client.py", "--model=translate", *arguments)
        return [line.rsplit("  (", 1)[0] for line in lines]

    return run


def test_ask(version, expected, lines_of):
    assert lines_of("ask.py", str(version.parent)) == expected


def test_grpc(signature, expected, client_lines):
    server = grpc.server(futures.ThreadPoolExecutor(2))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        PredictionService(signature), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert client_lines("--grpc", f"--host=127.0.0.1:{port}") == expected
    finally:
        server.stop(None)


def test_rest(signature, expected, client_lines):
    server = ThreadingHTTPServer(("127.0.0.1", 0), rest_handler(signature))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        host = f"--host=127.0.0.1:{server.server_port}"
        assert client_lines(host) == expected
    finally:
        server.shutdown()
