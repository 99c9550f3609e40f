"""Hide e-mail addresses and long numbers, and send the rest to the language model."""

import json
import re

import numpy as np
import triton_python_backend_utils as pb_utils

PRIVATE = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+|\d{6,}")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.model = config["parameters"]["model"]["string_value"]

    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
        masked, hidden = PRIVATE.subn("***", texts.reshape(-1)[0].decode())
        inner = pb_utils.InferenceRequest(
            model_name=self.model,
            requested_output_names=["text_output"],
            inputs=[
                pb_utils.Tensor("text_input", np.array([[masked.encode()]], dtype=object)),
                pb_utils.get_input_tensor_by_name(request, "max_tokens"),
            ],
        )
        text = b""
        # decoupled: the language model can send several responses; without `stream` it sends one
        for answer in await inner.async_exec(decoupled=True):
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            if answer.output_tensors():
                output = pb_utils.get_output_tensor_by_name(answer, "text_output")
                text += output.as_numpy().reshape(-1)[0]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text_output", np.array([[text]], dtype=object)),
                pb_utils.Tensor("hidden", np.array([[hidden]], dtype=np.int32)),
            ]
        )
