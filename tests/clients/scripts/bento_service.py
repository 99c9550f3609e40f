"""A BentoML service in front of the server, as in the BentoML tutorial: one gRPC stream a call.

The variable TRITON_URL names the server's gRPC port.
"""

import os
from collections.abc import AsyncGenerator

import bentoml
import numpy as np
import tritonclient.grpc.aio as grpc_client
from tritonclient.utils import np_to_triton_dtype


@bentoml.service(traffic={"timeout": 300})
class Generation:
    def __init__(self) -> None:
        self.client: grpc_client.InferenceServerClient | None = None

    @bentoml.api
    async def generate(self, prompt: str, max_tokens: int = 128) -> AsyncGenerator[str, None]:
        if self.client is None:
            self.client = grpc_client.InferenceServerClient(os.environ["TRITON_URL"])

        async def requests():
            yield {
                "model_name": "ensemble",
                "inputs": [
                    tensor("text_input", np.array([[prompt]], object)),
                    tensor("max_tokens", np.array([[max_tokens]], np.int32)),
                    tensor("stream", np.array([[True]])),
                    tensor("temperature", np.array([[1.0]], np.float32)),
                ],
                "outputs": [grpc_client.InferRequestedOutput("text_output")],
                "request_id": "7",
            }

        async for result, error in self.client.stream_infer(inputs_iterator=requests()):
            if error is not None:
                raise error
            yield result.as_numpy("text_output")[0].decode()


def tensor(name: str, value: np.ndarray) -> grpc_client.InferInput:
    made = grpc_client.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made
