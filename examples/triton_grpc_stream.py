"""tritonclient over gRPC: tokens as they come, and a request that is cancelled.

python examples/triton_grpc_stream.py "Once upon a time" --stop-after 20
"""

import argparse
import queue

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def tensor(name: str, value: np.ndarray, datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, list(value.shape), datatype)
    made.set_data_from_numpy(value)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--url", default="localhost:8001", help="the gRPC port")
    parser.add_argument("--model", default="ensemble", help="a model with the input text_input")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--stop-after", type=int, default=0, help="cancel after so many pieces")
    given = parser.parse_args()
    answers: queue.Queue = queue.Queue()
    inputs = [
        tensor("text_input", np.array([[given.prompt]], dtype=object), "BYTES"),
        tensor("max_tokens", np.array([[given.max_tokens]], dtype=np.int32), "INT32"),
        tensor("stream", np.array([[True]]), "BOOL"),
    ]
    with triton.InferenceServerClient(given.url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(given.model, inputs, enable_empty_final_response=True)
        pieces = 0
        while True:
            answer = answers.get()
            if isinstance(answer, InferenceServerException):
                print(f"\nerror: {answer.message()}")
                break
            if (text := answer.as_numpy("text_output")) is not None:
                print(text.reshape(-1)[0].decode(), end="", flush=True)
                pieces += 1
            if answer.get_response().parameters["triton_final_response"].bool_param:
                print(f"\n({pieces} pieces)")
                break
            if pieces == given.stop_after:
                # the engine stops to work on the request, and frees its memory
                client.stop_stream(cancel_requests=True)
                print(f"\n(cancelled after {pieces} pieces)")
                break


if __name__ == "__main__":
    main()
