"""Embeddings and reranking with cohere, langchain-openai and litellm."""

import json
import sys

import cohere
import litellm
from langchain_openai import OpenAIEmbeddings


def main(root: str, model: str, query: str, *documents: str) -> dict[str, object]:
    base_url = f"{root}/v1"
    langchain = OpenAIEmbeddings(
        base_url=base_url, api_key="unused", model=model, check_embedding_ctx_length=False
    )
    given = {"api_base": base_url, "api_key": "unused"}
    embedded = litellm.embedding(f"hosted_vllm/{model}", [*documents], **given)
    ranked = litellm.rerank(
        f"hosted_vllm/{model}", query, [*documents], api_base=root, api_key="unused"
    )
    second = cohere.ClientV2("unused", base_url=root).rerank(
        model=model, query=query, documents=[*documents], top_n=2
    )
    first = cohere.Client("unused", base_url=root).rerank(
        model=model, query=query, documents=[*documents], return_documents=True
    )
    return {
        "langchain": langchain.embed_documents([*documents]),
        "litellm": [one["embedding"] for one in embedded.data],
        "litellm rerank": [(one["index"], one["relevance_score"]) for one in ranked.results],
        "cohere v2": [(one.index, one.relevance_score) for one in second.results],
        "cohere v1": [(one.index, one.relevance_score) for one in first.results],
        "cohere texts": [one.document.text for one in first.results],
    }


print(json.dumps(main(*sys.argv[1:])))
