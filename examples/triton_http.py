"""tritonclient over HTTP: the tensors of a text model.

python examples/triton_http.py "One, two, three,"
"""

import argparse

import numpy as np
import tritonclient.http as triton


def tensor(name: str, value: np.ndarray, datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, list(value.shape), datatype)
    made.set_data_from_numpy(value)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="One, two, three,")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", help="default: the first text model that the server lists")
    parser.add_argument("--max-tokens", type=int, default=16)
    given = parser.parse_args()
    with triton.InferenceServerClient(given.url.removeprefix("http://")) as client:
        model = given.model or first_text_model(client)
        inputs = [
            tensor("text_input", np.array([[given.prompt]], dtype=object), "BYTES"),
            tensor("max_tokens", np.array([[given.max_tokens]], dtype=np.int32), "INT32"),
            tensor("return_log_probs", np.array([[True]]), "BOOL"),
        ]
        outputs = [triton.InferRequestedOutput("text_output")]
        outputs.append(triton.InferRequestedOutput("cum_log_probs"))
        result = client.infer(model, inputs, outputs=outputs)
        print(result.as_numpy("text_output").reshape(-1)[0].decode())
        print(f"log-probability: {result.as_numpy('cum_log_probs').reshape(-1)[0]:.3f}")


def first_text_model(client: triton.InferenceServerClient) -> str:
    """Return the first ready model that takes a text."""
    for model in client.get_model_repository_index():
        if model.get("state") == "READY":
            inputs = client.get_model_metadata(model["name"])["inputs"]
            if "text_input" in [found["name"] for found in inputs]:
                return model["name"]
    raise SystemExit("the server has no model with the input text_input")


if __name__ == "__main__":
    main()
