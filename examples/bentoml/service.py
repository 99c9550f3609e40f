"""A BentoML service that streams text from the server's gRPC port (TRITON_URL)."""

import os
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import bentoml
import numpy as np
import tritonclient.grpc.aio as triton


@bentoml.service(traffic={"timeout": 300})
class Writer:
    def __init__(self) -> None:
        self.address = os.environ.get("TRITON_URL", "localhost:8001")
        self.model = os.environ.get("TRITON_MODEL", "ensemble")

    @bentoml.api
    async def write(self, prompt: str, max_tokens: int = 64) -> AsyncGenerator[str, None]:
        request = {"model_name": self.model, "inputs": inputs(prompt, max_tokens)}
        async with triton.InferenceServerClient(self.address) as client:
            async for result, error in client.stream_infer(only(request)):
                if error is not None:
                    raise error
                if (text := result.as_numpy("text_output")) is not None:
                    yield text.reshape(-1)[0].decode()


async def only(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def inputs(prompt: str, max_tokens: int) -> list[triton.InferInput]:
    values = (
        ("text_input", np.array([[prompt]], dtype=object), "BYTES"),
        ("max_tokens", np.array([[max_tokens]], dtype=np.int32), "INT32"),
        ("stream", np.array([[True]]), "BOOL"),
    )
    tensors = []
    for name, value, datatype in values:
        tensor = triton.InferInput(name, list(value.shape), datatype)
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    return tensors
