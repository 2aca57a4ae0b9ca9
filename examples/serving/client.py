"""Asks a TensorFlow Serving server: client.py [--grpc] --model=NAME "a sentence" …

REST needs Python alone, gRPC tensorflow and tensorflow-serving-api.
"""

import argparse
import json
import urllib.request


def ask_rest(host, model, sentences):
    """Returns (outputs, scores) by POST /v1/models/<model>:predict; `host` is "name:port".

    Both are lists of lists, best first: of several for each sentence if the export has n_best > 1.
    """
    request = urllib.request.Request(
        f"http://{host}/v1/models/{model}:predict",
        json.dumps({"inputs": sentences}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)["outputs"]
    return [
        [row if isinstance(row, list) else [row] for row in answer[name]]
        for name in ("outputs", "scores")
    ]


def ask_grpc(host, model, sentences):
    """The same by PredictionService.Predict."""
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.model_spec.signature_name = "serving_default"
    request.inputs["inputs"].CopyFrom(tf.make_tensor_proto(sentences, dtype=tf.string))
    with grpc.insecure_channel(host) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(request, timeout=60).outputs
    outputs, scores = (
        tf.make_ndarray(answer[name]).reshape(len(sentences), -1).tolist()
        for name in ("outputs", "scores")
    )
    return [[text.decode() for text in row] for row in outputs], scores


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="name that the server knows the model by")
    parser.add_argument("--host", help="name:port; default localhost:8501, with --grpc :8500")
    parser.add_argument("--grpc", action="store_true", help="gRPC instead of REST")
    parser.add_argument("sentences", nargs="+")
    arguments = parser.parse_args()
    ask = ask_grpc if arguments.grpc else ask_rest
    host = arguments.host or ("localhost:8500" if arguments.grpc else "localhost:8501")
    outputs, scores = ask(host, arguments.model, arguments.sentences)
    for sentence, *best in zip(arguments.sentences, outputs, scores, strict=True):
        print(sentence)
        for output, score in zip(*best, strict=True):
            print(f"  -> {output}  ({score:.3f})")


if __name__ == "__main__":
    main()
