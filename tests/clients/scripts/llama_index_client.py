"""llama-index's OpenAILike: chat, complete and their streams."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def main(base_url: str, model: str, question: str) -> dict[str, object]:
    chat = OpenAILike(
        model=model,
        api_base=base_url,
        api_key="unused",
        is_chat_model=True,
        temperature=0,
        max_tokens=24,
    )
    text = OpenAILike(
        model=model, api_base=base_url, api_key="unused", temperature=0, max_tokens=24
    )
    messages = [ChatMessage(role="user", content=question)]
    return {
        "chat": chat.chat(messages).message.content,
        "chat stream": "".join([piece.delta for piece in chat.stream_chat(messages)]),
        "complete": text.complete(question).text,
        "complete stream": "".join([piece.delta for piece in text.stream_complete(question)]),
    }


print(json.dumps(main(*sys.argv[1:])))
