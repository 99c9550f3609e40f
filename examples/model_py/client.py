"""Send a text with private data through the model `mask`.

python examples/model_py/client.py "Write to ann@example.com about order 12345678."
"""

import argparse

import numpy as np
import tritonclient.http as triton


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default="Write to ann@example.com about order 12345678.")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int, default=32)
    given = parser.parse_args()
    text = triton.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[given.text]], dtype=object))
    tokens = triton.InferInput("max_tokens", [1, 1], "INT32")
    tokens.set_data_from_numpy(np.array([[given.max_tokens]], dtype=np.int32))
    with triton.InferenceServerClient(given.url.removeprefix("http://")) as client:
        result = client.infer("mask", [text, tokens])
    print(f"hidden: {result.as_numpy('hidden').reshape(-1)[0]}")
    print(result.as_numpy("text_output").reshape(-1)[0].decode())


if __name__ == "__main__":
    main()
