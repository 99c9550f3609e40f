"""tritonclient over HTTP: a text model by its tensors, or as JSON if it is decoupled.

    python examples/triton_http.py "One, two, three,"

A decoupled model can send several responses for one request. Triton's HTTP protocol has no
`infer` for such models; their answer comes from the route `generate`.
"""

import argparse
import json
import urllib.request

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
        config = client.get_model_config(model)
        if config.get("model_transaction_policy", {}).get("decoupled"):
            url = f"{given.url}/v2/models/{model}/generate"
            text, likelihood = generate(url, given.prompt, given.max_tokens)
        else:
            text, likelihood = infer(client, model, given.prompt, given.max_tokens)
    print(text)
    print(f"log-probability: {likelihood:.3f}")


def infer(
    client: triton.InferenceServerClient, model: str, prompt: str, max_tokens: int
) -> tuple[str, float]:
    inputs = [
        tensor("text_input", np.array([[prompt]], dtype=object), "BYTES"),
        tensor("max_tokens", np.array([[max_tokens]], dtype=np.int32), "INT32"),
        tensor("return_log_probs", np.array([[True]]), "BOOL"),
    ]
    outputs = [triton.InferRequestedOutput("text_output")]
    outputs.append(triton.InferRequestedOutput("cum_log_probs"))
    result = client.infer(model, inputs, outputs=outputs)
    text = result.as_numpy("text_output").reshape(-1)[0].decode()
    return text, float(result.as_numpy("cum_log_probs").reshape(-1)[0])


def generate(url: str, prompt: str, max_tokens: int) -> tuple[str, float]:
    body = {"text_input": prompt, "max_tokens": max_tokens, "return_log_probs": True}
    with urllib.request.urlopen(url, json.dumps(body).encode()) as answer:
        fields = json.load(answer)
    return fields["text_output"], fields["cum_log_probs"]


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
