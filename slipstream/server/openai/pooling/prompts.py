"""The tokens of texts that are pooled.

A text gets the special tokens of the model's tokenizer. `truncate_prompt_tokens` keeps the first
tokens of a text and the special tokens around it, as tokenizers do. -1 means the model's maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.request_fields.field import Range
from slipstream.server.openai.errors import ApiError, field_error
from slipstream.server.openai.models import OpenAIModel
from slipstream.server.openai.prompts import Prompt, check_characters, check_tokens
from slipstream.server.openai.sampling import check_bound
from slipstream.server.text.folder import TokenizerError
from slipstream.server.text.threads import in_thread_if_long

MAX_PROMPTS = 2048  # OpenAI's limit of one call


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompts of one call. `limit`: most tokens that are kept; None: not truncated."""

    model: OpenAIModel
    limit: int | None

    @staticmethod
    def create(model: OpenAIModel, truncate: int | None) -> PromptReader:
        limit = model.longest_prompt if truncate == -1 else truncate
        if limit is not None:
            check_bound("truncate_prompt_tokens", limit, Range(1))
        return PromptReader(model, limit)

    async def read(self, name: str, prompt: Prompt) -> list[int]:
        """Return the tokens of a text or of token ids. `name`: the field, for errors."""
        tokenizer = self.model.tokenizer
        if isinstance(prompt, str):
            tokens = await self._frame(name, [prompt], tokenizer.affixes)
        else:
            tokens = prompt if self.limit is None else prompt[: self.limit]
            check_tokens(name, tokens, self.model)
            try:
                tokenizer.check_ids(tokens)
            except TokenizerError as error:
                raise ApiError(f"{name}: {error}", name) from error
        check_tokens(name, tokens, self.model)
        return tokens

    async def read_pair(self, name: str, first: str, second: str) -> list[int]:
        """Return the tokens of two texts for a model that scores pairs."""
        tokens = await self._frame(name, [first, second], self.model.tokenizer.pair_affixes)
        check_tokens(name, tokens, self.model)
        return tokens

    async def _frame(
        self, name: str, texts: Sequence[str], affixes: Sequence[list[int]]
    ) -> list[int]:
        """Return the tokens of texts, each after one of the affixes; the last one ends the prompt.

        Only the last text is truncated.
        """
        parts = [await self._encode(name, text) for text in texts]
        if self.limit is not None:
            others = sum(map(len, affixes)) + sum(map(len, parts[:-1]))
            if others > self.limit:
                raise field_error(
                    "truncate_prompt_tokens",
                    f"leaves no room for {name}: {others} tokens are fixed",
                )
            parts[-1] = parts[-1][: self.limit - others]
        tokens: list[int] = []
        for affix, part in zip(affixes, [*parts, []], strict=True):
            tokens += affix
            tokens += part
        return tokens

    async def _encode(self, name: str, text: str) -> list[int]:
        check_characters(name, len(text), self.model, cut=self.limit is not None)
        try:
            return await in_thread_if_long(len(text), self.model.tokenizer.encode, text, False)
        except TokenizerError as error:
            raise ApiError(f"{name}: {error}", name) from error
